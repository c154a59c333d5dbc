"""The residual interface: three verbs on one state, and a config that builds the rule."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.layers.tap import OUTPUT, Site, Tap

__all__ = [
    "Norm",
    "ResidualConfig",
    "ResidualRule",
    "Semantics",
    "checked_inputs",
    "checked_output",
    "inputs_of_parts",
    "rehearse",
    "to_source_dtype",
]

Norm = Callable[[Tensor], Tensor]
StateT = TypeVar("StateT")


@dataclass(frozen=True, kw_only=True)
class Semantics:
    """What the numbers of a rule's reads mean; every trace carries it.

    Args:
        sources: ``"increments"``: every writer is in one source at most. ``"cumulative"``: sources overlap,
            so that the weight of one source says little about a writer's; read the writer weights.
        weights: What makes the weights: ``"one"`` (always 1), ``"learned"`` (the same for every token),
            or the function of scores.
        values: ``"normalised"`` where a value is its source divided by its root mean square.
        biased: A learned bias favours the newest source.
        output_read: The output reads the sources by weights of its own.
    """

    sources: Literal["increments", "cumulative"]
    weights: Literal["one", "learned", "softmax", "softmax of learned", "sigmoid", "1 + softmax", "gates"]
    values: Literal["raw", "normalised"] = "raw"
    biased: bool = False
    output_read: bool = True


class ResidualRule(nn.Module, ABC, Generic[StateT]):
    """How a model's sublayers read what was written before them.

    ``open`` starts the state with the embedding, ``read`` gives a site its normalised inputs, ``write``
    adds a sublayer's output. A state is a NamedTuple of tensors and tuples of tensors, never changed in
    place, so that checkpointing, pipeline stages and compilation can carry it.

    Args:
        num_layers: L of the model; sites are its attentions, its MLPs and the output.
        width: D.
    """

    semantics: Semantics

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.num_layers, self.width = num_layers, width

    def parts(self, site: Site) -> tuple[str, ...]:
        """Names the reads of a site: one, ``"in"``, unless the rule reads separately for q, k and v."""
        return ("in",)

    def weights_of(self, logits: Float[Tensor, "S *BT"]) -> Float[Tensor, "S *BT"]:
        """Makes weights of scores: softmax over the sources, in most rules that have scores."""
        return logits.softmax(0)

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
    """The options of one rule; base of small frozen dataclasses that JSON can hold.

    A class says in ``formula`` what a read does, with h the state at a read, v the outputs before it.
    """

    formula: ClassVar[str] = ""

    @abstractmethod
    def build(self, *, num_layers: int, width: int) -> ResidualRule[Any]:
        """Makes the rule for a model of that shape.

        Raises:
            ConfigError: The options do not fit the shape.
        """


def rehearse(
    rule: ResidualRule[Any], output: Float[Tensor, "B T D"], tap: Tap | None = None
) -> tuple[tuple[Float[Tensor, "B T D"], ...], Any]:
    """Runs a rule alone, without a model: the embedding and every sublayer write the same output.

    Args:
        rule: Any rule.
        output: What is written.
        tap: Sees every read and write.

    Returns:
        What each site reads first, before its norm, and the state before the output's read.

    Example:
        >>> from attention_residuals.layers.residual import StandardResidual
        >>> reads, _ = rehearse(StandardResidual().build(num_layers=1, width=2), torch.ones(1, 1, 2))
        >>> [read[0, 0, 0].item() for read in reads]
        [1.0, 2.0, 3.0]
    """
    reads = []
    with torch.no_grad():
        state = rule.open(output.clone(), tap)
        for site in rule.sites():
            before = state
            inputs, state = rule.read(state, site, nn.Identity(), tap)
            reads.append(inputs[0])
            if site != OUTPUT:
                state = rule.write(state, site, output.clone(), tap)
    return tuple(reads), before


def inputs_of_parts(read_BTD: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Puts the reads of a site in the order in which attention takes them: q, k, v, or the only one.

    Example:
        >>> one, other = torch.zeros(1), torch.ones(1)
        >>> inputs_of_parts({"in": one, "v": other})
        (tensor([0.]), tensor([0.]), tensor([1.]))
    """
    if len(read_BTD) == 1:
        return tuple(read_BTD.values())
    return tuple(read_BTD[part] if part in read_BTD else read_BTD["in"] for part in "qkv")


def checked_inputs(
    inputs: tuple[Tensor, ...], sublayer: Callable[..., Any], site: Site
) -> tuple[Tensor, ...]:
    """Returns a site's inputs if its sublayer takes that many; call it before ``sublayer(*inputs)``.

    Raises:
        ConfigError: The rule reads separately for queries, keys and values, and the sublayer takes one input.
    """
    if len(inputs) == 1:
        return inputs
    function = sublayer.forward if isinstance(sublayer, nn.Module) else sublayer
    names = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    # A mask or a cache in second place would be taken for keys: names tell, since nothing else does.
    if len(names) < 3 or not names[1].startswith("k") or not names[2].startswith("v"):
        raise ConfigError(
            got=f"{len(inputs)} inputs for {type(sublayer).__name__} at {site}, which takes ({', '.join(names)})",
            expected="an attention that takes (q_input, k_input, v_input)",
            do="use such an attention, or a residual rule with one read a site, such as AttnRes",
        )
    return inputs


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
    return output if output.dtype is source.dtype else output.to(source.dtype)


def to_source_dtype(name: str | None, embedding: Tensor) -> Tensor:
    """Casts the embedding to the dtype that sources are kept in; None keeps the embedding's."""
    return embedding if name is None else embedding.to(getattr(torch, name))
