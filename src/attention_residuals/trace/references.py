"""What edits take from other runs: weights, values and writes of a paired run, or their means over data."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import DataError, EditError, nearest
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Pass, Read, Write
from attention_residuals.models import LanguageModel

__all__ = ["Means", "ReadMeans", "ReadTensors", "Reference", "dataset_mean", "read_name", "reference_of"]


class ReadTensors(NamedTuple):
    """What one read of a run held."""

    source_names: tuple[str, ...]
    weights: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"]
    values: tuple[Float[Tensor, "B T D"], ...]


class ReadMeans(NamedTuple):
    """The means over tokens of what one read held."""

    source_names: tuple[str, ...]
    weights: Float[Tensor, " S"] | Float[Tensor, "S H"]
    values: tuple[Float[Tensor, " D"], ...]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One run: what each read held, by its name, and what each writer wrote.

    Args:
        numbers: The number of each token in its text, from 0.
        real: True for real tokens.
        reads: By name, such as ``"L3.attention"`` or ``"L3.attention.v"``.
        writes: By writer.
    """

    numbers: Int[Tensor, "B T"]
    real: Bool[Tensor, "B T"]
    reads: dict[str, ReadTensors]
    writes: dict[str, Tensor]

    def at(self, read: Read) -> ReadTensors:
        """Returns what a read held.

        Raises:
            EditError: There is no such read of the same sources.
        """
        found: ReadTensors = _found(read_name(read), self.reads, "read")
        _require_same(found.source_names, read)
        return found

    def write(self, writer: str) -> Tensor:
        """Returns what a writer wrote.

        Raises:
            EditError: The run had no such writer.
        """
        output: Tensor = _found(writer, self.writes, "writer")
        return output


@dataclass(frozen=True, kw_only=True)
class Means:
    """Means over all real tokens of a data set: weights, values and writes, named as in ``Reference``.

    Args:
        num_tokens: How many tokens the means are over.
        reads: By name.
        writes: By writer.
    """

    num_tokens: int
    reads: dict[str, ReadMeans]
    writes: dict[str, Tensor]

    def at(self, read: Read) -> ReadMeans:
        """Returns the means of a read.

        Raises:
            EditError: There is no such read of the same sources.
        """
        found: ReadMeans = _found(read_name(read), self.reads, "read")
        _require_same(found.source_names, read)
        return found

    def write(self, writer: str) -> Tensor:
        """Returns the mean of what a writer wrote.

        Raises:
            EditError: There is no such writer.
        """
        output: Tensor = _found(writer, self.writes, "writer")
        return output


def reference_of(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    *,
    mask: Bool[Tensor, "B T"] | None = None,
    positions: Int[Tensor, "B T"] | None = None,
    residual: ResidualRule[Any] | None = None,
) -> Reference:
    """Runs a model once, without gradients, and keeps weights, values and writes for edits of another run.

    The tensors are those of the run, not copies: the reference takes the memory of all sources.

    Args:
        model: Any language model.
        tokens: Texts; for a paired run, of the lengths of those that will be edited.
        mask: True for real tokens.
        positions: As for the model.
        residual: Another schedule of the model's rule.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> reference_of(model, torch.tensor([[5, 6, 7]])).reads["L1.mlp"].weights.shape
        torch.Size([4, 1, 3])
    """
    keeper = _Keeper()
    with torch.no_grad():
        model(tokens, mask=mask, positions=positions, residual=residual, tap=keeper)
    return Reference(numbers=keeper.numbers, real=keeper.real, reads=keeper.reads, writes=keeper.writes)


def dataset_mean(
    model: LanguageModel,
    batches: Iterable[Tensor | tuple[Tensor, Tensor]],
    *,
    residual: ResidualRule[Any] | None = None,
) -> Means:
    """Runs a model over data, and returns the means of weights, values and writes over all real tokens.

    One batch is kept at a time; sums and means are float64.

    Args:
        model: Any language model.
        batches: Tokens [B, T], each batch of its own shape, or pairs of tokens and their mask, True for real
            tokens.
        residual: Another schedule of the model's rule.

    Raises:
        DataError: No batch, or batches without a real token.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> means = dataset_mean(model, [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]])])
        >>> means.num_tokens, means.reads["L0.mlp"].weights
        (5, tensor([0.5000, 0.5000], dtype=torch.float64))
    """
    adder = _Adder()
    for batch in batches:
        tokens, mask = (batch, None) if isinstance(batch, Tensor) else batch
        with torch.no_grad():
            model(tokens, mask=mask, residual=residual, tap=adder)
    if not adder.num_tokens:
        raise DataError(
            got="no real token", expected="at least one batch of tokens", do="pass a list of tensors [B, T]"
        )
    return adder.means()


