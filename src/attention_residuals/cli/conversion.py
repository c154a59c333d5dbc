"""The command that gives a pretrained model another residual rule."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from tyro.conf import Positional

from attention_residuals.cli.app import command
from attention_residuals.cli.names import residual_of
from attention_residuals.data import Tokenizer
from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.layers.residual import AttnRes

__all__ = ["convert_command"]


@command("convert")
def convert_command(
    source: Positional[Path],
    folder: Positional[Path],
    residual: str = "block",
    end_of_text: str | None = None,
) -> int:
    """Give a pretrained Transformers model another residual rule, without changing what it computes.

    The model is run before and after on random tokens, and the conversion is refused unless the logits
    agree. The folder receives config.json, model.safetensors and tokenizer.json, which attnres generate,
    eval, trace and train --start read, and AutoModelForCausalLM.from_pretrained too. Nothing is downloaded.

    For example:
      attnres convert SmolLM2-135M converted
      attnres convert SmolLM2-135M-Instruct.Q4_1.gguf converted --residual full
      attnres generate converted "The capital of France is"
      attnres train runs/tuned --start converted --trains residual

    Args:
        source: The folder of a pretrained model with its tokenizer, or a GGUF file.
        folder: A new folder.
        residual: block (about 8 blocks), block:S with S sublayers per block, full, or a rule that
            attnres rules lists.
        end_of_text: The token that ends a text; by default the one that the tokenizer names.
    """
    try:
        from attention_residuals.models.hf import convert, save_converted
    except ImportError as error:
        raise ConfigError(
            got=f"no usable Transformers ({error})",
            expected="the package that pretrained models come from",
            do="pip install 'attention-residuals[hf]'",
        ) from error
    if (folder / "config.json").exists():
        raise ConfigError(got=f"{folder}, which holds a model", expected="a new folder", do="name another")
    model, tokenizer = _loaded(source)
    num_sublayers = 2 * model.config.get_text_config().num_hidden_layers
    rule = residual_of(residual, AttnRes(sublayers_per_block=-(-num_sublayers // 8)))
    convert(model, rule)
    save_converted(model, folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    own = Tokenizer.load(
        file,
        end_of_text=end_of_text or tokenizer.eos_token,
        vocab_size=len(model.get_input_embeddings().weight),
    )
    file.unlink()
    own.save(file)
    learned = sum(parameter.numel() for parameter in model.attention_residuals.parameters())
    print(f"wrote {folder}: the same function, with {rule} and {learned:,} new parameters")
    return 0


def _loaded(source: Path) -> tuple[Any, Any]:
    """Reads a pretrained model and its tokenizer; no pickle, no code of theirs, no network."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if not source.exists():
        raise ConfigError(
            got=f"{source}, which does not exist",
            expected="the folder of a pretrained model, or a GGUF file",
            do="download it first; this command does not use the network",
        )
    is_file = source.is_file()
    place: dict[str, Any] = {"pretrained_model_name_or_path": source.parent if is_file else source}
    if is_file:
        place["gguf_file"] = source.name
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    weights: dict[str, Any] = (
        {"quantization_config": GgufConfig(dequantize=True), "dtype": "float32"}
        if is_file
        else {"use_safetensors": True, "dtype": "auto"}
    )
    try:
        _refuse_kernels(source)
        tokenizer = AutoTokenizer.from_pretrained(**place, **options)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            **place, **options, **weights, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            got=f"{source}: {str(error).strip().splitlines()[0]}",
            expected="a causal language model as safetensors or GGUF, with its tokenizer, and no code of its own",
            do="see whether the download is complete; save pickled weights as safetensors first",
        ) from error
    model, info = loaded
    lacking = sorted({*map(str, info["missing_keys"]), *map(str, info["mismatched_keys"])})
    if lacking:
        raise CheckpointError(
            got=f"{source}: {len(lacking)} tensors that are missing or of another shape, the first is {lacking[0]}",
            expected="every tensor of the model, none of them drawn at random",
            do="see whether the download is complete",
        )
    return model, tokenizer


def _refuse_kernels(source: Path) -> None:
    """Refuses a config that names a kernel to fetch and run."""
    path = source / "config.json"
    if source.is_file() or not path.is_file():
        return
    described = json.loads(path.read_text(encoding="utf-8"))
    for own in (described, *(value for value in described.values() if isinstance(value, dict))):
        for name in ("attn_implementation", "_attn_implementation"):
            if own.get(name) not in (None, "eager", "sdpa"):
                raise ValueError(f"{name} is {own[name]!r}, which could be code from elsewhere")
