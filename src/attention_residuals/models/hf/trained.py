"""Models of Transformers that others have trained around a residual rule, and the files that they lie in."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig
from transformers.initialization import no_init_weights

from attention_residuals.errors import CheckpointError, ConfigError, is_count, nearest
from attention_residuals.layers.residual import ResidualConfig
from attention_residuals.models.converted import ConvertedConfig
from attention_residuals.models.formats.checkpoint import Checkpoint
from attention_residuals.models.hf.converted_model import ConvertedModel
from attention_residuals.models.hf.install import eps_name
from attention_residuals.models.hf.saving import described
from attention_residuals.models.weights import load_state

__all__ = [
    "NOT_A_CONFIG",
    "Stored",
    "load_trained",
    "own_config",
    "plain_fields",
    "require_known",
    "require_plausible",
    "require_trained",
    "senseless",
    "stored_dtype",
    "stored_tensors",
    "trained_config",
]

Stored = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Gives views of a model's tensor, by the names that they have in a file; they cover it."""

DUMPED = frozenset(
    """_name_or_path architectures attn_implementation chunk_size_feed_forward id2label is_encoder_decoder
    label2id output_attentions output_hidden_states output_router_logits problem_type return_dict torch_dtype
    transformers_version""".split()  # noqa: SIM905
)
"""Fields that Transformers adds to any config, and that are not written out again."""

ONLY_TOLD = DUMPED | set(
    """bos_token_id dtype eos_token_id initializer_range model_type pad_token_id pretraining_tp
    use_cache""".split()  # noqa: SIM905
)
"""Fields of any config that change nothing in the logits."""

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

NOT_A_CONFIG = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What Transformers raises, somewhere on the way from a config to a model, when a value makes no sense."""


def own_config(fields: Mapping[str, Any], where: Path) -> PreTrainedConfig:
    """Makes Transformers' config of what a file says.

    Raises:
        CheckpointError: A value that makes no sense, or a model that the installed Transformers does not know.
    """
    try:
        config = AutoConfig.for_model(**fields)
        assert isinstance(config, PreTrainedConfig)
        return config
    except NOT_A_CONFIG as error:
        raise senseless(where, error) from error


def require_known(fields: Mapping[str, Any], further: Collection[str], where: Path) -> None:
    """Refuses fields that Transformers' config of that type does not have, unless they are switched off.

    Args:
        fields: As read, with the ``model_type``.
        further: Fields that the format adds.
        where: The file, for the message.

    Raises:
        CheckpointError: A field that might change what is computed.
    """
    own = own_config({"model_type": fields["model_type"]}, where)
    known = {*own.to_dict(), *own.attribute_map, *further}
    for name, value in fields.items():
        if name not in known and name not in ONLY_TOLD and value not in (None, False):
            raise CheckpointError(
                got=f"{where} with {name!r}: {value!r}, which is not known",
                expected=f"the fields of {type(own).__name__} and {', '.join(sorted(further))}",
                do=f"{nearest(name, known)}; remove it if it changes nothing in what is computed",
            )


def plain_fields(own: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves out what Transformers adds to any config."""
    return {name: value for name, value in own.items() if name not in DUMPED}


def require_plausible(checkpoint: Checkpoint, **counts: object) -> None:
    """Refuses numbers of parts that the tensors cannot be enough for, before a model of that size is made.

    Raises:
        CheckpointError: No positive number, or more than there are tensors.
    """
    for name, count in counts.items():
        if not (isinstance(count, int) and is_count(count)) or count > len(checkpoint.tensors):
            raise CheckpointError(
                got=f"{checkpoint.folder}: {name}={count!r} and {len(checkpoint.tensors)} tensors",
                expected="a positive number, and at least one tensor for each",
                do="copy config and weights again from the same place",
            )


def trained_config(
    checkpoint: Checkpoint, fields: Mapping[str, Any], residual: ResidualConfig, embedding: str
) -> ConvertedConfig:
    """Describes a model with Llama's names of modules, whose norms keep the eps that they were trained with.

    Args:
        checkpoint: Where it lies.
        fields: Of the Transformers model around whose sublayers the rule runs.
        residual: The rule.
        embedding: Name of the stored tensor that has the dtype of the model.

    Raises:
        CheckpointError: The config makes no sense.
    """
    where = checkpoint.folder / "config.json"
    own = own_config({**fields, "dtype": stored_dtype(checkpoint, embedding)}, where)
    layers = [f"model.layers.{number}" for number in range(own.num_hidden_layers)]
    norms = [f"{layer}.{norm}_layernorm" for layer in layers for norm in ("input", "post_attention")]
    try:
        return ConvertedConfig(
            transformers=described(own),
            vocab_size=own.vocab_size,
            width=own.hidden_size,
            max_tokens=own.max_position_embeddings,
            residual=residual,
            decoder="model",
            first_layer=layers[0],
            norms=(*norms, "model.norm"),
            eps=(own.rms_norm_eps,) * (len(norms) + 1),
        )
    except (ConfigError, *NOT_A_CONFIG) as error:
        raise senseless(where, error) from error


