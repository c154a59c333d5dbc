"""Mixing over depth that does not look at its input (an ablation of the paper)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual.interface import Semantics
from attention_residuals.layers.residual.sources import SourceConfig, SourceRule, reader_name
from attention_residuals.layers.tap import Site
from attention_residuals.ops import DepthRead, depth_attention, weighted_mix

__all__ = ["StaticMixing", "StaticMixingRule"]


@dataclass(frozen=True, kw_only=True)
class StaticMixing(SourceConfig):
    """One learned number for each site and source, the same for every token; ``key_eps`` has no effect.

    The paper does not say whether its numbers went through a softmax. It tells this variant (1.749) apart
    from DenseFormer (1.767), which it writes as unnormalised numbers, so a softmax is the reading that its
    text supports; ``normalised=False`` is the other.

    Args:
        normalised: The numbers go through a softmax and start at 0; else they are the weights and start at 1.

    Source:
        Attention Residuals (arXiv:2603.15031), Table 4, "input-independent mixing".

    Example:
        >>> rule = StaticMixing().build(num_layers=2, width=8)
        >>> sum(parameter.numel() for parameter in rule.parameters())
        15
    """

    formula: ClassVar[str] = "h = sum_s softmax_s(a_s) v_s, a learned"
    normalised: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.normalised, bool):
            raise ConfigError(
                got=f"normalised={self.normalised!r}", expected="True or False", do="pass one of them"
            )

    def build(self, *, num_layers: int, width: int) -> "StaticMixingRule":
        """Makes the rule, with one parameter per site and source."""
        return StaticMixingRule(self, num_layers, width)


class Scalars(nn.Module):
    """One number for each source of a site."""

    def __init__(self, count: int, start: float) -> None:
        super().__init__()
        self.scalars = nn.Parameter(torch.full((count,), start))


class StaticMixingRule(SourceRule):
    """Reads by learned numbers."""

    config: StaticMixing

    def __init__(self, config: StaticMixing, num_layers: int, width: int) -> None:
        super().__init__(config, num_layers, width)
        self.semantics = Semantics(
            sources="increments", weights="softmax of learned" if config.normalised else "learned"
        )

    def make_reader(self, site: Site, part: str) -> Scalars:
        """Makes the numbers, all alike at the start."""
        return Scalars(self.num_sources(site), 0.0 if self.config.normalised else 1.0)

    def weights_of(self, logits: Float[Tensor, "S *BT"]) -> Float[Tensor, "S *BT"]:
        """Makes weights of the numbers."""
        return logits.softmax(0) if self.config.normalised else logits.contiguous()

    def attend(
        self,
        values: tuple[Tensor, ...],
        site: Site,
        part: str,
        output_gain: Tensor | None,
        output_eps: float | None,
    ) -> DepthRead:
        """Mixes the sources; the softmax is that of depth attention with a query of zero and a bias."""
        scalars = self.readers[reader_name(site, part)].scalars
        assert isinstance(scalars, Tensor)
        tokens = values[0].shape[:-1]
        number_SBT = scalars.view(-1, *[1] * len(tokens)).expand(-1, *tokens)
        if not self.config.normalised:
            mix = weighted_mix(number_SBT, values, output_gain, output_eps)
            return DepthRead(mix, number_SBT, torch.ones_like(number_SBT))
        no_query = scalars.new_zeros(self.width)
        return depth_attention(
            values,
            no_query,
            no_query + 1,
            eps=None,
            logit_bias=number_SBT,
            output_gain=output_gain,
            output_eps=output_eps,
        )
