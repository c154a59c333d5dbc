"""Does a change of routing do anything: weights and values of the other text, put in place route by route.

A route is a site with one of its sources, as in ``"L5.mlp < embedding"``. Within equal upstream value the two
texts of a pair differ in the planted token only, so what one does at a later token can be put into the other.

- ``weights``: the route's weight is the other text's, the rest of the read keeps its proportions, and values
  stay: routing alone.
- ``values``: the value is the other text's, and weights stay: content alone.
- ``both``.
- ``random``: as much weight moves at the same sites, but to and from sources drawn at random.

``repair`` makes the contradictory text like its consistent twin, ``break`` the other way round; they are no
mirror images of each other.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from torch import Tensor

from attention_residuals.contradiction.measurement import equal_shaped
from attention_residuals.data.synthetic import VERDICTS, Item, step_tokenizer
from attention_residuals.errors import NoChangeError
from attention_residuals.models import LanguageModel
from attention_residuals.stats.units import Numbers
from attention_residuals.trace import (
    Edit,
    Intervention,
    Patch,
    PatchWeights,
    Reference,
    control,
    reference_of,
)
from attention_residuals.trace.references import ReadTensors

__all__ = [
    "DIRECTIONS",
    "METRICS",
    "Direction",
    "Moved",
    "Patching",
    "matched_mass",
    "moved_answers",
    "patched",
    "routed_weights",
    "swept_routes",
]

METRICS = ("answer", "verdict")
"""Logit of the right answer less that of the claimed one; logit of "conflict" less that of "fine"."""

Patching = Literal["weights", "values", "both", "random"]
Direction = Literal["repair", "break"]
DIRECTIONS: tuple[Direction, ...] = ("repair", "break")


class Moved(NamedTuple):
    """How far a patch moved each item, mean over both upstream values."""

    moved: dict[str, Numbers]
    """By metric: with the patch less without, logits."""
    total: dict[str, Numbers]
    """By metric: the other text's less this one's."""
    divergence: Numbers
    """KL(without || with) at the answer, nats."""
    mass: Numbers
    """Weight that the patch moved in all reads and tokens, sum of absolute differences."""


def patched(
    model: LanguageModel,
    items: Sequence[Item],
    routes: Sequence[str],
    *,
    patch: Patching,
    direction: Direction,
    seed: int = 0,
) -> Moved:
    """Patches routes at all tokens after the plant, together.

    Args:
        model: That routes.
        items: One or more.
        routes: As in ``"L5.mlp < embedding"``.
        patch: See the module.
        direction: See the module.
        seed: Of ``random``.
    """
    rows: list[list[int]] = []
    parts: list[Moved] = []
    for numbers, group in equal_shaped(items):
        rows.append(numbers)
        parts.append(_Pair(model, group, direction).patched(routes, patch, seed))
    order = np.argsort(np.concatenate(rows))
    return _joined(parts, order)


def moved_answers(
    model: LanguageModel, items: Sequence[Item], sets: Sequence[Sequence[str]], *, direction: Direction
) -> tuple[Numbers, Numbers]:
    """Patches the weights of each set of routes together, one set after the other.

    Args:
        model: That routes.
        items: One or more.
        sets: Routes that are patched at once.
        direction: See the module.

    Returns:
        How far each set moves the answer of each item, [sets, items], and how far the other text's is from it,
        [items]; logits.
    """
    moved, total = np.zeros((len(sets), len(items))), np.zeros(len(items))
    for rows, group in equal_shaped(items):
        pair = _Pair(model, group, direction)
        for number, routes in enumerate(sets):
            found = pair.patched(routes, "weights", 0)
            moved[number, rows], total[rows] = found.moved["answer"], found.total["answer"]
    return moved, total


def swept_routes(model: LanguageModel, items: Sequence[Item], routes: Sequence[str]) -> dict[str, Numbers]:
    """Patches the weights of every route by itself, in both directions.

    Args:
        model: That routes.
        items: One or more.
        routes: To be tried.

    Returns:
        For each direction, how far each route moves the answer: mean over items of the absolute change, logits.
    """
    alone = [[route] for route in routes]
    return {
        direction: np.abs(moved_answers(model, items, alone, direction=direction)[0]).mean(1)
        for direction in DIRECTIONS
    }


def routed_weights(
    own: Float[Tensor, "S B T"], other: Float[Tensor, "S B T"], sources: Sequence[int]
) -> Float[Tensor, "S B T"]:
    """Gives some sources another run's weights; the others share what is left in their own proportions.

    Example:
        >>> own, other = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
        >>> routed_weights(own[:, None, None], other[:, None, None], [0]).flatten()
        tensor([0.2000, 0.4800, 0.3200])
    """
    taken = torch.zeros(len(own), dtype=torch.bool, device=own.device)
    taken[list(sources)] = True
    if taken.all():
        return other
    left = 1 - other[taken].sum(0)
    rest = own[~taken].sum(0).clamp_min(torch.finfo(own.dtype).tiny)
    weights = own * (left / rest)
    weights[taken] = other[taken]
    # Where nothing changes, rounding must not either.
    return torch.where((other[taken] == own[taken]).all(0), own, weights)


def matched_mass(
    own: Float[Tensor, "S B T"], changed: Float[Tensor, "S B T"], generator: torch.Generator
) -> Float[Tensor, "S B T"]:
    """Moves as much weight as a change did, towards weights drawn at random.

    Where a draw lies nearer than that, the way is towards the source with the least weight.

    Args:
        own: Weights before.
        changed: Weights that the change made.
        generator: Draws one set of weights for each text.

    Example:
        >>> own, changed = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.3, 0.3])
        >>> moved = matched_mass(own[:, None, None], changed[:, None, None], torch.Generator().manual_seed(0))
        >>> (moved.flatten() - own).abs().sum()
        tensor(0.2000)
    """
    draws = -torch.rand(*own.shape[:2], 1, generator=generator).clamp_min(1e-12).log()
    target = (draws / draws.sum(0)).to(own).expand_as(own)
    mass = (changed - own).abs().sum(0)
    # No weights are farther away than all on the least one.
    farthest = torch.zeros_like(own).scatter(0, own.argmin(0, keepdim=True), 1.0)
    target = torch.where((target - own).abs().sum(0) < mass, farthest, target)
    way = target - own
    step = mass / way.abs().sum(0).clamp_min(1e-12)
    return own + step.clamp_max(1.0) * way


class _Pair:
    """Texts that are patched and those that they are patched from, of items of one shape, in one direction."""

    def __init__(self, model: LanguageModel, items: Sequence[Item], direction: Direction) -> None:
        self.model, self.items, self.places = model, items, items[0].places
        device = next(model.parameters()).device
        ids = torch.from_numpy(np.stack([item.ids for item in items])).to(device)
        matches = torch.stack([ids[:, 0, 0], ids[:, 1, 1]], 1).flatten(0, 1)
        mismatches = torch.stack([ids[:, 0, 1], ids[:, 1, 0]], 1).flatten(0, 1)
        self.tokens, donors = (mismatches, matches) if direction == "repair" else (matches, mismatches)
        self.own, self.other = reference_of(model, self.tokens), reference_of(model, donors)
        with torch.no_grad():
            self.donor_logits: Tensor = model(donors)

    def patched(self, routes: Sequence[str], patch: Patching, seed: int) -> Moved:
        """Patches routes together."""
        changed, mass = self._weights(routes, random=seed if patch == "random" else None)
        positions = (f"{self.places['plant'] + 1}..",)
        edits: list[Edit] = []
        for site, sources in _by_site(routes).items():
            if patch != "values":
                edits.append(PatchWeights(sites=site, reference="changed", positions=positions))
            if patch in ("values", "both"):
                edits.append(Patch(sites=site, sources=tuple(sources), positions=positions))
        intervention = Intervention(self.model, edits, references={"changed": changed, "paired": self.other})
        with torch.no_grad():
            logits = self.model(self.tokens, tap=intervention.tap())
        with suppress(NoChangeError):  # a pair whose routing is the same has an effect of 0, a finding
            intervention.receipts()
        return self._moved(control(self.model, self.tokens, edits), logits, mass, patch)

    def _weights(self, routes: Sequence[str], *, random: int | None) -> tuple[Reference, Tensor]:
        """Makes the run whose weights are put in place, and how much weight that moves in each text."""
        reads, after = dict(self.own.reads), self.places["plant"] + 1
        mass = torch.zeros(len(self.tokens))
        for number, (site, sources) in enumerate(_by_site(routes).items()):
            own, other = self.own.reads[site], self.other.reads[site]
            weights = routed_weights(
                own.weights, other.weights, [own.source_names.index(source) for source in sources]
            )
            if random is not None:
                generator = torch.Generator().manual_seed(1000 * random + number)
                weights = matched_mass(own.weights, weights, generator)
            reads[site] = ReadTensors(own.source_names, weights, own.values)
            mass += (weights - own.weights)[..., after:].abs().sum((0, 2)).cpu()
        changed = Reference(numbers=self.own.numbers, real=self.own.real, reads=reads, writes=self.own.writes)
        return changed, mass

    def _moved(self, before: Tensor, after: Tensor, mass: Tensor, patch: Patching) -> Moved:
        own, new, donor = (self._metrics(logits) for logits in (before, after, self.donor_logits))
        at = self.places["answer"]
        clean, edited = (logits[:, at].double().log_softmax(-1) for logits in (before, after))
        divergence = (clean.exp() * (clean - edited)).sum(-1).clamp_min(0.0)
        return Moved(
            moved={name: _by_item(new[name] - own[name]) for name in METRICS},
            total={name: _by_item(donor[name] - own[name]) for name in METRICS},
            divergence=_by_item(divergence),
            mass=_by_item(mass if patch != "values" else torch.zeros_like(mass)),
        )

    def _metrics(self, logits: Tensor) -> dict[str, Tensor]:
        fine, conflict = (int(step_tokenizer().encode(word)[0]) for word in VERDICTS)
        right = _column([item.answers for item in self.items])
        wrong = _column([item.claimed_answers[::-1] for item in self.items])
        answer = logits[:, self.places["answer"]].double().cpu()
        check = logits[:, self.places["check"]].double().cpu()
        difference = answer.gather(1, right) - answer.gather(1, wrong)
        return {"answer": difference.squeeze(1), "verdict": check[:, conflict] - check[:, fine]}


def _column(pairs: Sequence[Sequence[int]]) -> Int[Tensor, "B 1"]:
    """One id for each row, u 0 and u 1 of each item in turn."""
    return torch.tensor([one for pair in pairs for one in pair])[:, None]


def _by_site(routes: Sequence[str]) -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = {}
    for route in routes:
        site, source = route.split(" < ")
        found.setdefault(site, []).append(source)
    return found


def _by_item(rows: Tensor) -> Numbers:
    return np.asarray(rows.double().cpu().reshape(-1, 2).mean(1).numpy())


def _joined(parts: Sequence[Moved], order: npt.NDArray[np.intp]) -> Moved:
    def metric(kind: str, name: str) -> Numbers:
        return np.asarray(np.concatenate([getattr(part, kind)[name] for part in parts])[order])

    return Moved(
        moved={name: metric("moved", name) for name in METRICS},
        total={name: metric("total", name) for name in METRICS},
        divergence=np.concatenate([part.divergence for part in parts])[order],
        mass=np.concatenate([part.mass for part in parts])[order],
    )
