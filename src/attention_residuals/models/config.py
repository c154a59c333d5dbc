"""The shape of a decoder."""

from dataclasses import dataclass, field

from attention_residuals.errors import ConfigError, is_count
from attention_residuals.layers.residual import AttnRes, ResidualConfig

__all__ = ["DecoderConfig"]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything that decides what a decoder computes.

    Args:
        vocab_size: V, tokens in the vocabulary.
        num_layers: L, each an attention and an MLP.
        width: D.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_width: K, even.
        mlp_width: F, the inner width of the MLP.
        max_tokens: The longest sequence that the model accepts.
        tied: The head shares the embedding's matrix.
        norm_eps: The eps of every reader's norm.
        rope_base: Base of the rotary embedding's wavelengths.
        init_std: Of weights at the start; what writes to the residual state is smaller by sqrt(2 L).
        common_std: Of one vector that all rows of the embedding share at the start, 0 or more. Nothing here has
            a bias, so it gives queries and keys a part that does not depend on the token. With both near
            1 / sqrt(D), a model of 4 layers looked pairs up after half as many steps (one run each).
        residual: The residual rule with its options.

    Raises:
        ConfigError: A value out of range, or values that contradict each other.

    Example:
        >>> from attention_residuals.models import presets
        >>> presets.scaled(8, vocab_size=4096).width
        128
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    mlp_width: int
    max_tokens: int
    tied: bool = True
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0
    init_std: float = 0.02
    common_std: float = 0.0
    residual: ResidualConfig = field(default_factory=lambda: AttnRes(sublayers_per_block=4))

    def __post_init__(self) -> None:
        counts = (
            "vocab_size",
            "num_layers",
            "width",
            "num_heads",
            "num_kv_heads",
            "head_width",
            "mlp_width",
            "max_tokens",
        )
        for name in counts:
            if not is_count(getattr(self, name)):
                raise ConfigError(
                    got=f"{name}={getattr(self, name)!r}",
                    expected="a whole number, 1 or more",
                    do=f"pass a positive {name}",
                )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                got=f"num_heads={self.num_heads} with num_kv_heads={self.num_kv_heads}",
                expected="a multiple of num_kv_heads",
                do=f"use one of {[n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]}",
            )
        if self.head_width % 2:
            raise ConfigError(
                got=f"head_width={self.head_width}",
                expected="an even number, since rotary positions turn pairs of channels",
                do=f"use {self.head_width + 1}",
            )
        if not isinstance(self.residual, ResidualConfig):
            raise ConfigError(
                got=f"residual={self.residual!r}",
                expected="the config of a residual rule",
                do="pass AttnRes(sublayers_per_block=4) or StandardResidual()",
            )
        if not self.norm_eps >= 0 or not self.rope_base > 0:
            raise ConfigError(
                got=f"norm_eps={self.norm_eps}, rope_base={self.rope_base}",
                expected="norm_eps >= 0 and rope_base > 0",
                do="1e-6 and 10000 are usual",
            )
        if not self.init_std > 0 or not self.common_std >= 0:
            raise ConfigError(
                got=f"init_std={self.init_std}, common_std={self.common_std}",
                expected="init_std > 0 and common_std >= 0",
                do="0.02 and 0 are usual; for a narrow model 1 / sqrt(width) for both",
            )
