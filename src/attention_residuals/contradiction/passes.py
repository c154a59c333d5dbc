"""One recorded forward pass of the study: what is measured at every token, and that nothing moves before a plant."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import ConfigError, DataError
from attention_residuals.layers.tap import EMBEDDING, Chain, Onlooker, Read, Tap, Write
from attention_residuals.models import LanguageModel
from attention_residuals.stats import clr, embedding_share, normalised_entropy, reach_back
from attention_residuals.trace import Intervention, Means, Recorder, SiteTrace, Static, Trace
from attention_residuals.trace.reads import contribution

__all__ = ["ROUTING", "SHARES", "Passed", "by_item", "check_null", "early_sources", "passed"]

ROUTING = ("weight", "clr", "early mass", "reach back", "entropy")
"""What is measured of weights: the embedding's weight and clr (nats), the weight on sources that were finished
in the first third of the layers, the weight on sources further back than a third of all sublayers, and the
entropy as a share of the largest one."""

SHARES = ("norm share", "projection share")
"""What is measured of contributions, in models with all weights 1 as well: the embedding's share of their
lengths, and of the state."""


class Passed(NamedTuple):
    """What one pass left, for each site but the first, which has no choice."""

    logits: Float[Tensor, "B T V"]
    sites: tuple[str, ...]
    cells: tuple[str, ...]
    """A site and a source, as in ``"L3.mlp < embedding"``; none in models with all weights 1."""
    numbers: dict[str, Float[Tensor, "R B T"]]
    by_cell: dict[str, Float[Tensor, "C B T"]]
    states: Float[Tensor, "R B T D"]


class _States(Onlooker):
    """Keeps the state of each read, and what the embedding wrote."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []
        self.embedding: Tensor | None = None

    def read(self, read: Read) -> Read:
        state = contribution(read.weights[0], read.values[0])
        for weight, value in zip(read.weights[1:], read.values[1:], strict=True):
            state = state + contribution(weight, value)
        self.states.append(state.detach())
        return read

    def write(self, write: Write) -> Write:
        if write.writer == EMBEDDING:
            self.embedding = write.output.detach()
        return write


def passed(model: LanguageModel, tokens: Int[Tensor, "B T"], *, static: Means | None = None) -> Passed:
    """Runs a model once, without gradients, and measures every token.

    Args:
        model: Of any rule that keeps the embedding a source of its own, or of standard residuals.
        tokens: Texts of the same length.
        static: Weights are replaced by these means.

    Raises:
        ConfigError: A rule that does neither.
    """
    recorder, states = Recorder(), _States()
    taps: list[Tap] = [recorder, states]
    if static is not None:
        taps.insert(0, Intervention(model, [Static()], references={"mean": static}).tap())
    with torch.no_grad():
        logits = model(tokens, tap=Chain(*taps))
    trace = recorder.trace(model)
    sites = tuple(site for site in trace if len(site.writers) > 1)
    kept = torch.stack(states.states[len(trace) - len(sites) :])
    if all(EMBEDDING in site.source_names for site in sites):
        numbers, cells, by_cell = _routed(trace, sites)
    elif trace.rule["type"] == "StandardResidual":
        assert states.embedding is not None
        numbers, cells, by_cell = _summed(trace, sites, kept, states.embedding), (), {}
    else:
        raise ConfigError(
            got=f"a model with {trace.rule['type']}",
            expected="AttnRes or standard residuals",
            do="the study compares those",
        )
    return Passed(logits, tuple(site.name for site in sites), cells, numbers, by_cell, kept)


