"""Finds out how a Transformers model uses its residual stream, by running it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_residuals.errors import ConversionError
from attention_residuals.layers.residual import Norm
from attention_residuals.models.hf.stream import Depth, Stream, opened_by, read_by

__all__ = ["Survey", "embedding_of", "probe_tokens", "survey"]


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Which modules of a model meet its residual stream, by name.

    Args:
        decoder: Owns the layers and the last norm.
        first_layer: Where the stream starts.
        norms: The norm that each site reads with: two a layer, and the last.
    """

    decoder: str
    first_layer: str
    norms: tuple[str, ...]


def survey(model: PreTrainedModel) -> Survey:
    """Runs a model once around a stream that keeps a record, and leaves the model as it was.

    Raises:
        ConversionError: It is no pre-norm model with two sublayers a layer and additions between them.
    """
    decoder, layers = _layers(model)
    record = _Record()
    norms = {
        name: module for name, module in model.named_modules() if "norm" in type(module).__name__.lower()
    }
    with _unchanged([layers[0], *norms.values()]):
        opened_by(layers[0], Depth(SimpleNamespace(attention_residuals=record)))
        for name, norm in norms.items():
            read_by(norm, name)
        hooks = [
            module.register_forward_pre_hook(partial(record.entered, name), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        try:
            with torch.no_grad():
                model(input_ids=probe_tokens(model), use_cache=False)
        except ConversionError as error:
            raise ConversionError(
                got=f"{error.got} in {record.last_entered or type(model).__name__}",
                expected=error.expected,
                do=error.do,
            ) from error
        finally:
            for hook in hooks:
                hook.remove()
    record.require_order(len(layers))
    return Survey(
        decoder=decoder,
        first_layer=next(name for name, module in model.named_modules() if module is layers[0]),
        norms=tuple(record.reads),
    )


def probe_tokens(model: PreTrainedModel) -> Tensor:
    """Makes the random tokens that a model is tried on, [2, 24], the same every time."""
    embedding = embedding_of(model)
    drawn = torch.randint(len(embedding), (2, 24), generator=torch.Generator().manual_seed(0))
    return drawn.to(embedding.device)


def embedding_of(model: PreTrainedModel) -> Float[Tensor, "V D"]:
    """Returns the table of a model's tokens."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight


class _Record:
    """A rule that adds as the model does, and notes who reads and when something is written."""

    def __init__(self) -> None:
        self.events: list[str | None] = []
        self.last_entered = ""

    @property
    def reads(self) -> list[str]:
        return [event for event in self.events if event is not None]

    def open(self, embedding: Tensor, tap: None = None) -> Tensor:
        return embedding

    def read(self, state: Tensor, name: str, norm: Norm, tap: None = None) -> tuple[tuple[Tensor], Tensor]:
        self.events.append(name)
        return (norm(state),), state

    def write(self, state: Tensor, name: str, output: Tensor, tap: None = None) -> Tensor:
        self.events.append(None)
        return state + output

    def entered(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Notes which module was handed a stream last: the culprit, if it does what no stream can."""
        if any(isinstance(value, Stream) for value in (*args, *kwargs.values())):
            self.last_entered = name

    def require_order(self, num_layers: int) -> None:
        """Checks that each norm read once, and that each read but the last was followed by one write."""
        for now, then in zip(self.events, self.events[1:], strict=False):
            if now is not None and then is not None:
                _refuse(f"{now} and {then} that read the same state (parallel sublayers)")
        reads = self.reads
        repeated = next((name for name in reads if reads.count(name) > 1), None)
        if repeated is not None:
            _refuse(f"{repeated} that reads at several places")
        if len(reads) != 2 * num_layers + 1 or len(self.events) != 2 * len(reads) - 1:
            _refuse(f"{len(reads)} reads and {len(self.events) - len(reads)} writes for {num_layers} layers")


def _layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    expected = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == expected:
            return name.rpartition(".")[0], module
    raise ConversionError(
        got=f"{type(model).__name__} without a list of {expected} layers",
        expected="a decoder with config.num_hidden_layers layers in one nn.ModuleList",
        do="convert a causal language model of Transformers, such as LlamaForCausalLM",
    )


@contextmanager
def _unchanged(modules: list[nn.Module]) -> Iterator[None]:
    """Gives modules their classes and attributes back."""
    before = [(module, module.__class__, dict(module.__dict__)) for module in modules]
    try:
        yield
    finally:
        for module, own, attributes in before:
            module.__class__ = own
            for name in module.__dict__.keys() - attributes.keys():
                delattr(module, name)


def _refuse(what: str) -> None:
    raise ConversionError(
        got=what,
        expected="two sublayers a layer, each read through a norm of its own and then added, and a last norm",
        do="convert a pre-norm model with sequential attention and MLP, such as Llama or Qwen",
    )
