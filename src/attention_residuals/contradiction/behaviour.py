"""The behavioural gate: no claim about routing before the model is seen to do the task and to notice."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attention_residuals.contradiction.effects import Finding, finding
from attention_residuals.contradiction.measurement import Measured
from attention_residuals.contradiction.study import ITEM_SETS
from attention_residuals.stats import crossed_effects
from attention_residuals.stats.units import Numbers

__all__ = [
    "LEAST_SHARE",
    "LEAST_SURPRISE_P",
    "Gate",
    "Probe",
    "accuracies",
    "gate",
    "probe",
    "right_verdicts",
    "true_verdicts",
]

LEAST_SHARE = 0.75
"""Of consistent texts answered right, and of verdicts or probed labels that are right, to pass."""

LEAST_SURPRISE_P = 0.001
"""Largest p at which a wrong claim counts as more surprising than a right one, by single items."""


CONFLICT = np.array([[-1.0, 1.0], [1.0, -1.0]])
"""For each upstream and planted value, [u, p]: 1 where they contradict each other, else -1."""

RIDGE = 0.01
"""Strength of the probe's ridge, as a share of the number of training texts."""


class Probe(NamedTuple):
    """How well a linear probe tells mismatches from matches, in templates that it has not seen; 0.5 is chance."""

    accuracy: float
    shuffled: float
    """The same with labels exchanged within half of the items: what a probe finds in nothing."""


class Gate(NamedTuple):
    """What the model does with a contradiction. ``failures`` are empty where it passes."""

    answers: float
    """Share of consistent texts that are answered right."""
    verdicts: float
    """Share of all texts whose verdict is right; half of them are contradictory."""
    surprise: Finding
    """Crossed effect on the plant's surprisal, nats."""
    pull: Finding
    """Crossed effect on the logit of the right answer less that of the claimed one; below 0, the plant pulls."""
    flips: float
    """Share of contradictory texts that are answered as the plant implies, where the consistent twin is right."""
    probe: Probe
    failures: tuple[str, ...]

    @property
    def is_passed(self) -> bool:
        """Whether routing may be spoken of."""
        return not self.failures


def gate(measured: Measured, *, num_draws: int) -> Gate:
    """Says whether a model does the task, is surprised by wrong claims, and knows that they are wrong.

    Args:
        measured: Main items on the model.
        num_draws: Sign flips.
    """
    right, misled = measured["right"], measured["misled"]
    answers = float(np.mean([right[:, 0, 0], right[:, 1, 1]]))
    verdicts = float(right_verdicts(measured).mean())
    surprise = finding(crossed_effects(measured["surprisal"]), measured.clusters, num_draws=num_draws)
    pull = finding(crossed_effects(measured["answer"]), measured.clusters, num_draws=num_draws)
    twins = np.stack([right[:, 0, 0], right[:, 1, 1]], 1)
    flips = np.stack([misled[:, 0, 1], misled[:, 1, 0]], 1) * twins
    found = probe(measured["state"], measured.clusters)
    failures = []
    if answers < LEAST_SHARE:
        failures.append(f"it answers {answers:.0%} of consistent texts right, less than {LEAST_SHARE:.0%}")
    if not _is_surprised(surprise):
        failures.append(
            f"wrong claims are {surprise.estimate:+.3f} nats more surprising (p {surprise.item_p:.2g} by items), "
            f"not clearly above 0 (p <= {LEAST_SURPRISE_P})"
        )
    if verdicts < LEAST_SHARE and found.accuracy < LEAST_SHARE:
        failures.append(
            f"{verdicts:.0%} of its verdicts are right, and a linear probe of its state gets {found.accuracy:.0%}, "
            f"both less than {LEAST_SHARE:.0%}"
        )
    share = float(flips.sum() / max(1.0, twins.sum()))
    return Gate(answers, verdicts, surprise, pull, share, found, tuple(failures))


