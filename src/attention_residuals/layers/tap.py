"""Taps: where every depth read and every sublayer output can be seen, and changed, on its way."""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from attention_residuals.errors import TapError
from attention_residuals.ops.depth_read import compute_dtype

__all__ = [
    "EMBEDDING",
    "OUTPUT",
    "Chain",
    "ExpertChoice",
    "ExpertTap",
    "Onlooker",
    "Pass",
    "Read",
    "Site",
    "Tap",
    "Write",
    "offer_write",
]

EMBEDDING = "embedding"
"""The name of the first writer."""


class Site(NamedTuple):
    """One place where a depth read happens: before a layer's attention or MLP, or before the output.

    Example:
        >>> str(Site(3, "attention")), Site(3, "mlp").sublayer, str(OUTPUT)
        ('L3.attention', 7, 'output')
    """

    layer: int
    kind: str
    """``"attention"``, ``"mlp"`` or ``"output"``."""

    @property
    def sublayer(self) -> int:
        """How many sublayers run before this one."""
        return 2 * self.layer + (self.kind == "mlp")

    def __str__(self) -> str:
        return self.kind if self.kind == "output" else f"L{self.layer}.{self.kind}"


OUTPUT = Site(-1, "output")
"""The read before the final norm."""


class Pass(NamedTuple):
    """What one forward pass runs on; the same for all of its reads and writes."""

    tokens: Int[Tensor, "B T"]
    positions: Int[Tensor, "B T"]
    mask: Bool[Tensor, "..."] | None


class Read(NamedTuple):
    """One depth read, complete: the state that the site uses is the sum of weights times values.

    Weights are those that are used; where groups of channels have weights apart, the last axis H numbers
    the groups. Logits are the scores that the rule makes weights of, None where it has none.
    ``membership`` tells what each value contains: value s is the sum over writers of ``membership[s, w]``
    times that writer's output; the numbers are the same for all tokens, or one for each.
    """

    site: Site
    part: str
    """``"q"``, ``"k"`` or ``"v"`` where a site reads separately for them, ``"in"`` for all else."""
    source_names: tuple[str, ...]
    sources: tuple[Float[Tensor, "B T D"], ...]
    values: tuple[Float[Tensor, "B T D"], ...]
    logits: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"] | None
    weights: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"]
    inverse_norms: Float[Tensor, "S B T"] | Float[Tensor, "S B T H"] | None
    writers: tuple[str, ...]
    membership: Float[Tensor, "S W"] | Float[Tensor, "S W B T"]


class Write(NamedTuple):
    """One writer's output on its way into the residual state."""

    writer: str
    output: Float[Tensor, "B T D"]


class ExpertChoice(NamedTuple):
    """Which experts a sublayer sends each token to: another routing than that over depth."""

    writer: str
    """The sublayer, by the name under which it writes."""
    chosen: Int[Tensor, "B T X"]
    """Numbers of the experts, in no order."""
    weights: Float[Tensor, "B T X"]
    """What each expert's output is multiplied with."""


@runtime_checkable
class Tap(Protocol):
    """Sees a forward pass; returns each event as it came, or changed.

    An event that is returned as the same object changes no bit of the result. A changed ``Read`` is mixed
    again from its weights and values; new values should come with their ``membership``, or nobody later knows
    who wrote what. Each event is offered once per forward pass, also under activation
    checkpointing.
    """

    def begin(self, run: Pass) -> None:
        """Is told what the pass runs on, before the first event."""
        ...

    def read(self, read: Read) -> Read:
        """Is offered a depth read before it is used."""
        ...

    def write(self, write: Write) -> Write:
        """Is offered a writer's output before it joins the state."""
        ...


@runtime_checkable
class ExpertTap(Tap, Protocol):
    """A tap that is also told which experts are chosen, where a model has some."""

    def choose(self, choice: ExpertChoice) -> None:
        """Is told what a sublayer has chosen, before its output is offered as a write."""
        ...


class Onlooker:
    """A tap that lets everything pass; taps that look at some events only derive from it.

    Example:
        >>> isinstance(Onlooker(), Tap)
        True
    """

    def begin(self, run: Pass) -> None:
        """Has nothing to note."""

    def read(self, read: Read) -> Read:
        """Lets it pass."""
        return read

    def write(self, write: Write) -> Write:
        """Lets it pass."""
        return write


class Chain:
    """Several taps as one, each offered what the one before it returned.

    Args:
        taps: In the order in which they act; a recorder that shall see the changes comes last.
    """

    def __init__(self, *taps: Tap) -> None:
        self.taps = taps

    def begin(self, run: Pass) -> None:
        """Tells every tap."""
        for tap in self.taps:
            tap.begin(run)

    def read(self, read: Read) -> Read:
        """Hands the read from tap to tap."""
        for tap in self.taps:
            seen = tap.read(read)
            read = _without_stale_members(read, seen) if isinstance(seen, Read) else seen
        return read

    def write(self, write: Write) -> Write:
        """Hands the write from tap to tap."""
        for tap in self.taps:
            write = tap.write(write)
        return write

    def choose(self, choice: ExpertChoice) -> None:
        """Tells the taps that ask for it."""
        for tap in self.taps:
            if isinstance(tap, ExpertTap):
                tap.choose(choice)


