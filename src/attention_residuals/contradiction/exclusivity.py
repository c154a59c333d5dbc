"""Would other weights give the same answer? How far those of single reads can move at a fixed cost.

For each read that something is claimed of, ``trace.freedom`` searches for weights at the answer token that are
as far as possible from the model's own while the prediction there stays nearly the same. It says nothing of
weights that move in several reads at once, and a search may miss what is farther.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from attention_residuals.contradiction.measurement import equal_shaped, middle_third
from attention_residuals.data.synthetic import Item
from attention_residuals.models import LanguageModel
from attention_residuals.trace import Freedom, Intervention, PatchWeights, Reference, freedom, reference_of

__all__ = ["BOUND", "NUM_SEARCHED", "Reach", "reaches", "searched_sites"]

BOUND = 0.01
"""KL(clean || edited) at the answer, nats, mean over the texts of a search."""

NUM_SEARCHED = 8
"""Items, of which the consistent and the contradictory text with upstream value a are searched."""

NUM_STEPS = 30
"""Of a search."""


class Reach(NamedTuple):
    """How far the weights of one read can move at the answer; distances are total variations, 0 to 1."""

    site: str
    moved: float
    """Mean over items of what the search reached."""
    least: float
    """Of an item."""
    most: float
    """Of an item."""
    moved_same: float
    """Mean with 0 for texts whose first answer does not stay: that far, surely, without another answer."""
    farthest: float
    """What any weights could reach, mean over items."""
    pair: float
    """Between the two texts of a pair, mean over items: how far the contradiction moves them."""
    divergence: float
    """Mean over items, nats."""
    largest_divergence: float
    """Of a text, nats."""
    same_answers: float
    """Share of texts whose first answer stays."""


def searched_sites(sites: Sequence[str], routes: Sequence[str]) -> tuple[str, ...]:
    """Names the reads of the primary number and those of routes, in the model's order.

    Example:
        >>> searched_sites(["L1.attention", "L1.mlp", "L2.attention", "output"], ["output < embedding"])
        ('L1.attention', 'output')
    """
    wanted = {sites[number] for number in middle_third(sites)} | {route.split(" < ")[0] for route in routes}
    return tuple(site for site in sites if site in wanted)


def reaches(
    model: LanguageModel, items: Sequence[Item], sites: Sequence[str], *, bound: float = BOUND
) -> tuple[Reach, ...]:
    """Searches every read by itself.

    Args:
        model: Whose weights are shares of 1.
        items: One or more.
        sites: Such as ``"L3.attention"``.
        bound: The most that the mean KL at the answer may be, nats, above 0.
    """
    groups = [_Answers(model, group) for _, group in equal_shaped(items)]
    return tuple(_reach(site, [group.searched(site, bound) for group in groups]) for site in sites)


def _reach(site: str, parts: Sequence[dict[str, Tensor]]) -> Reach:
    found = {name: np.concatenate([part[name].double().cpu().numpy() for part in parts]) for name in parts[0]}
    moved = found["moved"].reshape(-1, 2).mean(1)
    return Reach(
        site=site,
        moved=float(moved.mean()),
        least=float(moved.min()),
        most=float(moved.max()),
        moved_same=float((found["moved"] * found["same"]).mean()),
        farthest=float(found["farthest"].mean()),
        pair=float(found["pair"].mean()),
        divergence=float(found["divergence"].mean()),
        largest_divergence=float(found["divergence"].max()),
        same_answers=float(found["same"].mean()),
    )


class _Answers:
    """Items of one shape up to the answer, two texts each: consistent and contradictory."""

    def __init__(self, model: LanguageModel, items: Sequence[Item]) -> None:
        self.model, self.answer = model, items[0].places["answer"]
        # What comes later cannot reach the answer.
        ids = np.stack([item.ids[0, :, : self.answer + 1] for item in items])
        self.tokens = torch.from_numpy(ids).flatten(0, 1).to(next(model.parameters()).device)
        self.own: Reference = reference_of(model, self.tokens)

    def searched(self, site: str, bound: float) -> dict[str, Tensor]:
        """Searches one read; numbers of each text, and of each pair."""
        counted = torch.zeros_like(self.tokens, dtype=torch.bool)
        counted[:, self.answer] = True
        found = freedom(self.model, self.tokens, site, divergence=bound, num_steps=NUM_STEPS, counted=counted)
        clean, weights = (kept[..., self.answer] for kept in (found.clean_weights, found.weights))
        before, after = (self._predicted(site, found, kept) for kept in (found.clean_weights, found.weights))
        return {
            "moved": (weights - clean).abs().sum(0) / 2,
            "farthest": 1 - clean.amin(0),
            "pair": (clean[:, 1::2] - clean[:, 0::2]).abs().sum(0) / 2,
            "divergence": (before.exp() * (before - after)).sum(-1).clamp_min(0.0),
            "same": before.argmax(-1) == after.argmax(-1),
        }

    def _predicted(self, site: str, found: Freedom, weights: Tensor) -> Tensor:
        """Predicts the answer with other weights at one read: log-probabilities."""
        read = self.own.reads[site]._replace(weights=weights)
        changed = replace(self.own, reads={**self.own.reads, site: read})
        edit = PatchWeights(sites=site, reference="changed", positions=(f"{self.answer}..",))
        with torch.no_grad():
            tap = Intervention(self.model, [edit], references={"changed": changed}).tap()
            logits: Tensor = self.model(self.tokens, tap=tap)
        return logits[:, self.answer].double().log_softmax(-1)
