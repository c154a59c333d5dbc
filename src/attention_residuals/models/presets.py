"""Model shapes by name: laptop sizes on one dial, and the paper's scaling runs."""

from attention_residuals.errors import ConfigError, nearest
from attention_residuals.layers.residual import AttnRes, ResidualConfig
from attention_residuals.models.config import DecoderConfig
from attention_residuals.models.kimi_linear import KIMI_LINEAR_SHAPES, KimiLinearShape, kimi_linear

__all__ = ["KIMI_LINEAR_SHAPES", "PAPER_SHAPES", "KimiLinearShape", "kimi_linear", "paper", "scaled"]

PAPER_SHAPES = {
    "paper-194m": (12, 896, 400, 3),
    "paper-241m": (13, 960, 432, 3),
    "paper-296m": (14, 1024, 464, 4),
    "paper-436m": (16, 1168, 528, 4),
    "paper-528m": (17, 1264, 560, 4),
}
"""Layers (= heads), width, width of one expert, and sublayers per block of the paper's Table 2."""


def scaled(
    depth: int, *, vocab_size: int, max_tokens: int = 1024, residual: ResidualConfig | None = None
) -> DecoderConfig:
    """Derives a whole laptop-size model from its number of layers.

    Width is 16 per layer, heads are 32 wide, the MLP is 8/3 of the width rounded up to a multiple of 32,
    and there are about 4 depth blocks.

    Args:
        depth: Layers, 2 or more.
        vocab_size: V.
        max_tokens: The longest sequence.
        residual: The rule; Block attention residuals by default.

    Raises:
        ConfigError: Fewer than 2 layers.

    Example:
        >>> config = scaled(8, vocab_size=4096)
        >>> config.width, config.num_heads, config.mlp_width, config.residual.sublayers_per_block
        (128, 4, 352, 4)
    """
    if depth < 2:
        raise ConfigError(got=f"depth={depth}", expected="2 or more layers", do="8 suits a laptop")
    num_heads = max(1, depth // 2)
    width = 32 * num_heads
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=depth,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
        head_width=32,
        mlp_width=-(-8 * width // 96) * 32,
        max_tokens=max_tokens,
        residual=residual or AttnRes(sublayers_per_block=max(1, depth // 2)),
    )


def paper(name: str, *, vocab_size: int, residual: ResidualConfig | None = None) -> DecoderConfig:
    """Returns a dense stand-in for one of the paper's five scaling-run shapes.

    The paper's models are mixtures of experts with Kimi Linear attention. Layers, heads, width and
    context are its own. Not published, and chosen here: heads 128 wide, and an MLP as wide as the nine
    experts (8 + 1 shared) that the Kimi Linear paper activates; parameters without embeddings come to
    within 7 % of the published active counts. About 8 blocks, as in the paper: sublayers per block are
    2 L / 8, rounded.

    Args:
        name: One of ``PAPER_SHAPES``.
        vocab_size: V.
        residual: The rule; the paper's Block form by default.

    Raises:
        ConfigError: Unknown name.

    Source:
        Attention Residuals (arXiv:2603.15031), Table 2.

    Example:
        >>> paper("paper-436m", vocab_size=32_000).width
        1168
    """
    if name not in PAPER_SHAPES:
        raise ConfigError(got=f"preset {name!r}", expected="a known preset", do=nearest(name, PAPER_SHAPES))
    num_layers, width, expert_width, sublayers_per_block = PAPER_SHAPES[name]
    return DecoderConfig(
        vocab_size=vocab_size,
        num_layers=num_layers,
        width=width,
        num_heads=num_layers,
        num_kv_heads=num_layers,
        head_width=128,
        mlp_width=9 * expert_width,
        max_tokens=8192,
        tied=False,
        residual=residual or AttnRes(sublayers_per_block=sublayers_per_block),
    )
