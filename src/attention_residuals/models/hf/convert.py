"""Gives a pretrained Transformers model another residual rule, and proves that nothing is lost."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_residuals.configs import encode
from attention_residuals.errors import ConfigError, ConversionError
from attention_residuals.layers.residual import ResidualConfig, ResidualRule
from attention_residuals.layers.tap import OUTPUT, Site
from attention_residuals.models.hf.stream import Depth, Stream, opened_by, read_by
from attention_residuals.models.hf.survey import Survey, probe_tokens, survey

__all__ = ["TOLERANCE", "convert", "depth_of", "install", "is_converted", "read_scales"]

TOLERANCE = 1e-5
"""The largest relative L2 distance of logits, in float32, that a conversion may show."""

EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


def convert(model: PreTrainedModel, residual: ResidualConfig) -> PreTrainedModel:
    """Puts a residual rule around a pretrained model's own sublayers, without changing its function.

    A fresh attention residual gives the mean of its n sources, which a norm turns into the same input as
    their sum if its eps is eps / n^2. So each reader's eps is changed to that, the model is run before and
    after on random tokens, and the conversion is kept only if the logits agree. What trains afterwards is
    all of the model, or the new parameters alone (``model.attention_residuals.parameters()``).

    Args:
        model: A causal language model of Transformers whose layers are pre-norm with plain additions:
            Llama, Mistral, Qwen, Phi-3, Gemma, GPT-2, DeepSeek-V3, Kimi Linear and others. Is changed, or
            left as it was when the conversion is refused.
        residual: The rule; one that starts as the standard residual, such as ``AttnRes``.

    Returns:
        The same model, which goes on to be one of Transformers: ``generate``, ``Trainer`` and PEFT work.

    Raises:
        ConversionError: Its sublayers are not pre-norm, or the logits before and after differ.
        ConfigError: The rule does not fit the number of layers, or reads several times at a site.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from attention_residuals.layers.residual import AttnRes
        >>> shape = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        ...                     num_attention_heads=2, num_key_value_heads=1)
        >>> model = convert(LlamaForCausalLM(shape), AttnRes(sublayers_per_block=2))
        >>> sum(parameter.numel() for parameter in model.attention_residuals.parameters())
        288
    """
    if is_converted(model):
        raise ConversionError(
            got=f"a {type(model).__name__} that is converted already",
            expected="a model with its own residual connections",
            do="load the original again and convert it once",
        )
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with _in_float32(model):
            places = survey(model)
            before = _logits(model)
            undo = install(model, residual, places)
            try:
                _require_same(before, _logits(model), type(residual).__name__)
            except ConversionError:
                undo()
                raise
    finally:
        for module in training:
            module.training = True
    return model


def is_converted(model: nn.Module) -> bool:
    """Tells whether a model runs around a residual rule of this library."""
    return isinstance(getattr(model, "attention_residuals", None), ResidualRule)


def depth_of(model: PreTrainedModel) -> Depth:
    """Returns what all streams of a converted model share.

    Raises:
        ConversionError: It is not converted.
    """
    for module in model.modules():
        depth = module.__dict__.get("depth")
        if isinstance(depth, Depth):
            return depth
    raise ConversionError(
        got=f"a {type(model).__name__} that is not converted", expected="a converted model", do="convert it first"
    )


def read_scales(rule: ResidualRule[Any]) -> list[float]:
    """Tells how many times larger than the sum of all outputs the reads of a fresh rule are, site by site.

    Example:
        >>> from attention_residuals.layers.residual import AttnRes
        >>> read_scales(AttnRes(sublayers_per_block=2).build(num_layers=2, width=4))
        [1.0, 0.5, 0.5, 0.3333333333333333, 0.3333333333333333]
    """
    one = torch.ones(1, 1, rule.width, dtype=torch.float64, device=next(rule.parameters(), torch.ones(1)).device)
    dtypes = [parameter.dtype for parameter in rule.parameters()]
    rule.double()
    scales = []
    with torch.no_grad():
        state = rule.open(one)
        for written, site in enumerate(rule.sites(), start=1):
            (mix, *_), state = rule.read(state, site, _itself)
            scales.append(mix[0, 0, 0].item() / written)
            if site != OUTPUT:
                state = rule.write(state, site, one)
    for parameter, dtype in zip(rule.parameters(), dtypes, strict=True):
        parameter.data = parameter.data.to(dtype)
    return scales


def install(model: PreTrainedModel, residual: ResidualConfig, places: Survey, *, scale_eps: bool = True) -> Any:
    """Makes a model run around a rule; proves nothing.

    Args:
        model: As surveyed.
        residual: The rule.
        places: Where the model meets its stream.
        scale_eps: Change each reader's eps so that the fresh rule is the model's own. False for models that
            were trained with the rule, whose eps is what it should be.

    Returns:
        A function that takes all of it back.
    """
    config = model.config.get_text_config()
    rule = residual.build(num_layers=places.num_layers, width=config.hidden_size)
    several = next((site for site in rule.sites() if len(rule.parts(site)) > 1), None)
    if several is not None:
        raise ConfigError(
            got=f"{type(residual).__name__}, which reads {len(rule.parts(several))} times at {several}",
            expected="a rule with one read a site, since the model's attention takes one input",
            do="use AttnRes, or train a Decoder of this library with that rule",
        )
    scales = read_scales(rule) if scale_eps else [1.0] * len(places.norms)
    embedding = model.get_input_embeddings().weight
    rule.to(device=embedding.device, dtype=embedding.dtype)
    norms = [model.get_submodule(name) for name in places.norms]
    first = model.get_submodule(places.first_layer)
    classes = [(module, module.__class__) for module in (*norms, first)]
    eps = [(norm, _eps_name(norm), getattr(norm, _eps_name(norm))) for norm in norms]
    for (norm, name, value), site, scale in zip(eps, rule.sites(), scales, strict=True):
        setattr(norm, name, value * scale**2)
        read_by(norm, site)
    opened_by(first, Depth(rule))
    model.attention_residuals = rule
    hook = model.get_submodule(places.decoder).register_forward_hook(_hidden_states_as_tensors)
    model.config.attention_residuals = {
        "format": 1,
        "residual": encode(residual),
        "decoder": places.decoder,
        "first_layer": places.first_layer,
        "norms": list(places.norms),
        "eps": [getattr(norm, name) for norm, name, _ in eps],
    }

    def undo() -> None:
        for module, own in classes:
            module.__class__ = own
        for norm, name, value in eps:
            setattr(norm, name, value)
            del norm.depth_site
        del first.depth, model.attention_residuals, model.config.attention_residuals
        hook.remove()

    return undo


def _eps_name(norm: nn.Module) -> str:
    for name in EPS_NAMES:
        if isinstance(getattr(norm, name, None), float):
            return name
    raise ConversionError(
        got=f"a {type(norm).__name__} without an eps that could be changed",
        expected=f"a norm with one of {', '.join(EPS_NAMES)}",
        do="replace its eps of None, or the norm, by one with a number",
    )


def _logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=probe_tokens(model), use_cache=False).logits
    return logits


def _require_same(before: Tensor, after: Tensor, rule: str) -> None:
    distance = ((after - before).norm() / before.norm()).item()
    if not distance <= TOLERANCE:
        raise ConversionError(
            got=f"logits that {rule} changes by {distance:.1e} (relative L2, random tokens, float32)",
            expected=f"at most {TOLERANCE:.0e}: the model's own function",
            do="use a rule that starts as the standard residual (attnres rules lists them), "
            "and a model in which only norms read the stream",
        )


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Runs a model of fewer bits in float32, which holds its numbers exactly, and turns it back."""
    short = [
        tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.dtype in (torch.bfloat16, torch.float16)
    ]
    dtypes = [tensor.dtype for tensor in short]
    for tensor in short:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in zip(short, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


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


def _itself(tensor: Tensor) -> Tensor:
    return tensor
