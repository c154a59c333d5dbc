"""The twelve controls, each a function of what was measured, by name."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from attention_residuals.contradiction.behaviour import right_verdicts
from attention_residuals.contradiction.effects import Finding, finding, primary_effects, primary_per_text
from attention_residuals.contradiction.measurement import Measured
from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.stats import Ancova, ancova, crossed_effects
from attention_residuals.stats.paired import flipped_sums
from attention_residuals.stats.units import Numbers, cluster_sums

__all__ = [
    "CONTROLS",
    "Control",
    "Evidence",
    "across_told",
    "all_controls",
    "surprise_edits",
    "surprise_told",
]


ACROSS = "the same mean by construction, known less well: what differs between items is not taken out"
"""Of matches of other items."""


class Evidence(NamedTuple):
    """What controls of one seed look at."""

    sets: Mapping[str, Measured]
    """The Block model on each set of items of ``ITEM_SETS``."""
    models: Mapping[str, Measured]
    """Main items on ``zero-query``, ``untrained``, ``static`` and ``standard``."""
    num_draws: int

    def effect(self, name: str) -> Finding:
        """Tests the primary number on a set of items."""
        return finding(primary_effects(self.sets[name]), self.sets[name].clusters, num_draws=self.num_draws)


class Control(NamedTuple):
    """What a control found. ``holds`` says whether it is as it must be; None where it is to be read, not judged."""

    expected: str
    found: str
    holds: bool | None
    numbers: dict[str, float]


def all_controls(evidence: Evidence) -> dict[str, Control]:
    """Runs every control."""
    return {name: control(evidence) for name, control in CONTROLS.items()}


def surprise_edits(measured: Measured) -> tuple[Numbers, Numbers, Numbers, list[str]]:
    """Lists the edits of each item: two contradictions and two rare remarks.

    Returns:
        The change of the primary number, that of the edited token's surprisal in nats, whether the edit makes
        a contradiction (1 or 0), and the item.
    """
    clr, cost = primary_per_text(measured), measured["surprisal"]
    rare, rare_cost = primary_per_text(measured, name="remark clr"), measured["remark surprisal"]
    changes = [clr[:, u, 1 - u] - clr[:, u, u] for u in range(2)]
    costs = [cost[:, u, 1 - u] - cost[:, u, u] for u in range(2)]
    changes += [rare[:, u, 1] - rare[:, u, 0] for u in range(2)]
    costs += [rare_cost[:, u, 1] - rare_cost[:, u, 0] for u in range(2)]
    kinds = np.repeat([1.0, 0.0], 2 * len(clr))
    return np.concatenate(changes), np.concatenate(costs), kinds, [*measured.items] * 4


def _benign(evidence: Evidence) -> Control:
    main = evidence.sets["main"]
    clr = primary_per_text(main)
    found = finding(clr[:, 1, 1] - clr[:, 0, 0], main.clusters, num_draws=evidence.num_draws)
    return _effect("no direction: both values change together", found, holds=None)


def _surprise(evidence: Evidence) -> Control:
    changes, costs, kinds, items = surprise_edits(evidence.sets["main"])
    rare = kinds == 0
    ranges = {
        "mean_surprisal_of_contradictions": float(costs[~rare].mean()),
        "mean_surprisal_of_remarks": float(costs[rare].mean()),
        "mean_change_of_contradictions": float(changes[~rare].mean()),
        "mean_change_of_remarks": float(changes[rare].mean()),
    }
    expected = "an effect of the contradiction at equal surprisal, of the same sign"
    try:
        found: Ancova = ancova(changes, costs, kinds, np.array(items))
        by_template = ancova(changes, costs, kinds, np.tile(evidence.sets["main"].clusters, 4))
    except (ConfigError, NonFiniteError) as error:
        return Control(expected, f"not computed: {error.got}", None, ranges)
    numbers = {
        "effect": found.effect,
        "low": found.low,
        "high": found.high,
        "p": found.p,
        "template_p": by_template.p,
        "slope": found.slope,
        **ranges,
    }
    is_same_way = found.effect * primary_effects(evidence.sets["main"]).mean() > 0
    return Control(expected, surprise_told(numbers), bool(found.p <= 0.05 and is_same_way), numbers)


def surprise_told(numbers: Mapping[str, float]) -> str:
    """Says what the analysis of covariance found, from its numbers; the preregistered p is that by items."""
    by_template = f", {numbers['template_p']:.2g} by templates" if "template_p" in numbers else ""
    return (
        f"{numbers['effect']:+.4f} nats [{numbers['low']:+.4f}, {numbers['high']:+.4f}], p {numbers['p']:.2g} by items"
        f"{by_template}; a nat of surprisal is worth {numbers['slope']:+.4f}; contradictions cost "
        f"{numbers['mean_surprisal_of_contradictions']:.2f} nats, rare remarks "
        f"{numbers['mean_surprisal_of_remarks']:.2f}"
    )


def _before(evidence: Evidence) -> Control:
    compared = [one.about for one in evidence.sets.values()]
    tokens = sum(int(one["tokens_before_plant"]) for one in compared)
    # A difference would have ended the measurement (``passes.check_null``), and there would be no numbers.
    told = f"0 at {tokens:,} tokens, compared bit for bit while measuring"
    is_compared = all(one["tokens_before_plant"] > 0 for one in compared)
    return Control("a difference of exactly 0", told, is_compared, {"tokens": float(tokens)})


def _shuffled(evidence: Evidence) -> Control:
    main = evidence.sets["main"]
    effects = primary_effects(main)
    # The primary test turns whole templates, too: their items are alike.
    sums = cluster_sums(effects, np.asarray(main.clusters))
    shuffled, _ = flipped_sums(sums[:, None], evidence.num_draws, 1)
    reach = float(np.quantile(np.abs(shuffled), 0.95) / len(effects))
    told = f"95 % of shuffles of whole templates within {reach:.4f} nats of 0; measured {effects.mean():+.4f}"
    numbers = {"reach": reach, "estimate": float(effects.mean())}
    return Control(
        "the effect outside of what shuffled labels give", told, abs(effects.mean()) > reach, numbers
    )


def _across(evidence: Evidence) -> Control:
    main = evidence.sets["main"]
    clr, clusters = primary_per_text(main), np.asarray(main.clusters)
    other = np.arange(len(clusters))
    for cluster in np.unique(clusters):
        own = np.flatnonzero(clusters == cluster)
        other[own] = np.roll(own, 1)
    mismatch, match = (clr[:, 0, 1] + clr[:, 1, 0]) / 2, (clr[:, 0, 0] + clr[:, 1, 1]) / 2
    found = finding(mismatch[other] - match, main.clusters, num_draws=evidence.num_draws)
    within = evidence.effect("main")
    numbers = {
        "estimate": found.estimate,
        "low": found.low,
        "high": found.high,
        "low within items": within.low,
        "high within items": within.high,
    }
    return Control(ACROSS, across_told(numbers), None, numbers)


def across_told(numbers: Mapping[str, float]) -> str:
    """Says what pairs of other items show; their mean, and p by templates, are the primary ones by construction."""
    return (
        f"{numbers['estimate']:+.4f} nats, interval [{numbers['low']:+.4f}, {numbers['high']:+.4f}]; within items "
        f"[{numbers['low within items']:+.4f}, {numbers['high within items']:+.4f}]"
    )


def _uniform(evidence: Evidence) -> Control:
    largest = max(
        float(np.abs(crossed_effects(evidence.models[name]["cell clr"])).max())
        for name in ("zero-query", "untrained")
    )
    told = f"largest contrast {largest:g} nats"
    return Control("every contrast exactly 0", told, largest == 0, {"largest": largest})


def _static(evidence: Evidence) -> Control:
    static, main = evidence.models["static"], evidence.sets["main"]
    largest = float(np.abs(crossed_effects(static["cell clr"])).max())
    verdicts = [float(right_verdicts(one).mean()) for one in (main, static)]
    answers = [float(one["right"].mean()) for one in (main, static)]
    told = (
        f"largest contrast {largest:g} nats; right verdicts {verdicts[0]:.1%} become {verdicts[1]:.1%}, right "
        f"answers {answers[0]:.1%} become {answers[1]:.1%}"
    )
    numbers = {"largest": largest, "verdicts": verdicts[1], "answers": answers[1]}
    return Control(
        "every contrast 0 to rounding; what is lost needs routing by input", told, largest < 1e-5, numbers
    )


def _standard(evidence: Evidence) -> Control:
    numbers: dict[str, float] = {}
    parts: list[str] = []
    for name in ("projection share", "norm share"):
        for model, one in (("Block", evidence.sets["main"]), ("standard", evidence.models["standard"])):
            found = finding(primary_effects(one, name=name), one.clusters, num_draws=evidence.num_draws)
            numbers[f"{model} {name}"] = found.estimate
            parts.append(f"{model} {name} {found.estimate:+.5f} (p {found.p:.2g})")
    return Control(
        "no such effect with all weights 1, if it is one of routing", "; ".join(parts), None, numbers
    )


def _distance(evidence: Evidence) -> Control:
    names = {
        kind: (f"{kind}distance 1", kind.strip(", ") or "main", f"{kind}distance 3")
        for kind in ("", "copied, ")
    }
    numbers: dict[str, float] = {}
    parts: list[str] = []
    for kind, sets in names.items():
        found = [evidence.effect(name) for name in sets]
        near, far = (evidence.sets[name] for name in (sets[0], sets[2]))
        slope = finding(
            primary_effects(far) - primary_effects(near), near.clusters, num_draws=evidence.num_draws
        )
        label = "copied" if kind else "derived"
        for step, one in enumerate(found):
            numbers[f"{label} {step + 1}"] = one.estimate
            numbers |= {f"{label} {step + 1} {end}": getattr(one, end) for end in ("low", "high")}
        numbers[f"{label} 3 less 1"] = slope.estimate
        told = ", ".join(f"{one.estimate:+.4f}" for one in found)
        parts.append(f"{label}: {told} at 1, 2, 3 steps; 3 less 1 {slope.estimate:+.4f} (p {slope.p:.2g})")
    return Control(
        "an effect that grows or falls with distance, not up and down", "; ".join(parts), None, numbers
    )


def _set(name: str, expected: str) -> Callable[[Evidence], Control]:
    return lambda evidence: _effect(expected, evidence.effect(name), holds=None)


def _effect(expected: str, found: Finding, *, holds: bool | None) -> Control:
    interval = f"[{found.low:+.4f}, {found.high:+.4f}]"
    told = f"{found.estimate:+.4f} nats {interval}, p {found.p:.2g} (by items {found.item_p:.2g})"
    numbers = {"estimate": found.estimate, "low": found.low, "high": found.high, "p": found.p}
    return Control(expected, told, holds, numbers)


CONTROLS: dict[str, Callable[[Evidence], Control]] = {
    "benign change": _benign,
    "surprise-matched": _surprise,
    "before the plant": _before,
    "labels shuffled": _shuffled,
    "matches of other items": _across,
    "untrained and zero-query": _uniform,
    "static weights": _static,
    "standard twin": _standard,
    "kind and distance": _distance,
    "reversed direction": _set("corrected", "the claim that mends against the one that repeats an error"),
    "other wording": _set("held out", "the same sign in templates that nobody trained on"),
    "irrelevant contradiction": _set("irrelevant", "less, if the effect serves the answer"),
}
"""By name, in the order of the design."""
