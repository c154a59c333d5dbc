"""Routing that has collapsed to one source, or has never left the uniform mean: found, and watched in training."""

import math
import warnings
from typing import Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from attention_residuals.errors import ConfigError, is_count
from attention_residuals.models import LanguageModel
from attention_residuals.trace import Summary

__all__ = ["Collapse", "CollapseMonitor", "RoutingWarning", "collapsed"]


class Collapse(NamedTuple):
    """A read that chooses nothing: one source has it all, or all have the same."""

    site: str
    kind: Literal["one source", "uniform"]
    source: str
    """The source with the largest mean share."""
    share: float
    entropy: float
    """Mean normalised entropy, 0 to 1."""

    def __str__(self) -> str:
        if self.kind == "one source":
            return f"{self.site} reads {self.source} alone (mean share {self.share:.3f})"
        return f"{self.site} reads all sources alike (mean normalised entropy {self.entropy:.4f})"


class RoutingWarning(UserWarning):
    """Routing that chooses nothing."""


def collapsed(summary: Summary, *, share: float = 0.95, entropy: float = 0.999) -> tuple[Collapse, ...]:
    """Finds the reads whose routing chooses nothing.

    Args:
        summary: Of many tokens.
        share: A source with so large a mean share of weight has it all, 0 to 1.
        entropy: Weights with so large a mean normalised entropy are uniform, 0 to 1. With pseudo-queries of
            zero, where training begins, it is 1.

    Returns:
        In the order of the reads. Reads of one source are left out: they have no choice.
    """
    found = []
    for site in summary:
        mean = site.normalised_entropy
        largest = int(site.shares.argmax())
        kind: Literal["one source", "uniform"] = "one source" if site.shares[largest] >= share else "uniform"
        if math.isnan(mean) or (kind == "uniform" and mean < entropy):
            continue
        found.append(Collapse(site.name, kind, site.source_names[largest], site.shares[largest].item(), mean))
    return tuple(found)


class CollapseMonitor:
    """Warns in training when routing collapses to one source or stays uniform: ``train(..., monitor=...)``.

    Args:
        tokens: What the model reads for it, such as a batch of held-out text.
        every: Looks at each so many steps.
        uniform_from: From this step on, uniform routing is warned of, too; it is where training begins.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> monitor = CollapseMonitor(torch.tensor([[5, 6, 7]]), every=10, uniform_from=20)
        >>> model = Decoder(presets.scaled(2, vocab_size=9))
        >>> monitor(10, model)
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     monitor(20, model)
        >>> str(caught[0].message).splitlines()[0]
        'step 20: L0.mlp reads all sources alike (mean normalised entropy 1.0000)'
    """

    def __init__(self, tokens: Int[Tensor, "B T"], *, every: int = 100, uniform_from: int = 1000) -> None:
        if not is_count(every) or not is_count(uniform_from):
            raise ConfigError(
                got=f"every={every!r}, uniform_from={uniform_from!r}",
                expected="1 or more",
                do="count steps from 1",
            )
        self.tokens, self.every, self.uniform_from = tokens, every, uniform_from

    def __call__(self, step: int, model: LanguageModel) -> None:
        """Looks at the model if it is time."""
        if step % self.every:
            return
        summary = Summary()
        with torch.no_grad():
            model(self.tokens.to(next(model.parameters()).device), tap=summary)
        found = [
            str(collapse)
            for collapse in collapsed(summary)
            if collapse.kind == "one source" or step >= self.uniform_from
        ]
        if found:
            warnings.warn(f"step {step}: " + "\n".join(found), RoutingWarning, stacklevel=2)
