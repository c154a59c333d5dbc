"""The residual interface: two verbs on one state, and a config that builds the rule."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attention_residuals.errors import ShapeError
from attention_residuals.layers.tap import OUTPUT, Site, Tap

__all__ = ["Norm", "ResidualConfig", "ResidualRule"]

Norm = Callable[[Tensor], Tensor]
StateT = TypeVar("StateT")


class ResidualRule(nn.Module, ABC, Generic[StateT]):
    """How a model's sublayers read what was written before them.

    ``open`` starts the state with the embedding, ``read`` gives a site its normalised inputs, ``write``
    adds a sublayer's output. A state is a NamedTuple of tensors and tuples of tensors, never changed in
    place, so that checkpointing, pipeline stages and compilation can carry it.

    Args:
        num_layers: L of the model; sites are its attentions, its MLPs and the output.
        width: D.
    """

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.num_layers, self.width = num_layers, width

    def sites(self) -> tuple[Site, ...]:
        """Lists all sites in the order in which they read."""
        kinds = ("attention", "mlp")
        return (*(Site(layer, kind) for layer in range(self.num_layers) for kind in kinds), OUTPUT)

    def num_written(self, site: Site) -> int:
        """Counts the sublayers that have written before a site reads."""
        return 2 * self.num_layers if site == OUTPUT else site.sublayer

    @abstractmethod
    def open(self, embedding: Float[Tensor, "B T D"], tap: Tap | None = None) -> StateT:
        """Starts the state; the embedding is the first source, and its dtype that of all sources."""

    @abstractmethod
    def read(
        self, state: StateT, site: Site, norm: Norm, tap: Tap | None = None
    ) -> tuple[tuple[Float[Tensor, "B T D"], ...], StateT]:
        """Returns the normalised inputs of a site (one, for most rules), and the state to go on with.

        Args:
            state: As returned by ``open``, ``write`` or an earlier ``read``.
            site: Who reads.
            norm: The reader's norm; an RMSNorm is folded into the read, and the mix is not kept.
            tap: Is offered the read.
        """

    @abstractmethod
    def write(
        self, state: StateT, site: Site, output: Float[Tensor, "B T D"], tap: Tap | None = None
    ) -> StateT:
        """Adds the output of a site's sublayer; sites write in order."""

    @abstractmethod
    def num_sources(self, site: Site) -> int:
        """Counts what a site reads; a mean over them is that many times smaller than their sum."""


class ResidualConfig(ABC):
    """The options of one rule; base of small frozen dataclasses that JSON can hold."""

    @abstractmethod
    def build(self, *, num_layers: int, width: int) -> ResidualRule[Any]:
        """Makes the rule for a model of that shape.

        Raises:
            ConfigError: The options do not fit the shape.
        """


def checked_output(output: Tensor, source: Tensor, site: Site) -> Tensor:
    """Returns a sublayer's output in the dtype of the sources.

    Raises:
        ShapeError: It is no tensor, or has another shape, which adding would broadcast.
    """
    if not isinstance(output, Tensor) or output.shape != source.shape:
        what = (
            f"an output of shape {list(output.shape)}"
            if isinstance(output, Tensor)
            else type(output).__name__
        )
        raise ShapeError(
            got=f"{what} from {site}",
            expected=f"{list(source.shape)}, as the embedding",
            do="return one vector of the model's width for each token",
        )
    return output.to(source.dtype)


def to_source_dtype(name: str | None, embedding: Tensor) -> Tensor:
    """Casts the embedding to the dtype that sources are kept in; None keeps the embedding's."""
    return embedding if name is None else embedding.to(getattr(torch, name))