def read_name(read: Read) -> str:
    """Names a read by site, and by part where a site reads separately: ``"L3.attention.v"``.

    Example:
        >>> from attention_residuals.layers.tap import Site, unscored_read
        >>> one = torch.ones(1, 1, 1)
        >>> read_name(unscored_read(Site(3, "mlp"), ("stream",), (one,), one, ("embedding",), torch.ones(1, 1)))
        'L3.mlp'
    """
    return str(read.site) if read.part == "in" else f"{read.site}.{read.part}"


def token_numbers(run: Pass) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Numbers the tokens of a pass within their texts, and tells which are real.

    Where a mask tells real tokens apart, they are counted, so that padding shifts nothing; else the
    positions that the model was given are the numbers.

    Example:
        >>> tokens = torch.tensor([[0, 5, 6]])
        >>> token_numbers(Pass(tokens, torch.arange(3)[None], torch.tensor([[False, True, True]])))[0]
        tensor([[-1,  0,  1]])
    """
    length = run.tokens.shape[1]
    if run.mask is None or run.mask.ndim != 2:
        return run.positions, torch.ones_like(run.tokens, dtype=torch.bool)
    return (run.mask.long().cumsum(1) - 1)[:, -length:], run.mask[:, -length:]


class _Keeper:
    """Keeps the tensors of one pass."""

    def __init__(self) -> None:
        self.reads: dict[str, ReadTensors] = {}
        self.writes: dict[str, Tensor] = {}

    def begin(self, run: Pass) -> None:
        self.numbers, self.real = token_numbers(run)

    def read(self, read: Read) -> Read:
        values = tuple(value.detach() for value in read.values)
        self.reads[read_name(read)] = ReadTensors(read.source_names, read.weights.detach(), values)
        return read

    def write(self, write: Write) -> Write:
        self.writes[write.writer] = write.output.detach()
        return write


class _Adder:
    """Adds up what passes hold."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.reads: dict[str, ReadMeans] = {}
        self.writes: dict[str, Tensor] = {}

    def begin(self, run: Pass) -> None:
        _, self.real = token_numbers(run)
        self.num_tokens += int(self.real.sum())

    def read(self, read: Read) -> Read:
        name, before = read_name(read), self.reads.get(read_name(read))
        weights = read.weights.detach()[:, self.real].double().sum(1)
        values = tuple(self._sum(value) for value in read.values)
        if before is not None:
            weights = before.weights + weights
            values = tuple(one + other for one, other in zip(before.values, values, strict=True))
        self.reads[name] = ReadMeans(read.source_names, weights, values)
        return read

    def write(self, write: Write) -> Write:
        self.writes[write.writer] = self.writes.get(write.writer, 0.0) + self._sum(write.output)
        return write

    def means(self) -> Means:
        reads = {
            name: ReadMeans(
                names, weights / self.num_tokens, tuple(value / self.num_tokens for value in values)
            )
            for name, (names, weights, values) in self.reads.items()
        }
        writes = {writer: total / self.num_tokens for writer, total in self.writes.items()}
        return Means(num_tokens=self.num_tokens, reads=reads, writes=writes)

    def _sum(self, output: Tensor) -> Tensor:
        return output.detach()[self.real].double().sum(0)


def _found(name: str, kept: dict[str, Any], what: str) -> Any:
    if name not in kept:
        raise EditError(
            got=f"a reference without the {what} {name}",
            expected="one of the same model",
            do=nearest(name, kept),
        )
    return kept[name]


def _require_same(names: tuple[str, ...], read: Read) -> None:
    if names != read.source_names:
        raise EditError(
            got=f"a reference whose {read_name(read)} reads {', '.join(names)}",
            expected=f"one of the same model, which reads {', '.join(read.source_names)}",
            do="run the model that is edited",
        )
