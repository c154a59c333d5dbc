"""Two passes beside one another, as the document that a page shows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.page.arrays import encoded
from attention_residuals.page.content import Recorded
from attention_residuals.page.traces import mask_of
from attention_residuals.stats import pair_distance
from attention_residuals.trace import Trace, divergence

__all__ = ["pair_payload"]


def pair_payload(passes: Sequence[Recorded]) -> dict[str, Any]:
    """Makes the part of the document that compares the second pass with the first.

    Args:
        passes: First, second, and the control where there is one.

    Returns:
        ``aligned`` (token by token; ``why`` not), ``divergence`` and ``control`` (Jensen-Shannon divergence
        from the first pass [sites, B, T], nats), ``prediction`` (KL from the first pass's predictions
        [B, T], nats). What is not there is None: averages over tokens compare still.
    """
    first, second = passes[0], passes[1]
    try:
        found = _divergences(first.trace, second.trace)
        control = _divergences(first.trace, passes[2].trace) if len(passes) > 2 else None
    except ConfigError as error:
        return {"aligned": False, "why": error.got, "divergence": None, "control": None, "prediction": None}
    both = None not in (first.logits, second.logits)
    return {
        "aligned": True,
        "why": "",
        "divergence": encoded(found),
        "control": None if control is None else encoded(control),
        "prediction": _moved(first, second) if both else None,
    }


def _divergences(first: Trace, other: Trace) -> Tensor:
    names = [[site.name for site in trace] for trace in (first, other)]
    if names[0] != names[1]:
        raise ConfigError(
            got=f"{len(names[0])} sites and {len(names[1])} others",
            expected="the same sites",
            do="compare passes of models with the same rule and depth",
        )
    found = torch.stack([pair_distance(first, other, name).divergence for name in names[0]])
    return found.masked_fill(~(mask_of(first) & mask_of(other)), torch.nan)


def _moved(first: Recorded, second: Recorded) -> dict[str, Any] | None:
    assert first.logits is not None
    assert second.logits is not None
    if first.logits.shape != second.logits.shape:
        return None
    moved = divergence(first.logits.detach().cpu(), second.logits.detach().cpu()).values
    return encoded(moved.masked_fill(~mask_of(first.trace), torch.nan))
