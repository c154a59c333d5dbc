"""A stage of a model of Transformers: its own forward pass runs, in which the layers of other stages are missing."""

import copy
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_residuals.errors import ConfigError
from attention_residuals.models.hf.converted_model import ConvertedModel
from attention_residuals.models.hf.passing import Passing
from attention_residuals.models.hf.saving import own_tensors
from attention_residuals.models.hf.stream import Depth, Stream, opened_by
from attention_residuals.parallel.stages import Stage, shallow

__all__ = ["ConvertedStage", "is_tied", "require_cuttable"]


class _Absent(nn.Module):
    """Stands in the place of a module that another stage has, and hands on what it is given."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return hidden_states


class _Handed(Depth):
    """Lets a stream start with a state that earlier layers have left; with the embedding where there is none."""

    state: Any = None

    def open(self, embedding: Tensor) -> Stream:
        """Starts the stream; what the model has made of ``inputs_embeds`` is of no use but for its shape."""
        if self.state is None:
            return super().open(embedding)
        return Stream(self.rule, self.state, embedding, None)


class ConvertedStage(Stage):
    """A stage of a converted model, such as Kimi Linear.

    As anywhere in ``models/hf``, the model's own forward pass runs. The stage has a shallow copy of the model
    in which the layers of other stages hand on what they are given, and in which the stream starts with the
    state that the layers before have left.

    Args:
        model: As for ``Stage``.
        first: As for ``Stage``.
        end: As for ``Stage``.
    """

    def __init__(self, model: ConvertedModel, first: int, end: int) -> None:
        super().__init__(model, first, end, is_tied=is_tied(model))
        whole, config = model.transformers, model.config
        self._passing, self._decoder = Passing(whole), config.decoder
        self.transformers = shallow(whole)
        self.transformers._modules["attention_residuals"] = self.residual
        self._depth = _Handed(self.transformers)
        place = config.first_layer.rpartition(".")[0]
        layers = nn.ModuleList(
            layer if first <= number < end else _Absent()
            for number, layer in enumerate(whole.get_submodule(place).children())
        )
        if self.is_first:  # the whole model's layer opens the whole model's stream
            layers[0] = copy.copy(layers[0])
            layers[0].__dict__["depth"] = self._depth
        else:
            opened_by(layers[0], self._depth)
        _put(self.transformers, place, layers)
        embedding, head = (_name_of(whole, module) for module in _ends(whole))
        absent = [] if self.is_last else [config.norms[-1], head]
        absent += [] if self.is_first or (self.is_last and self.is_tied) else [embedding]
        for name in absent:
            _put(self.transformers, name, _Absent())

    def table(self) -> nn.Module | None:
        """Returns the embedding, where the stage has it."""
        found, _ = _ends(self.transformers)
        return None if isinstance(found, _Absent) else found

    def run(
        self, given: Tensor, state: Any, positions: Int[Tensor, "B T"], mask: Bool[Tensor, "B ..."] | None
    ) -> Any:
        """Runs the model, or what is below its head, on a stream that starts with a state."""
        passed = self._passing.arguments(positions, mask, self.transformers.dtype)
        # What the model makes of an embedding before its first layer is seen by the first stage alone.
        passed["input_ids" if self.is_first else "inputs_embeds"] = given
        self._depth.state = state
        try:
            if self.is_last:
                return self.transformers(**passed).logits
            return self.transformers.get_submodule(self._decoder)(**passed).last_hidden_state.state
        finally:
            self._depth.state = None

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the stage's tensors, by their names in the whole model's ``state_dict``."""
        return own_tensors(self.transformers)


def require_cuttable(model: ConvertedModel) -> None:
    """Checks that nothing happens between a model's embedding and its layers that more than one stage would need.

    Raises:
        ConfigError: A parameter that belongs neither to the layers nor to the ends.
    """
    whole, config = model.transformers, model.config
    layers = whole.get_submodule(config.first_layer.rpartition(".")[0])
    known = [*_ends(whole), layers, whole.get_submodule(config.norms[-1]), model.residual]
    parts = {parameter for module in known for parameter in module.parameters()}
    beside = next((name for name, parameter in whole.named_parameters() if parameter not in parts), None)
    if beside is not None:
        raise ConfigError(
            got=f"stages of a {type(whole).__name__}, which has {beside} beside its layers",
            expected="parameters of the layers, of embedding and head, and of the norm before the head",
            do="train it in one process, or cut a model without it, such as Kimi Linear or Llama",
        )


def is_tied(model: ConvertedModel) -> bool:
    """Tells whether the head of a model is its embedding."""
    embedding, head = _ends(model.transformers)
    return embedding.weight is head.weight


def _ends(model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """Returns the table of tokens and the head."""
    return model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    found: str = next(name for name, module in model.named_modules() if module is wanted)
    return found


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Puts a module in the place of another, in a copy of whatever holds it."""
    *way, last = name.split(".")
    for step in way:
        holder = shallow(model.get_submodule(step))
        model._modules[step] = model = holder
    model._modules[last] = module