def offer_read(tap: Tap, read: Read) -> Read | None:
    """Offers a read and returns what shall replace it, or None where the tap left it as it was.

    Raises:
        TapError: What came back cannot be mixed, or would change nothing.
    """
    versions = _versions(read)
    seen = tap.read(read)
    if _versions(read) != versions:
        raise TapError(
            got=f"tensors that a tap changed in place in the Read at {read.site}",
            expected="the Read as it was offered, or another one",
            do="return read._replace(weights=...) with new tensors",
        )
    if seen is read:
        return None
    if not isinstance(seen, Read):
        raise TapError(
            got=f"{type(seen).__name__} from a tap's read at {read.site}",
            expected="a Read",
            do="return the Read that was offered, or read._replace(...)",
        )
    if seen.weights is read.weights and all(
        new is old for new, old in zip(seen.values, read.values, strict=False)
    ):
        raise TapError(
            got=f"another Read at {read.site} with the weights and values that were offered",
            expected="changed weights or values, from which the state is mixed",
            do="for changed logits, return read._replace(weights=logits.softmax(0))",
        )
    shapes = {tuple(value.shape) for value in seen.values}
    count = len(seen.values)
    if not len(seen.source_names) == len(seen.sources) == len(seen.membership) == count:
        raise TapError(
            got=f"{count} values, {len(seen.source_names)} names, {len(seen.sources)} sources and membership "
            f"of {len(seen.membership)} at {read.site}",
            expected="as many of each, so that a trace says what was read",
            do="give a source weight 0 to leave it out; for other sources, replace all four",
        )
    if shapes != {tuple(read.values[0].shape)} or seen.weights.shape != (count, *read.weights.shape[1:]):
        raise TapError(
            got=f"weights {list(seen.weights.shape)} and {count} values {sorted(shapes)} at {read.site}",
            expected=f"weights [S, ...] for S values of shape {list(read.values[0].shape)}",
            do="keep the shapes of the Read that was offered",
        )
    return seen


def offer_write(tap: Tap | None, writer: Site | str, output: Tensor) -> Tensor:
    """Offers a write and returns the output to use.

    Raises:
        TapError: The tap returned something else, or another shape or dtype.
    """
    if tap is None:
        return output
    seen = tap.write(Write(str(writer), output))
    if not isinstance(seen, Write):
        raise TapError(
            got=f"{type(seen).__name__} from a tap's write at {writer}",
            expected="a Write",
            do="return the Write that was offered, or write._replace(output=...)",
        )
    if seen.output.shape != output.shape or seen.output.dtype != output.dtype:
        raise TapError(
            got=f"an output {seen.output.dtype}{list(seen.output.shape)} from a tap's write at {writer}",
            expected=f"{output.dtype}{list(output.shape)}",
            do="keep the shape and dtype of the Write that was offered",
        )
    return seen.output


def _without_stale_members(read: Read, seen: Read) -> Read:
    """Marks values that a tap has put in place without a word on who wrote them: NaN as their membership."""
    if seen.membership is not read.membership or len(seen.values) != len(read.values):
        return seen
    new = [one is not other for one, other in zip(seen.values, read.values, strict=True)]
    if not any(new):
        return seen
    membership = seen.membership.clone()
    membership[torch.tensor(new)] = torch.nan
    return seen._replace(membership=membership)


def _versions(read: Read) -> list[int]:
    """Counts the in-place changes of a read's tensors; in inference mode nothing counts them."""
    tensors = (*read.sources, *read.values, read.weights, *([] if read.logits is None else [read.logits]))
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


def writer_names(num_sublayers: int) -> tuple[str, ...]:
    """Names the embedding and the first sublayers, in the order in which they write.

    Example:
        >>> writer_names(3)
        ('embedding', 'L0.attention', 'L0.mlp', 'L1.attention')
    """
    kinds = ("attention", "mlp")
    return (EMBEDDING, *(str(Site(number // 2, kinds[number % 2])) for number in range(num_sublayers)))


def unscored_read(
    site: Site,
    source_names: tuple[str, ...],
    values: tuple[Float[Tensor, "B T D"], ...],
    weights: Float[Tensor, "S B T"],
    writers: tuple[str, ...],
    membership: Float[Tensor, "S W"] | Float[Tensor, "S W B T"],
) -> Read:
    """Describes the read of a rule that scores nothing and mixes its sources as they are.

    Example:
        >>> stream = torch.zeros(1, 2, 4)
        >>> read = unscored_read(OUTPUT, ("stream",), (stream,), ones_weights(stream), ("embedding",), torch.ones(1, 1))
        >>> read.part, read.logits
        ('in', None)
    """
    return Read(
        site=site,
        part="in",
        source_names=source_names,
        sources=values,
        values=values,
        logits=None,
        weights=weights,
        inverse_norms=None,
        writers=writers,
        membership=membership,
    )


def ones_weights(source: Float[Tensor, "B T D"]) -> Float[Tensor, "1 B T"]:
    """Returns the weights of a read that takes one source as it is.

    Example:
        >>> ones_weights(torch.zeros(2, 3, 4)).shape
        torch.Size([1, 2, 3])
    """
    return source.new_ones((1, *source.shape[:-1]), dtype=compute_dtype(source.dtype))
