"""Makes a Transformers model run around a residual rule; whether it computes the same is for others to prove."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attention_residuals.errors import ConfigError, ConversionError
from attention_residuals.layers.tap import OUTPUT, Site
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.hf.kimi_linear import own_kimi_modules
from attention_residuals.models.hf.saving import saved_as_converted
from attention_residuals.models.hf.stream import Depth, Stream, opened_by, read_by
from attention_residuals.models.hf.survey import embedding_of

__all__ = ["depth_of", "eps_name", "install", "is_converted"]

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
"""What norms call it."""


def install(model: PreTrainedModel, config: ConvertedConfig) -> Callable[[], None]:
    """Makes a model run around a rule, and gives its norms their eps.

    Args:
        model: Of the shape that the config describes.
        config: The rule, and where the model meets its stream.

    Returns:
        A function that takes all of it back.

    Raises:
        ConfigError: The rule reads several times at a site.
        ConversionError: The model has no such modules.
    """
    rule = config.residual.build(num_layers=config.num_layers, width=config.width)
    several = next((site for site in rule.sites() if len(rule.parts(site)) > 1), None)
    if several is not None:
        raise ConfigError(
            got=f"{type(config.residual).__name__}, which reads {len(rule.parts(several))} times at {several}",
            expected="a rule with one read a site, since the model's attention takes one input",
            do="use AttnRes, or train a Decoder of this library with that rule",
        )
    norms = [_submodule(model, name) for name in config.norms]
    first = _submodule(model, config.first_layer)
    before = [(norm, eps_name(norm), getattr(norm, eps_name(norm))) for norm in norms]
    own = own_kimi_modules(model)
    classes = [(module, module.__class__) for module in (*norms, first, model, *own)]
    like = embedding_of(model)
    model.attention_residuals = rule.to(device=like.device, dtype=like.dtype)
    for norm, site, eps in zip(norms, rule.sites(), config.eps, strict=True):
        setattr(norm, eps_name(norm), eps)
        read_by(norm, site)
    for module, better in own.items():
        module.__class__ = better
    model.__dict__["conversion"] = config
    opened_by(first, Depth(model))
    saved_as_converted(model)
    hook = _submodule(model, config.decoder).register_forward_hook(_hidden_states_as_tensors)

    def undo() -> None:
        for module, own in classes:
            module.__class__ = own
        for norm, name, eps in before:
            setattr(norm, name, eps)
            del norm.depth_site
        del first.depth, model.attention_residuals, model.conversion
        hook.remove()

    return undo


def is_converted(model: nn.Module) -> bool:
    """Tells whether a model runs around a residual rule of this library."""
    return "conversion" in model.__dict__


def depth_of(model: nn.Module) -> Depth:
    """Returns what all streams of a converted model share.

    Raises:
        ConversionError: It is not converted.
    """
    for module in model.modules():
        depth = module.__dict__.get("depth")
        if isinstance(depth, Depth):
            return depth
    raise ConversionError(
        got=f"a {type(model).__name__} that is not converted",
        expected="a converted model",
        do="call convert(model, AttnRes(...)) first",
    )


def eps_name(norm: nn.Module) -> str:
    """Finds the attribute that is a norm's eps.

    Raises:
        ConversionError: It has none.

    Example:
        >>> eps_name(nn.LayerNorm(4))
        'eps'
    """
    for name in EPS_NAMES:
        if isinstance(getattr(norm, name, None), (int, float)):
            return name
    raise ConversionError(
        got=f"a {type(norm).__name__} without an eps that could be changed",
        expected=f"a norm with a number as one of {', '.join(EPS_NAMES)}",
        do="put a norm with such an eps in its place",
    )


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        raise ConversionError(
            got=f"a {type(model).__name__} without {name!r}",
            expected="the modules that were found at the conversion",
            do="use the version of Transformers that the model was converted with",
        ) from error


def _hidden_states_as_tensors(decoder: nn.Module, args: Any, outputs: Any) -> Any:
    """Gives whoever asks for hidden states what each layer's attention reads, before its norm."""
    if isinstance(outputs, tuple):
        return tuple(_as_tensors(value) if isinstance(value, (tuple, list)) else value for value in outputs)
    if getattr(outputs, "hidden_states", None) is not None:
        outputs["hidden_states"] = _as_tensors(outputs["hidden_states"])
    return outputs


def _as_tensors(states: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        state.mixed(Site(layer, "attention") if layer < state.rule.num_layers else OUTPUT)
        if isinstance(state, Stream)
        else state
        for layer, state in enumerate(states)
    )
