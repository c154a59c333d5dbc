"""Gives a pretrained Transformers model another residual rule, and proves that nothing is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention_residuals.errors import ConversionError
from attention_residuals.layers.residual import ResidualConfig
from attention_residuals.models.converted import ConvertedConfig, read_scales
from attention_residuals.models.hf.install import eps_name, install, is_converted
from attention_residuals.models.hf.kimi_linear import require_possible
from attention_residuals.models.hf.saving import described
from attention_residuals.models.hf.survey import embedding_of, probe_tokens, survey

__all__ = ["TOLERANCE", "convert", "original_config"]

TOLERANCE = 1e-5
"""The largest relative L2 distance of logits, in float32, that a conversion may show."""


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
        ConfigError: The rule does not fit the number of layers, or reads several times at a site; or a Kimi
            Linear model without a layer that attends to the whole text.

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
    _require_plain(model)
    require_possible(model.config.to_dict())
    with _evaluating(model), _in_float32(model):
        config = original_config(model, residual)
        rule = residual.build(num_layers=config.num_layers, width=config.width)
        scaled = tuple(eps * scale**2 for eps, scale in zip(config.eps, read_scales(rule), strict=True))
        before = _logits(model)
        undo = install(model, replace(config, eps=scaled))
        try:
            _require_same(before, _logits(model), type(residual).__name__)
        except BaseException:
            undo()
            raise
    return model


def _require_plain(model: PreTrainedModel) -> None:
    """Refuses what the proof would not see: it runs text through the model, once, without training it."""
    config = getattr(model, "config", None)
    facts = {
        "no head that makes logits": not isinstance(model, PreTrainedModel)
        or model.get_output_embeddings() is None,  # type: ignore[no-untyped-call]
        "layers that are left out at random in training": bool(getattr(config, "layerdrop", 0.0)),
        "cross-attention, which reads the stream as well": bool(
            getattr(config, "add_cross_attention", False)
        ),
        "reentrant activation checkpointing, which loses gradients": any(
            getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {}).get(
                "use_reentrant"
            )
            for module in model.modules()
        ),
    }
    for what, holds in facts.items():
        if holds:
            raise ConversionError(
                got=f"a {type(model).__name__} with {what}",
                expected="a causal language model of attention and MLP layers, all of which run",
                do="switch it off in the config, or convert the causal language model itself",
            )


def original_config(model: PreTrainedModel, residual: ResidualConfig) -> ConvertedConfig:
    """Describes a model, with its own eps, and the rule that shall run around it.

    Raises:
        ConversionError: Its sublayers are not pre-norm.
    """
    places = survey(model)
    norms = [model.get_submodule(name) for name in places.norms]
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    return ConvertedConfig(
        transformers=described(model.config),
        vocab_size=len(embedding_of(model)),
        width=text.hidden_size,
        max_tokens=longest if isinstance(longest, int) else 2048,
        residual=residual,
        decoder=places.decoder,
        first_layer=places.first_layer,
        norms=places.norms,
        eps=tuple(getattr(norm, eps_name(norm)) for norm in norms),
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
            do="use a rule that starts as the standard residual (docs/rules.md tells which), "
            "and a model in which only norms read the stream",
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switches dropout off for a while."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Runs a model of fewer bits in float32, which holds its numbers exactly, and turns it back."""
    short = [
        (tensor, tensor.dtype)
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.dtype in (torch.bfloat16, torch.float16)
    ]
    for tensor, _ in short:
        tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in short:
            tensor.data = tensor.data.to(dtype)
        rule = getattr(model, "attention_residuals", None)
        if short and isinstance(rule, nn.Module):
            rule.to(short[0][1])
