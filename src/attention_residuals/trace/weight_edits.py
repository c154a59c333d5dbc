"""Edits of what a read gives weight to; the values stay what they are."""

from dataclasses import dataclass

import torch

from attention_residuals.errors import ConfigError, EditError, is_finite
from attention_residuals.layers.tap import Read
from attention_residuals.trace.edits import (
    ReadEdit,
    SourceEdit,
    scores_in,
    weights_of,
    with_weights,
)
from attention_residuals.trace.place import Place, moved, seeded
from attention_residuals.trace.references import read_name
from attention_residuals.trace.selection import Names

__all__ = ["Drop", "Force", "PatchWeights", "Shuffle", "Static", "Temperature"]


@dataclass(frozen=True, kw_only=True)
class Drop(SourceEdit):
    """The read cannot use the sources: their scores are -inf, and the others' weights grow to fill up.

    With a softmax, weights become a / (1 - a_k). A weight that is 1 plus a softmax becomes 0 too, and
    weights that do not compete stay what they are.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> from attention_residuals.trace import intervene
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> found = intervene(model, torch.tensor([[5, 6]]), [Drop(sites="L1.mlp", sources="embedding")])
        >>> found.receipts[0].places, round(found.receipts[0].largest_weight_change, 4)
        (('L1.mlp',), 0.25)
    """

    def edited(self, read: Read, at: Place) -> Read:
        """Takes the sources' scores away.

        Raises:
            EditError: A rule without scores, or a read that would lose all its sources.
        """
        logits = scores_in(read, at.scene.rule, "Drop")
        logits = logits.masked_fill(at.of_sources(logits), -torch.inf)
        if (logits == -torch.inf).all(0).any():
            raise EditError(
                got=f"Drop of {', '.join(read.source_names[one] for one in at.sources)} at {read_name(read)}, "
                "which would read nothing",
                expected="at least one source that is left",
                do=f"leave the site out: sites=('*', '!{read.site}')",
            )
        return with_weights(read, at, weights_of(at.scene.rule, logits), logits)


@dataclass(frozen=True, kw_only=True)
class Force(ReadEdit):
    """The weights are what you say.

    Args:
        to: The name of the one source that is read, with weight 1; ``"uniform"``; or a weight for each
            source, >= 0 and 1 in all.
    """

    to: str | tuple[float, ...] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = () if isinstance(self.to, str) else self.to
        if not self.to or (
            numbers and (not all(is_finite(n) and n >= 0 for n in numbers) or abs(sum(numbers) - 1) > 1e-6)
        ):
            raise ConfigError(
                got=f"to={self.to!r}",
                expected="a source, 'uniform', or weights >= 0 whose sum is 1",
                do="divide the weights by their sum",
            )

    @property
    def source_patterns(self) -> Names:
        """The source that is read, where one is named."""
        return self.to if isinstance(self.to, str) and self.to != "uniform" else "*"

    def edited(self, read: Read, at: Place) -> Read:
        """Sets the weights.

        Raises:
            EditError: A rule whose weights do not compete, another number of weights than sources, or a
                pattern of several sources.
        """
        scores_in(read, at.scene.rule, "Force")
        count = len(read.values)
        row = torch.full((count,), 1 / count, dtype=read.weights.dtype, device=read.weights.device)
        if isinstance(self.to, tuple):
            if len(self.to) != count:
                raise EditError(
                    got=f"{len(self.to)} weights at {read_name(read)}",
                    expected=f"{count}, one for each of {', '.join(read.source_names)}",
                    do="force sites with the same sources at a time",
                )
            row = row.new_tensor(self.to)
        elif self.to != "uniform":
            if len(at.sources) > 1:
                raise EditError(
                    got=f"to={self.to!r}, which is {len(at.sources)} sources at {read_name(read)}",
                    expected="one source",
                    do=f"name one of {', '.join(read.source_names[one] for one in at.sources)}",
                )
            row = torch.zeros_like(row)
            row[at.sources[0]] = 1.0
        return with_weights(read, at, row.view(-1, *[1] * (read.weights.ndim - 1)).expand_as(read.weights))


@dataclass(frozen=True, kw_only=True)
class PatchWeights(ReadEdit):
    """The weights are those of a paired run; the values stay. It tells routing apart from content.

    Args:
        reference: The name of the run (``reference_of``) among the references.
    """

    reference: str = "paired"

    @property
    def paired_with(self) -> str:
        """The run."""
        return self.reference

    def edited(self, read: Read, at: Place) -> Read:
        """Takes the run's weights."""
        run, donor = at.scene.paired(self.reference)
        weights = run.at(read).weights
        return with_weights(read, at, weights[:, donor.rows[:, None], at.scene.columns(donor, at.tokens)])


@dataclass(frozen=True, kw_only=True)
class Static(ReadEdit):
    """The weights are their means over data, the same for every token.

    Args:
        reference: The name of the means (``dataset_mean``) among the references.
    """

    reference: str = "mean"

    def edited(self, read: Read, at: Place) -> Read:
        """Takes the mean weights."""
        mean = at.scene.means(self.reference).at(read).weights
        shape = (len(mean), 1, 1, *mean.shape[1:])
        return with_weights(read, at, mean.to(read.weights.dtype).view(shape).expand_as(read.weights))


@dataclass(frozen=True, kw_only=True)
class Shuffle(SourceEdit):
    """The chosen sources exchange their weights: each gets another one's, the same one for all tokens.

    Args:
        seed: Decides the exchange, together with the name of the read.
    """

    seed: int = 0

    def edited(self, read: Read, at: Place) -> Read:
        """Exchanges the weights."""
        order = torch.arange(len(read.values))
        chosen = torch.tensor(at.sources)
        order[chosen] = chosen[moved(len(chosen), seeded(self.seed, read_name(read)))]
        order = order.to(read.weights.device)
        return with_weights(
            read, at, read.weights[order], None if read.logits is None else read.logits[order]
        )


@dataclass(frozen=True, kw_only=True)
class Temperature(ReadEdit):
    """The scores are divided by a temperature before the rule makes weights of them.

    Args:
        temperature: > 0. Towards 0 the best source takes all; 1 changes nothing; towards infinity all weights
            are alike.
    """

    temperature: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_finite(self.temperature) or self.temperature <= 0:
            raise ConfigError(
                got=f"temperature={self.temperature}",
                expected="a number > 0",
                do="use Force for the extremes",
            )

    def edited(self, read: Read, at: Place) -> Read:
        """Divides the scores.

        Raises:
            EditError: A rule without scores.
        """
        logits = scores_in(read, at.scene.rule, "Temperature") / self.temperature
        return with_weights(read, at, weights_of(at.scene.rule, logits), logits)
