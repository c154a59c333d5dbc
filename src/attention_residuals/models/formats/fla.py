"""Checkpoints of flash-linear-attention's Transformer, with attention residuals or without."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attention_residuals.configs import decode, encode
from attention_residuals.errors import CheckpointError, ConfigError, is_count, is_finite, nearest
from attention_residuals.layers.residual import AttnRes, ResidualConfig, StandardResidual
from attention_residuals.layers.residual.sources import reader_name
from attention_residuals.layers.tap import OUTPUT, Site
from attention_residuals.models.config import DecoderConfig
from attention_residuals.models.decoder import Decoder
from attention_residuals.models.formats.checkpoint import (
    Checkpoint,
    read_checkpoint,
    refuse_own_code,
    write_checkpoint,
)
from attention_residuals.models.weights import load_state

__all__ = ["FlaConfig", "fla_names", "load_fla", "save_fla"]

MODEL_TYPE, ARCHITECTURE = "transformer", "TransformerForCausalLM"

SIDE_FIELDS = frozenset(
    """_name_or_path architectures bos_token_id dtype elementwise_affine eos_token_id fuse_cross_entropy
    fuse_linear_cross_entropy fuse_norm fuse_swiglu id2label initializer_range label2id model_type pad_token_id
    return_dict torch_dtype transformers_version use_cache use_l2warp""".split()  # noqa: SIM905
)
"""Fields of FLA's and Transformers' configs that change nothing in what FLA's Transformer computes."""