def _routed(
    trace: Trace, sites: tuple[SiteTrace, ...]
) -> tuple[dict[str, Tensor], tuple[str, ...], dict[str, Tensor]]:
    num_layers = (len(trace.writers) - 1) // 2
    ratios = [clr(trace, site.name) for site in sites]
    at = [site.source_names.index(EMBEDDING) for site in sites]
    early = [site.weight_shares[early_sources(site, num_layers)].sum(0) for site in sites]
    numbers = {
        "weight": torch.stack([embedding_share(trace, site.name) for site in sites]),
        "clr": torch.stack([ratio[own] for ratio, own in zip(ratios, at, strict=True)]),
        "early mass": torch.stack(early),
        "reach back": torch.stack(
            [reach_back(trace, site.name, sublayers=max(1, 2 * num_layers // 3)) for site in sites]
        ),
        "entropy": torch.stack([normalised_entropy(trace, site.name) for site in sites]),
        "norm share": torch.stack([site.norm_shares[own] for site, own in zip(sites, at, strict=True)]),
        "projection share": torch.stack([site.projections[own] for site, own in zip(sites, at, strict=True)]),
    }
    by_cell = {
        "clr": torch.cat(ratios),
        "weight": torch.cat([site.weight_shares for site in sites]),
        "norm share": torch.cat([site.norm_shares for site in sites]),
        "projection share": torch.cat([site.projections for site in sites]),
    }
    cells = tuple(f"{site.name} < {source}" for site in sites for source in site.source_names)
    return numbers, cells, by_cell


def _summed(
    trace: Trace, sites: tuple[SiteTrace, ...], states: Tensor, embedding: Tensor
) -> dict[str, Tensor]:
    """The same shares where every weight is 1, so that a contribution is what was written."""
    norms = [trace.writer_norms[: len(site.writers)] for site in sites]
    along = (states * embedding).sum(-1) / states.square().sum(-1)
    return {
        "norm share": torch.stack([norm[0] / norm.sum(0) for norm in norms]),
        "projection share": along,
    }


def early_sources(site: SiteTrace, num_layers: int) -> list[int]:
    """Numbers the sources of a read that were finished in the first third of the layers, the embedding apart.

    Args:
        site: A read.
        num_layers: Of the model.

    Example:
        >>> from attention_residuals import Decoder, presets, record
        >>> trace = record(Decoder(presets.scaled(9, vocab_size=300)), torch.tensor([[5, 6, 7]]))
        >>> [trace["output"].source_names[number] for number in early_sources(trace["output"], 9)]
        ['B1']
    """
    last = 2 * max(1, num_layers // 3)  # writer 0 is the embedding, then there are two for each layer
    newest = [int(row.nonzero().max()) for row in site.membership]
    return [number for number, writer in enumerate(newest) if 0 < writer <= last]


def by_item(rows: Tensor) -> Tensor:
    """Splits rows, two for each item, into [items, u, ...].

    Example:
        >>> by_item(torch.zeros(6, 5)).shape
        torch.Size([3, 2, 5])
    """
    return rows.reshape(-1, 2, *rows.shape[1:])


def check_null(one: Passed, other: Passed, before: Bool[Tensor, "B T"], names: tuple[str, ...]) -> int:
    """Checks that two passes are the same, bit for bit, at tokens that no plant can reach.

    Args:
        one: Of texts with one planted value.
        other: Of the same texts with the other one, in the same order.
        before: True for tokens before the plant.
        names: Of the items, two rows each.

    Returns:
        How many tokens were compared.

    Raises:
        DataError: Anything differs: then the pipeline is wrong, and no number of it counts.
    """
    pairs = {"logits": (one.logits, other.logits), "states": (one.states, other.states)}
    for what, (first, second) in pairs.items():
        _require_same(what, (first - second).abs().sum(-1), before, names)
    for kind in ("numbers", "by_cell"):
        for what, first in getattr(one, kind).items():
            _require_same(what, (first - getattr(other, kind)[what]).abs(), before, names)
    return int(before.sum())


def _require_same(what: str, apart: Tensor, before: Tensor, names: tuple[str, ...]) -> None:
    apart = apart.reshape(-1, *before.shape).amax(0).masked_fill(~before, 0.0)
    if not (apart == 0).all():
        row, token = (apart != 0).nonzero()[0].tolist()
        raise DataError(
            got=f"{what} of {names[row // 2]} that differ by {apart[row, token].item():.3g} at token {token}, "
            "before the plant",
            expected="a difference of exactly 0: texts are the same up to there, and the model is causal",
            do="look for padding, dropout or kernels that are not deterministic; no number of this run counts",
        )
