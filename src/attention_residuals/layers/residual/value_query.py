"""Attention residuals with a second query for values."""

from dataclasses import dataclass
from typing import ClassVar

from attention_residuals.layers.residual.attnres import AttnRes, AttnResRule
from attention_residuals.layers.tap import Site

__all__ = ["ValueQuery", "ValueQueryRule"]


@dataclass(frozen=True, kw_only=True)
class ValueQuery(AttnRes):
    """Attention residuals in which an attention site reads once for queries and keys, once for values.

    Only the abstract of the method was at hand: one more pseudo-query for values in each attention. That
    the second read has a key gain of its own, as every read here, is our choice.

    Source:
        RD-AttnRes (arXiv:2608.01075).

    Example:
        >>> rule = ValueQuery().build(num_layers=2, width=8)
        >>> rule.parts(Site(1, "attention")), rule.parts(Site(1, "mlp"))
        (('in', 'v'), ('in',))
    """

    formula: ClassVar[str] = "h_qk, h_v = two reads of AttnRes, each with a pseudo-query of its own"

    def build(self, *, num_layers: int, width: int) -> "ValueQueryRule":
        """Makes the rule, with 4 D parameters per attention site and 2 D at the others."""
        return ValueQueryRule(self, num_layers, width)


class ValueQueryRule(AttnResRule):
    """Attention residuals with a read for values; attention takes three inputs."""

    def parts(self, site: Site) -> tuple[str, ...]:
        """Names the reads of a site; ``"in"`` serves queries and keys."""
        return ("in", "v") if site.kind == "attention" else ("in",)