def true_verdicts(name: str) -> Numbers:
    """Says of each text of a set, [u, p], whether the right verdict is "conflict" (1) or "fine" (-1).

    Where the second claim is planted, the first one is wrong in all four texts, mended or not.

    Args:
        name: One of ``ITEM_SETS``.

    Example:
        >>> true_verdicts("main").tolist(), true_verdicts("corrected").tolist()
        ([[-1.0, 1.0], [1.0, -1.0]], [[1.0, 1.0], [1.0, 1.0]])
    """
    return np.ones((2, 2)) if ITEM_SETS[name].get("kind") == "corrected" else CONFLICT


def right_verdicts(measured: Measured, *, name: str = "main") -> npt.NDArray[np.bool_]:
    """Says of each text, [items, u, p], whether its verdict is right.

    Args:
        measured: Of one model.
        name: Of the set of items; see ``true_verdicts``.
    """
    return np.asarray(measured["verdict"] * true_verdicts(name) > 0)


def probe(states_IUPD: Numbers, clusters: Sequence[str]) -> Probe:
    """Trains a ridge probe for mismatches and tries it on templates that it has not seen.

    Each template is left out once, with all of its items. What a token is tells nothing, since each planted
    value is a match and a mismatch once in every item.

    Args:
        states_IUPD: A state for every text.
        clusters: The template of each item, 2 or more.

    Example:
        >>> signs = np.array([[-1.0, 1.0], [1.0, -1.0]])[None, :, :, None]
        >>> noise = np.random.default_rng(0).normal(size=(40, 2, 2, 3))
        >>> probe(noise + [3.0, 0.0, 0.0] * signs, ["a", "b"] * 20).accuracy > 0.95
        True
    """
    labels = np.broadcast_to(CONFLICT, states_IUPD.shape[:3])
    turned = np.random.default_rng(0).integers(0, 2, size=len(labels)) * 2.0 - 1.0
    accuracy = _accuracy(states_IUPD, labels, clusters)
    return Probe(accuracy, _accuracy(states_IUPD, labels * turned[:, None, None], clusters))


def accuracies(measured: Measured, *, name: str = "main") -> dict[str, dict[str, float | int]]:
    """Gives by family the shares of right answers to consistent and to contradictory texts, and of right verdicts.

    ``items`` says of how many; each is two consistent and two contradictory texts.

    Args:
        measured: Of one model.
        name: Of the set of items; see ``true_verdicts``.
    """
    families = np.array([cluster.split("/")[0] for cluster in measured.clusters])
    right = measured["right"]
    verdicts = right_verdicts(measured, name=name)
    return {
        family: {
            "items": int(own.sum()),
            "consistent": float(np.mean([right[own, 0, 0], right[own, 1, 1]])),
            "contradictory": float(np.mean([right[own, 0, 1], right[own, 1, 0]])),
            "verdict": float(verdicts[own].mean()),
        }
        for family, own in ((str(one), families == one) for one in dict.fromkeys(families))
    }


def _is_surprised(found: Finding) -> bool:
    return found.estimate > 0 and found.item_p <= LEAST_SURPRISE_P


def _accuracy(states: Numbers, labels: Numbers, clusters: Sequence[str]) -> float:
    names: npt.NDArray[np.str_] = np.asarray(clusters)
    right, width = 0, states.shape[-1]
    for left_out in np.unique(names):
        held = names == left_out
        seen, wanted = states[~held].reshape(-1, width), labels[~held].reshape(-1)
        middle, scale = seen.mean(0), seen.std(0) + 1e-12
        x = (seen - middle) / scale
        ridge = x.T @ x + RIDGE * len(x) * np.eye(width)
        weights = np.linalg.solve(ridge, x.T @ wanted)
        told = ((states[held].reshape(-1, width) - middle) / scale) @ weights
        right += int((told * labels[held].reshape(-1) > 0).sum())
    return right / labels.size