@dataclass(frozen=True, kw_only=True)
class FlaConfig:
    """What decides what FLA's Transformer computes: its config's own fields and defaults.

    Args:
        vocab_size: V.
        hidden_size: D.
        num_hidden_layers: L.
        num_heads: Query heads; divides ``hidden_size``, and their quotient is the width of a head.
        num_kv_heads: Key and value heads; None for as many as query heads.
        qkv_bias: Must be False.
        qk_norm: Must be False.
        window_size: Must be None.
        rope_theta: Base of the rotary embedding, whose pairs are channels i and i + K/2 as in ``Decoder``.
        max_position_embeddings: The longest sequence.
        hidden_ratio: Sets the MLP's width where ``intermediate_size`` does not; None is 4.
        intermediate_size: F; None for 2/3 of ``hidden_ratio`` times D, rounded up to a multiple of 256.
        hidden_act: Must be ``"swish"``, which makes the MLP a SwiGLU.
        norm_eps: The eps of every norm, of keys too.
        tie_word_embeddings: The head shares the embedding's matrix, and is not stored.
        attnres_block_size: Sublayers per block: 1 for Full, an even number for Block attention residuals,
            None for standard ones.

    Raises:
        ConfigError: What ``Decoder`` cannot express, or values that contradict each other.

    Source:
        flash-linear-attention 0.6.0.
    """

    vocab_size: int = 32_000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_heads: int = 32
    num_kv_heads: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window_size: int | None = None
    rope_theta: int | float = 10_000.0
    max_position_embeddings: int = 2048
    hidden_ratio: int | float | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    norm_eps: int | float = 1e-6
    tie_word_embeddings: bool = False
    attnres_block_size: int | None = None

    def __post_init__(self) -> None:
        plain = {"qkv_bias": False, "qk_norm": False, "window_size": None, "hidden_act": "swish"}
        for name, value in plain.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    got=f"{name}={getattr(self, name)!r}",
                    expected=f"{name}={value!r}",
                    do="Decoder cannot compute this: run the model in flash-linear-attention",
                )
        size = self.attnres_block_size
        if size not in (None, 1) and not (is_count(size) and size % 2 == 0):
            raise ConfigError(
                got=f"attnres_block_size={size!r}",
                expected="None, 1 or an even number of sublayers",
                do="FLA's blocks are whole layers of two sublayers each",
            )
        counts = {name: getattr(self, name) for name in ("hidden_size", "num_heads", "num_hidden_layers")}
        if not all(map(is_count, counts.values())) or self.hidden_size % self.num_heads:
            raise ConfigError(
                got=", ".join(f"{name}={value!r}" for name, value in counts.items()),
                expected="positive numbers, hidden_size a multiple of num_heads",
                do="see whether the config belongs to these weights",
            )
        if self.hidden_ratio is not None and not is_finite(self.hidden_ratio):
            raise ConfigError(got=f"hidden_ratio={self.hidden_ratio!r}", expected="a number", do="4 is usual")

    @classmethod
    def of(cls, config: DecoderConfig) -> "FlaConfig":
        """Describes a decoder in FLA's fields.

        Raises:
            ConfigError: FLA's Transformer cannot express it.
        """
        if config.head_width * config.num_heads != config.width:
            raise ConfigError(
                got=f"{config.num_heads} heads of width {config.head_width} in a model of width {config.width}",
                expected="heads that are together as wide as the model, as FLA derives their width",
                do="keep it in this package's own format, with save_model",
            )
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            num_hidden_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            rope_theta=config.rope_base,
            max_position_embeddings=config.max_tokens,
            intermediate_size=config.mlp_width,
            norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied,
            attnres_block_size=_block_size(config),
        )

    def decoder_config(self) -> DecoderConfig:
        """Describes the same model in this package's terms.

        Raises:
            ConfigError: A value out of range.

        Example:
            >>> FlaConfig(hidden_size=64, num_heads=4, attnres_block_size=4).decoder_config().mlp_width
            256
        """
        ratio = 4 if self.hidden_ratio is None else self.hidden_ratio
        mlp_width = self.intermediate_size
        if mlp_width is None:
            mlp_width = -(-int(self.hidden_size * ratio * 2 / 3) // 256) * 256
        residual: ResidualConfig = StandardResidual()
        if self.attnres_block_size is not None:
            # In FLA a block may be larger than the model; it is the same as one block of all sublayers.
            size = min(self.attnres_block_size, 2 * self.num_hidden_layers)
            residual = AttnRes(sublayers_per_block=size, key_eps=float(self.norm_eps))
        return DecoderConfig(
            vocab_size=self.vocab_size,
            num_layers=self.num_hidden_layers,
            width=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_width=self.hidden_size // self.num_heads,
            mlp_width=mlp_width,
            max_tokens=self.max_position_embeddings,
            tied=self.tie_word_embeddings,
            norm_eps=float(self.norm_eps),
            rope_base=float(self.rope_theta),
            residual=residual,
        )


def load_fla(folder: Path | str) -> Decoder:
    """Reads a model that flash-linear-attention's Transformer was saved as.

    What is computed is the same. Two things are not kept: token ids of the config, which a decoder does not
    know, and FLA's freedom to run beyond ``max_position_embeddings``.

    Args:
        folder: Holds config.json and safetensors.

    Returns:
        The model, with the bits and the dtype of the file.

    Raises:
        CheckpointError: A damaged or foreign checkpoint, one that wants code of its own, or an option that
            ``Decoder`` cannot express.

    Example:
        >>> import tempfile
        >>> from attention_residuals.models import presets
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> folder = Path(tempfile.mkdtemp()) / "fla"
        >>> save_fla(model, folder)
        >>> torch.equal(load_fla(folder).embedding.weight, model.embedding.weight)
        True
    """
    checkpoint = read_checkpoint(folder)
    config = _config(checkpoint)
    claims = _claims(checkpoint, config)
    dtypes = {stored.dtype for name, stored in checkpoint.tensors.items() if name in claims}
    if len(dtypes) > 1:
        raise CheckpointError(
            got=f"{checkpoint.folder} with tensors of {' and '.join(sorted(dtypes))}",
            expected="one dtype",
            do="save it again after model.to(...) of one dtype",
        )
    tensors = checkpoint.load(claims)
    with torch.device("meta"):  # Nothing is drawn at random only to be replaced.
        model = Decoder(config)
    own = model.state_dict()
    state = {key: tensors[name].view(own[key].shape) for key, name in fla_names(config).items()}
    load_state(model, state, checkpoint.folder, assign=True)
    return model


def save_fla(model: Decoder, folder: Path | str) -> None:
    """Writes a model as flash-linear-attention's Transformer, bit for bit, into a folder that has none yet.

    Args:
        model: With attention residuals, Full or in blocks of whole layers, or with standard residuals.
        folder: Is made if it does not exist.

    Raises:
        ConfigError: FLA's Transformer cannot express the model.
        CheckpointError: The folder holds a model already, or cannot be written.
    """
    fields = encode(FlaConfig.of(model.config))
    del fields["type"]
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    config = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE, "dtype": dtype, **fields}
    # FLA's defaults are 1 and 2, which no decoder has promised.
    config |= {"bos_token_id": None, "eos_token_id": None}
    state, names = model.state_dict(), fla_names(model.config)
    tensors = {name: state[key] for key, name in names.items()}
    # A pseudo-query is a matrix of one row there.
    tensors |= {name: query[None] for name, query in tensors.items() if name.endswith("res_proj.weight")}
    write_checkpoint(folder, config=config, tensors=tensors)


