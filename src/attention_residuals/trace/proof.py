"""Proves that a model of your own can be traced: that what it tells a tap is what it does."""

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from attention_residuals.errors import TapError
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Onlooker, Pass, Read, Tap, Write

__all__ = ["Traceable", "prove"]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""The largest relative L2 distance of two ways to the same numbers; 16-bit models get 2e-2."""


@runtime_checkable
class Traceable(Protocol):
    """A model that recorders, edits and sweeps can work on, whatever is inside.

    It has a residual rule as ``residual``, and hands a tap to the rule's ``open``, ``read`` and ``write``
    after telling it what the pass runs on: ``tap.begin(Pass(tokens, positions, mask))``.
    """

    residual: ResidualRule[Any]

    def __call__(self, tokens: Int[Tensor, "B T"], *, tap: Tap | None = None) -> Tensor:
        """Runs the model; the tap sees the pass."""
        ...


@torch.no_grad()
def prove(model: nn.Module, tokens: Int[Tensor, "B T"]) -> None:
    """Checks on some input that a model tells the truth about its depth reads, or refuses it.

    Three identities are asserted. Being looked at changes no bit. At every site, every value is the sum of
    the writers' outputs that its membership names. And the state that a site uses is the sum of weights
    times values: the model is run again with every read replaced by that very sum, and must end the same.

    Args:
        model: Your model, which is to be ``Traceable``, or one of this library.
        tokens: Any input, such as random ids.

    Raises:
        TapError: An identity does not hold, with the site where it breaks.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> prove(Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]]))
    """
    if not isinstance(model, Traceable) or not isinstance(getattr(model, "residual", None), ResidualRule):
        raise TapError(
            got=f"{type(model).__name__}",
            expected="a model that takes tap=... and has its residual rule as .residual",
            do="see Traceable: hand the tap on to the rule's open, read and write",
        )
    plain, check = model(tokens), _Check()
    seen = model(tokens, tap=check)
    check.require_all(model.residual)
    if not torch.equal(seen, plain):
        _refuse(
            "another result when a tap looks on", "the same bits", "hand the tap on and change nothing else"
        )
    distance = _distance(model(tokens, tap=_Remix()), plain)
    if not distance <= TOLERANCE.get(plain.dtype, 2e-2):
        _refuse(
            f"a result {distance:.1e} apart when each read is made again of its weights and values",
            "reads whose sum of weights times values is what the site uses",
            "offer the read that is used, and use what the tap returns",
        )


class _Check:
    """Compares each read with what was written before it."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}
        self.sites: list[str] = []
        self.begun = False

    def begin(self, run: Pass) -> None:
        self.begun = True

    def write(self, write: Write) -> Write:
        self.outputs[write.writer] = write.output
        return write

    def read(self, read: Read) -> Read:
        self.sites.append(str(read.site))
        unknown = [writer for writer in read.writers if writer not in self.outputs]
        if unknown:
            _refuse(
                f"a read at {read.site} that holds {unknown[0]}, which has not been written",
                "writers that were offered to the tap before",
                "offer every output, the embedding too: rule.open(embedding, tap), rule.write(..., tap)",
            )
        outputs = torch.stack([self.outputs[writer] for writer in read.writers])
        pattern = "sw,wbtd->sbtd" if read.membership.ndim == 2 else "swbt,wbtd->sbtd"
        dtype = torch.promote_types(outputs.dtype, torch.float32)
        expected = torch.einsum(pattern, read.membership.to(outputs.device, dtype), outputs.to(dtype))
        for name, value, sum_of_writers in zip(read.source_names, read.values, expected, strict=True):
            distance = _distance(value, sum_of_writers)
            if not distance <= TOLERANCE.get(value.dtype, 2e-2):
                _refuse(
                    f"{name} at {read.site}, which is {distance:.1e} from the sum of its writers",
                    "values that are the sums that their membership names",
                    "see that names, values and membership are in the same order",
                )
        return read

    def require_all(self, rule: ResidualRule[Any]) -> None:
        """Checks that every site was offered, in order."""
        expected = [str(site) for site in rule.sites() for _ in rule.parts(site)]
        if not self.begun or self.sites != expected:
            first = next(
                (
                    own
                    for own, wanted in zip([*self.sites, "nothing"], expected, strict=False)
                    if own != wanted
                ),
                "no begin",
            )
            _refuse(
                f"{len(self.sites)} reads, of which {first} is not what comes next",
                f"tap.begin, and a read at each of {len(expected)} places in order",
                "hand the tap to every read, the output's too",
            )


class _Remix(Onlooker):
    """Has every read made again of its weights and values."""

    def read(self, read: Read) -> Read:
        return read._replace(weights=read.weights.clone())


def _distance(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm()) / (float(expected.norm()) or 1.0)


def _refuse(got: str, expected: str, do: str) -> None:
    raise TapError(got=got, expected=expected, do=do)