def stored_dtype(checkpoint: Checkpoint, embedding: str) -> str:
    """Tells the dtype of a model, which is that of its stored embedding, as Transformers spells it."""
    stored = checkpoint.tensors.get(embedding)
    return "float32" if stored is None else DTYPES.get(stored.dtype, "float32")


def load_trained(
    checkpoint: Checkpoint, config: ConvertedConfig, stored: Stored, *, float32: tuple[str, ...] = ()
) -> ConvertedModel:
    """Makes a model and gives it every tensor of a checkpoint, with the bits and the dtype of the file.

    Args:
        checkpoint: Where it lies.
        config: What it is.
        stored: How each of its tensors is stored.
        float32: How the names end of tensors that may be float32 in a model of fewer bits.

    Raises:
        CheckpointError: Tensors are missing, left over or of another shape, or of dtypes that do not go
            together.
    """
    shapes = _shapes(config, checkpoint.folder / "config.json")
    claims = {name: tuple(part.shape) for own in shapes for name, part in stored(own, shapes[own]).items()}
    tensors = checkpoint.load(claims)
    dtype = getattr(torch, config.original["dtype"])
    wrong = next((name for name in tensors if not _fits(name, tensors[name].dtype, dtype, float32)), None)
    if wrong is not None:
        raise CheckpointError(
            got=f"{checkpoint.folder}: {wrong} of {tensors[wrong].dtype} in a model of {dtype}",
            expected="one dtype" + (f"; or float32 for {', '.join(float32)}" if float32 else ""),
            do="save it again after model.to(...) of one dtype",
        )
    with no_init_weights():  # Nothing is drawn at random only to be replaced.
        model = ConvertedModel.of(config)
    model.transformers.tie_weights()
    state = {own: _filled(own, shape, stored, tensors) for own, shape in shapes.items()}
    load_state(model, state, checkpoint.folder, assign=True)
    return model


def stored_tensors(model: ConvertedModel, stored: Stored) -> dict[str, Tensor]:
    """Gives the tensors of a model as they are stored."""
    state = model.state_dict()
    return {name: part for own, tensor in state.items() for name, part in stored(own, tensor).items()}


def require_trained(model: object, model_type: str, residuals: tuple[type, ...]) -> dict[str, Any]:
    """Returns the Transformers config of a model that a format can hold, as plain values.

    Raises:
        ConfigError: Another model, another rule, or norms whose eps a conversion has changed.
    """
    config = model.config if isinstance(model, ConvertedModel) else None
    if config is None or config.original["model_type"] != model_type:
        raise ConfigError(
            got=type(model).__name__
            if config is None
            else f"a model of type {config.original['model_type']!r}",
            expected=f"a ConvertedModel around a {model_type} model of Transformers",
            do="keep it in this package's own format, with save_model",
        )
    eps = config.original["rms_norm_eps"]
    assert isinstance(model, ConvertedModel)
    modules = [model.transformers.get_submodule(name) for name in config.norms]
    used = {getattr(norm, eps_name(norm)) for norm in modules} | {getattr(config.residual, "key_eps", eps)}
    dtype = getattr(config.residual, "source_dtype", None)
    if not isinstance(config.residual, residuals) or used != {eps} or dtype is not None:
        raise ConfigError(
            got=f"residual={config.residual!r}, and norms with eps {', '.join(map(str, sorted(used)))}",
            expected=f"{' or '.join(kind.__name__ for kind in residuals)} with source_dtype=None, "
            f"and {eps} for every norm and for key_eps, since the format holds one eps",
            do="keep it in this package's own format, with save_model",
        )
    return config.original


def _shapes(config: ConvertedConfig, where: Path) -> dict[str, Tensor]:
    """Makes the model without memory, for the shapes of its tensors."""
    try:
        with torch.device("meta"):
            return dict(ConvertedModel.of(config).state_dict())
    except (ConfigError, *NOT_A_CONFIG) as error:
        raise senseless(where, error) from error


def _filled(own: str, shape: Tensor, stored: Stored, tensors: Mapping[str, Tensor]) -> Tensor:
    """Puts a tensor together of the parts that are stored of it."""
    names = [*stored(own, shape)]
    whole = torch.empty(shape.shape, dtype=tensors[names[0]].dtype)
    for name, place in stored(own, whole).items():
        place.copy_(tensors[name])
    return whole


def _fits(name: str, dtype: torch.dtype, own: torch.dtype, float32: tuple[str, ...]) -> bool:
    return dtype == own or (dtype == torch.float32 and own != torch.float64 and name.endswith(float32))


def senseless(where: Path, error: Exception) -> CheckpointError:
    """Makes an error of what Transformers says of a config."""
    text = " ".join((error.got if isinstance(error, ConfigError) else str(error)).split())
    return CheckpointError(
        got=f"{where}: {type(error).__name__}: {text}",
        expected="a config that Transformers can make a model of",
        do="copy the file again, or use the version of Transformers that it names",
    )
