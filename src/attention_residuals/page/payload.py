"""The document that a page shows: everything as JSON, all numbers from traces and statistics."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attention_residuals.configs import encode
from attention_residuals.page.arrays import encoded, require_finite
from attention_residuals.page.content import PageContent, Recorded
from attention_residuals.page.pairs import pair_payload
from attention_residuals.page.report import section_payload
from attention_residuals.page.traces import mask_of, trace_payload
from attention_residuals.trace import LensReading, Receipt, Swept, Trace, source_identity

__all__ = ["FORMAT", "payload"]

FORMAT = 1
NUM_TOP = 5
"""Of the likeliest next tokens that are kept."""


def payload(content: Trace | Recorded | PageContent) -> dict[str, Any]:
    """Makes the document that a page shows, which JSON can hold.

    Args:
        content: A trace, a pass with its predictions, or all that a page can show.

    Returns:
        ``format``, ``title``, ``lead``, ``about``, ``sections`` (see ``Section``), ``traces`` (one to three:
        first, second, control), ``pair`` (distances, where there are two), ``effects`` and ``receipts``
        (lines of tables), and ``vocabulary`` (texts of the token ids that predictions name). Arrays are
        ``{"type", "shape", "data"}``: float32 or int32, see ``page.arrays``.

    Raises:
        NonFiniteError: NaN or infinity among weights, norms or predictions; it names the token.

    Example:
        >>> import torch
        >>> from attention_residuals import Decoder, presets, record
        >>> trace = record(Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]]))
        >>> found = payload(trace)
        >>> found["format"], [site["name"] for site in found["traces"][0]["sites"]][:2]
        (1, ['L0.attention', 'L0.mlp'])
    """
    if not isinstance(content, PageContent):
        content = PageContent(first=content)
    passes = content.recorded
    traces = [trace_payload(one.trace, one.name) for one in passes]
    named: set[int] = set()
    for one, found in zip(passes, traces, strict=True):
        found["predictions"] = None if one.logits is None else _predictions(one.logits, one.trace, named)
        found["lens"] = None if one.lens is None else _lens(one.lens, one.trace, named)
    return {
        "format": FORMAT,
        "title": content.title or _title(passes),
        "lead": content.lead,
        "about": {**content.about},
        "sections": [section_payload(section) for section in content.sections],
        "traces": traces,
        "pair": pair_payload(passes) if len(passes) > 1 else None,
        "effects": [_effect(swept) for swept in content.effects],
        "receipts": [_receipt(receipt) for receipt in content.receipts],
        "vocabulary": _vocabulary(content.spell, sorted(named)),
    }


def _title(passes: Sequence[Recorded]) -> str:
    if not passes:
        return "Report"
    return "Depth routing" if len(passes) == 1 else "Depth routing, compared"


def _predictions(logits: Tensor, trace: Trace, named: set[int]) -> dict[str, Any]:
    predicted = logits.detach().cpu().float().log_softmax(-1)
    best = predicted.topk(min(NUM_TOP, predicted.shape[-1]), dim=-1)
    named.update(best.indices.unique().tolist())
    real = mask_of(trace)
    chances = require_finite(best.values.exp().movedim(-1, 0), real, "a predicted probability")
    following = torch.cat([trace.tokens[:, 1:], trace.tokens[:, :1]], dim=1)[..., None]
    own = predicted.gather(-1, following).squeeze(-1)
    return {
        "top_tokens": encoded(best.indices),
        "top_probabilities": encoded(chances.movedim(0, -1)),
        "log_probabilities": encoded(own.masked_fill(~_followed(real), torch.nan)),
    }


def _followed(real: Tensor) -> Tensor:
    """Tells which tokens are followed by another, neither of them padding."""
    found = real & real.roll(-1, dims=1)
    found[:, -1] = False
    return found


def _lens(lens: LensReading, trace: Trace, named: set[int]) -> dict[str, Any]:
    tokens, real = lens.top_tokens[..., :NUM_TOP], mask_of(trace)
    named.update(tokens.unique().tolist())
    chances = lens.top_probabilities[..., :NUM_TOP].cpu().movedim(-1, 0)
    chances = require_finite(chances, real, "a probability of the lens")
    return {
        "sites": list(lens.sites),
        "top_tokens": encoded(tokens),
        "top_probabilities": encoded(chances.movedim(0, -1)),
        "log_probabilities": encoded(lens.log_probabilities.cpu().masked_fill(~_followed(real), torch.nan)),
        "divergences": encoded(lens.divergences.cpu().masked_fill(~real, torch.nan)),
    }


def _vocabulary(spell: Callable[[Sequence[int]], Sequence[str]] | None, ids: list[int]) -> dict[str, str]:
    if spell is None:
        return {}
    return {str(token): text for token, text in zip(ids, spell(ids), strict=True)}


def _effect(swept: Swept) -> dict[str, Any]:
    """Makes a line of the table of a sweep; an edit that drops one source at one site is a cell of the map."""
    found: dict[str, Any] = {
        "edits": [_told(edit) for edit in swept.edits],
        "divergence": _finite(swept.divergence),
        "loss": _finite(swept.loss),
        "site": None,
        "source": None,
    }
    edit = swept.edits[0]
    where, what = edit.get("sites"), edit.get("sources")
    if len(swept.edits) == 1 and edit["type"] == "Drop" and isinstance(where, str) and isinstance(what, str):
        part = edit.get("part") or "in"
        found |= {"site": where if part == "in" else f"{where}.{part}", "source": source_identity(what)}
    return found


def _receipt(receipt: Receipt) -> dict[str, Any]:
    return {
        "edit": _told(encode(receipt.edit)),
        "fired": receipt.fired,
        "tokens": receipt.tokens,
        "places": list(receipt.places),
        "largest_weight_change": _finite(receipt.largest_weight_change),
        "largest_state_change": _finite(receipt.largest_state_change),
    }


def _finite(number: float) -> float | None:
    """JSON has no infinity; the divergence of a prediction that an edit made impossible is one."""
    return number if math.isfinite(number) else None


def _told(edit: dict[str, Any]) -> str:
    """Writes an edit as one line: what it is, of which sources, where, and what it says beyond "everywhere"."""
    words = [edit["type"]]
    for name, before in (("sources", ""), ("writers", ""), ("sites", "at "), ("layers", "in layers ")):
        if edit.get(name) not in (None, "*"):
            words.append(before + _listed(edit[name]))
    told = {"type", "sources", "writers", "sites", "layers"}
    rest = [
        f"{name} {_listed(value)}"
        for name, value in edit.items()
        if name not in told and value not in (None, "*") and (name, value) != ("part", "in")
    ]
    return " ".join(words) + "".join(f", {part}" for part in rest)


def _listed(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