def fla_names(config: DecoderConfig) -> dict[str, str]:
    """Names every tensor of a decoder as FLA does.

    Returns:
        FLA's name, by the name in the decoder's ``state_dict``.

    Example:
        >>> from attention_residuals.models import presets
        >>> fla_names(presets.scaled(2, vocab_size=300))["residual.readers.L1_mlp.pseudo_query"]
        'model.layers.1.mlp_res_proj.weight'
    """
    names = {"embedding.weight": "model.embeddings.weight", "norm.gain": "model.norm.weight"}
    if not config.tied:
        names["head.weight"] = "lm_head.weight"
    readers = {}
    for number in range(config.num_layers):
        names |= {f"layers.{number}.{key}": f"model.layers.{number}.{name}" for key, name in _LAYER.items()}
        readers[Site(number, "attention")] = f"model.layers.{number}.attn_res"
        readers[Site(number, "mlp")] = f"model.layers.{number}.mlp_res"
    readers[OUTPUT] = "model.res"
    if isinstance(config.residual, AttnRes):
        for site, name in readers.items():
            names[f"residual.readers.{reader_name(site)}.pseudo_query"] = f"{name}_proj.weight"
            names[f"residual.readers.{reader_name(site)}.key_gain"] = f"{name}_norm.weight"
    return names


_LAYER = {
    "attention.norm.gain": "attn_norm.weight",
    "attention.query.weight": "attn.q_proj.weight",
    "attention.key.weight": "attn.k_proj.weight",
    "attention.value.weight": "attn.v_proj.weight",
    "attention.output.weight": "attn.o_proj.weight",
    "mlp.norm.gain": "mlp_norm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def _claims(checkpoint: Checkpoint, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Lists FLA's tensors with their shapes, of the numbers in the config alone."""
    if config.num_layers > len(checkpoint.tensors):
        raise CheckpointError(
            got=f"{checkpoint.folder}: {config.num_layers} layers but {len(checkpoint.tensors)} tensors",
            expected="the weights of this very config",
            do="copy config and weights again from the same place",
        )
    width, mlp_width = config.width, config.mlp_width
    kv_width = config.num_kv_heads * config.head_width
    shapes = {
        **dict.fromkeys(("embeddings", "lm_head"), (config.vocab_size, width)),
        **dict.fromkeys(("q_proj", "o_proj"), (width, width)),
        **dict.fromkeys(("k_proj", "v_proj"), (kv_width, width)),
        **dict.fromkeys(("gate_proj", "up_proj"), (mlp_width, width)),
        "down_proj": (width, mlp_width),
        **dict.fromkeys(("res_proj", "attn_res_proj", "mlp_res_proj"), (1, width)),
    }
    return {name: shapes.get(name.split(".")[-2], (width,)) for name in fla_names(config).values()}


def _block_size(config: DecoderConfig) -> int | None:
    """Returns FLA's option for a residual rule; an odd block size is left to FlaConfig to refuse."""
    if config.residual == StandardResidual():
        return None
    if isinstance(config.residual, AttnRes) and config.residual == replace(
        config.residual, key_eps=config.norm_eps, source_dtype=None
    ):
        return config.residual.sublayers_per_block
    raise ConfigError(
        got=f"residual={config.residual!r} with norm_eps={config.norm_eps}",
        expected="StandardResidual, or AttnRes with key_eps equal to norm_eps and source_dtype=None",
        do="keep it in this package's own format, with save_model",
    )


def _config(checkpoint: Checkpoint) -> DecoderConfig:
    """Makes a decoder's config of FLA's, and refuses what it does not know unless it is switched off."""
    path = checkpoint.folder / "config.json"
    model_type = checkpoint.config.get("model_type")
    if model_type != MODEL_TYPE:
        raise CheckpointError(
            got=f"{path} with model_type {model_type!r}",
            expected=f"{MODEL_TYPE!r}, flash-linear-attention's Transformer",
            do="load it with the loader of its own format",
        )
    refuse_own_code(checkpoint)
    known = FlaConfig.__dataclass_fields__
    fields = {key: value for key, value in checkpoint.config.items() if key in known}
    for key, value in checkpoint.config.items():
        if key not in known and key not in SIDE_FIELDS and value not in (None, False):
            raise CheckpointError(
                got=f"{path} with {key!r}: {value!r}, which is not known",
                expected="the fields of FLA's Transformer",
                do=f"{nearest(key, known)}; remove it if it changes nothing in what is computed",
            )
    try:
        config = decode({**fields, "type": "FlaConfig"}, {"FlaConfig": FlaConfig})
        assert isinstance(config, FlaConfig)
        return config.decoder_config()
    except ConfigError as error:
        raise CheckpointError(got=f"{path}: {error.got}", expected=error.expected, do=error.do) from error
