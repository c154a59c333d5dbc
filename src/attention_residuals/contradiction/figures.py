"""The figures of the report: only what was measured, each with what it is from below it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure

from attention_residuals.contradiction.behaviour import LEAST_SHARE
from attention_residuals.contradiction.causal import DIRECTIONS, METRICS
from attention_residuals.contradiction.claims import Claim, primary_of
from attention_residuals.plots import interval_plot, layer_profile, marked_map
from attention_residuals.stats import Interval, Routing

__all__ = ["FIGURES", "Drawn", "figures", "origin"]

Result = Mapping[str, Any]

FIGURES = ("behaviour", "primary", "profile-attention", "profile-mlp", "cells", "distance", "restoration")
"""Those that there may be; each is two files of the folder figures/."""

DISTANCES = {"distance 1": "1 step", "main": "2 steps", "distance 3": "3 steps"}
"""Sets of derived items by how far the claim is from its statement."""

BY_DISTANCE = {"derived": tuple(DISTANCES), "copied": ("copied, distance 1", "copied", "copied, distance 3")}
"""Sets of items at 1, 2 and 3 steps, by the kind of their claim."""


class Drawn(NamedTuple):
    """A figure with what the page says of it."""

    figure: Figure
    caption: str
    alt: str


def figures(result: Result, claims: Sequence[Claim]) -> dict[str, Drawn]:
    """Draws every figure of which something was measured and may be shown.

    Args:
        result: What confirm.json holds.
        claims: Of ``conclusions``; nothing is drawn of what they do not speak of.
    """
    routed = {seed: one for seed, one in result["seeds"].items() if one["routing"] is not None}
    about = {claim.about for claim in claims}
    found = {"behaviour": _behaviour(result)}
    if "routing" in about:
        found["primary"] = _primary(result, routed)
        found |= {f"profile-{kind}": _profile(result, routed, kind) for kind in ("attention", "mlp")}
        found |= {name: one for name, one in (("cells", _cells(result, routed)),) if one is not None}
        found["distance"] = _distance(result, routed)
    if "causes" in about and (drawn := _restoration(result, routed)) is not None:
        found["restoration"] = drawn
    return found


def origin(result: Result, seeds: Mapping[str, Result], counted: str) -> str:
    """Says below a figure what it is from.

    Args:
        result: What confirm.json holds.
        seeds: Those that are shown.
        counted: How many items, and at which tokens.
    """
    models = ", ".join(f"seed {seed} {one['behaviour']['model'][:12]}" for seed, one in seeds.items())
    code = ", ".join(dict.fromkeys(str(one["behaviour"]["code"])[:12] for one in seeds.values()))
    return (
        f"n = {counted}; texts of a call have one length, so nothing is padded or masked, and the plant and all "
        f"before it are left out; float32; Block models {models}; "
        f"preregistration {result['preregistration']['sha256'][:12]}; code {code}"
    )


def _behaviour(result: Result) -> Drawn:
    seeds: Result = result["seeds"]
    panels: dict[str, dict[str, dict[str, Interval]]] = {}
    for key, name in (
        ("consistent", "consistent texts answered right"),
        ("contradictory", "contradictory texts answered right"),
        ("verdict", "verdicts right"),
    ):
        rows: dict[str, dict[str, Interval]] = {}
        for family, own, seed, found in _shares(seeds):
            rows.setdefault(f"{family}, {DISTANCES[own]}", {})[f"seed {seed}"] = Interval(
                found[key], math.nan, math.nan
            )
        panels[name] = rows
    counts = {own: found["items"] for _, own, _, found in _shares(seeds)}
    counted = ", ".join(f"{number} items a family at {DISTANCES[own]}" for own, number in counts.items())
    figure = interval_plot(
        panels,
        x_label="share",
        title="What the Block models answer, by family and distance of the wrong claim",
        footer=origin(result, seeds, f"{counted}, 4 texts each, at answer and end"),
        line=LEAST_SHARE,
    )
    told = ", ".join(f"seed {seed} {one['behaviour']['answers']:.0%}" for seed, one in seeds.items())
    return Drawn(
        figure,
        f"Derived claims. The thin line is at {LEAST_SHARE:.0%}, which the gate asks for over all items of distance 2.",
        f"Marks by family and distance. Of consistent texts at distance 2 are answered right: {told}.",
    )


def _shares(seeds: Result) -> Iterator[tuple[str, str, str, Result]]:
    """Lists family, set, seed and accuracy, families together."""
    families = dict.fromkeys(
        family for one in seeds.values() for family in one["behaviour"]["accuracy"]["main"]
    )
    for family in families:
        for own in DISTANCES:
            for seed, one in seeds.items():
                yield family, own, seed, one["behaviour"]["accuracy"][own][family]


def _primary(result: Result, routed: Result) -> Drawn:
    panels = {}
    for arm, name in (("primary", "Block"), ("full", "Full")):
        rows = {f"seed {seed}": {"": _interval(one)} for seed, one in primary_of(routed, arm).items()}
        if not rows:
            continue
        together = result["over_seeds"][arm]
        if together["low"] is not None:
            rows["mean (Student)"] = {"": Interval(together["mean"], together["low"], together["high"])}
        panels[name] = rows
    gates = {seed: one["full_gate"] for seed, one in routed.items()}
    full = ", ".join(
        f"seed {seed} {one['model'][:12] if one['passed'] else 'fails the gate'}"
        for seed, one in gates.items()
    )
    below = origin(result, routed, f"{_num_items(routed)} items, at the answer token")
    figure = interval_plot(
        panels,
        x_label="crossed effect on clr of the embedding, nats",
        title="The primary number: after a contradiction, do reads shift towards the embedding (above 0)?",
        footer=f"{below}; Full models {full}",
    )
    told = "; ".join(f"seed {seed} {_told(one['routing']['primary'])}" for seed, one in routed.items())
    return Drawn(
        figure, "Intervals of 95 %: BCa over templates and items; over models Student's.", f"Block: {told}."
    )


def _profile(result: Result, routed: Result, kind: str) -> Drawn:
    lines, intervals = {}, {}
    first = 0 if kind == "mlp" else 1  # the first read of attention has no choice
    for seed, one in routed.items():
        name, profile = f"seed {seed}", one["routing"]["profile"]
        sites = [site for site in profile if site.endswith(kind)]
        lines[name] = [0.0] * first + [profile[site] for site in sites]
        if (known := one["routing"]["profile_intervals"]) is not None:
            intervals[name] = [(0.0, 0.0)] * first + [(known[site][0], known[site][1]) for site in sites]
    figure = layer_profile(
        lines,
        intervals=intervals,
        y_label="crossed effect on clr of the embedding, nats",
        title=f"Effect of a contradiction at the answer, {kind} reads",
        footer=origin(result, routed, f"{_num_items(routed)} items, at the answer token"),
    )
    ends = ", ".join(f"{name} from {min(line):+.3f} to {max(line):+.3f}" for name, line in lines.items())
    single = " The first one has a single source, so its weight cannot change." if first else ""
    bands = "Bands: 95 %, clustered by template." if intervals else "No interval of a single read was kept."
    return Drawn(figure, f"Layer by layer, {kind} reads.{single} {bands}", f"Lines: {ends}.")


def _cells(result: Result, routed: Result) -> Drawn | None:
    """Draws a map for each seed, and their mean; none where nothing moves at all."""
    found = {f"seed {seed}": one["routing"]["cells"] for seed, one in routed.items()}
    if not any(effect for one in found.values() for effect in one["effects"]):
        return None
    cells = next(iter(found.values()))["cells"]
    panels = {name: _map(cells, one["effects"]) for name, one in found.items()}
    marked = {name: _marks(panels[name], one["named"]) for name, one in found.items()}
    every = set.intersection(*(set(one["named"]) for one in found.values()))
    if len(found) > 1:
        number = len(found)
        means = [
            sum(column) / number for column in zip(*(one["effects"] for one in found.values()), strict=True)
        ]
        panels["mean"] = _map(cells, means)
        marked["mean"] = _marks(panels["mean"], every)
    figure = marked_map(
        panels,
        marked,
        unit="nats",
        meaning="may be named (max-T); mean: with every seed",
        title="Crossed effect of a contradiction on the clr of every cell",
        footer=origin(
            result, routed, f"{_num_items(routed)} items, at the answer token; m = {len(cells)} cells"
        ),
    )
    told = "; ".join(f"{name}: {', '.join(one['named']) or 'none'}" for name, one in found.items())
    return Drawn(
        figure,
        "Site (row) and source (column). Outlined: max-T p <= 0.05 over all cells, in a read that changes.",
        f"Outlined cells: {told}. With every seed: {', '.join(sorted(every)) or 'none'}.",
    )


def _map(cells: Sequence[str], effects: Sequence[float]) -> Routing:
    pairs = [cell.split(" < ") for cell in cells]
    sites, sources = (tuple(dict.fromkeys(pair[side] for pair in pairs)) for side in range(2))
    numbers = torch.full((len(sites), len(sources)), torch.nan)
    for (site, source), effect in zip(pairs, effects, strict=True):
        numbers[sites.index(site), sources.index(source)] = effect
    return Routing(sites, sources, numbers, torch.zeros_like(numbers, dtype=torch.bool))


def _marks(panel: Routing, named: Sequence[str] | set[str]) -> torch.Tensor:
    marks = torch.zeros_like(panel.is_open)
    for cell in named:
        site, source = cell.split(" < ")
        marks[panel.sites.index(site), panel.sources.index(source)] = True
    return marks


def _distance(result: Result, routed: Result) -> Drawn:
    panels: dict[str, dict[str, dict[str, Interval]]] = {}
    for kind in BY_DISTANCE:
        rows: dict[str, dict[str, Interval]] = {}
        for number, steps in enumerate(DISTANCES.values(), start=1):
            for seed, one in routed.items():
                found = one["routing"]["controls"]["kind and distance"]["numbers"]
                label = f"{kind} {number}"
                rows.setdefault(steps, {})[f"seed {seed}"] = Interval(
                    found[label], found[f"{label} low"], found[f"{label} high"]
                )
        panels[f"{kind} claims"] = rows
    measured = next(iter(routed.values()))["behaviour"]["accuracy"]
    numbers = {name: sum(one["items"] for one in families.values()) for name, families in measured.items()}
    counts = "; ".join(
        f"{', '.join(str(numbers[name]) for name in sets)} {kind} items" for kind, sets in BY_DISTANCE.items()
    )
    figure = interval_plot(
        panels,
        x_label="crossed effect on clr of the embedding, nats",
        title="The primary number by kind of claim and its distance from the statement",
        footer=origin(result, routed, f"{counts} at 1, 2, 3 steps, at the answer token"),
    )
    told = "; ".join(
        f"{kind}, {steps}, {seed} {found.estimate:+.3f}"
        for kind, rows in panels.items()
        for steps, row in rows.items()
        for seed, found in row.items()
    )
    return Drawn(figure, "Intervals of 95 %, clustered by template.", f"Estimates: {told}.")


def _restoration(result: Result, routed: Result) -> Drawn | None:
    """Draws what has a share; none where no difference between the texts is sure."""
    panels: dict[str, dict[str, dict[str, Interval]]] = {}
    for direction in DIRECTIONS:
        for metric in METRICS:
            rows: dict[str, dict[str, Interval]] = {}
            for patch in ("weights", "values", "both", "random"):
                for seed, one in routed.items():
                    share = one["causes"][direction][patch][metric]["share"]
                    if share["estimate"] is not None:
                        rows.setdefault(patch, {})[f"seed {seed}"] = _interval(share)
            if rows:
                panels[f"{direction}, {metric}"] = rows
    if not panels:
        return None
    count = next(iter(routed.values()))["causes"]["num_items"]
    figure = interval_plot(
        panels,
        x_label="share of the difference between the texts that is restored",
        title="What patching the preregistered routes restores",
        footer=origin(result, routed, f"{count} items, patched at all tokens after the plant"),
    )
    told = "; ".join(
        f"{panel}, {patch}, {seed} {found.estimate:+.0%}"
        for panel, rows in panels.items()
        for patch, row in rows.items()
        for seed, found in row.items()
    )
    return Drawn(
        figure,
        "Fieller's intervals of 95 % over items; random: mean of random routes that move as much weight. What has no "
        "sure difference between the texts is left out.",
        f"Shares: {told}.",
    )


def _interval(found: Result) -> Interval:
    return Interval(found["estimate"], found["low"], found["high"])


def _told(found: Result) -> str:
    return f"{found['estimate']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}]"


def _num_items(routed: Result) -> int:
    return int(next(iter(routed.values()))["routing"]["primary"]["num_items"])
