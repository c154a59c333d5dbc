"""Attention residuals over a sliding window of depth (an ablation of the paper)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from attention_residuals.errors import ConfigError, is_count
from attention_residuals.layers.residual.attnres import AttnRes, AttnResRule
from attention_residuals.layers.tap import Site

__all__ = ["SlidingWindow", "SlidingWindowRule"]


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(AttnRes):
    """Softmax attention over the embedding and the newest sources only.

    What has left the window is read no more, so a fresh model is not the standard model. It is still kept:
    the state is that of ``AttnRes``.

    Args:
        window: How many sources are read beside the embedding, 1 or more; the paper's is 8.

    Source:
        Attention Residuals (arXiv:2603.15031), Table 4, "SWA, W = 1 + 8".

    Example:
        >>> SlidingWindow(window=2).build(num_layers=3, width=8).source_names(Site(2, "mlp"))
        ('embedding', 'L1.mlp', 'L2.attention')
    """

    formula: ClassVar[str] = "h = sum_s softmax_s(w . (g * v_s) / rms(v_s)) v_s, s = embedding and w newest"
    window: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.window):
            raise ConfigError(
                got=f"window={self.window!r}",
                expected="1 or more sources beside the embedding",
                do="8 is the paper's",
            )

    def build(self, *, num_layers: int, width: int) -> "SlidingWindowRule":
        """Makes the rule, with 2 D parameters per site."""
        return SlidingWindowRule(self, num_layers, width)


class SlidingWindowRule(AttnResRule):
    """Attention residuals that see part of the sources."""

    config: SlidingWindow

    def visible(self, site: Site) -> Sequence[int]:
        """Numbers the embedding and the newest sources."""
        kept = self.num_kept(site)
        return (0, *range(max(1, kept - self.config.window), kept))
