"""Hyper-connections, and their manifold-constrained form."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from attention_residuals.errors import ConfigError, is_count
from attention_residuals.layers.residual.streams import Gates, StreamsConfig, StreamsRule, gate_scores
from attention_residuals.layers.tap import Site
from attention_residuals.ops.depth_read import second_derivative

__all__ = [
    "HyperConnections",
    "HyperConnectionsRule",
    "ManifoldHyperConnections",
    "ManifoldHyperConnectionsRule",
    "sinkhorn",
]


@dataclass(frozen=True, kw_only=True)
class HyperConnections(StreamsConfig):
    """Several residual streams; each token's gates say what is read, mixed and written.

    A gate of stream k is a learned number plus s tanh(W . norm(stream k)); the numbers start as one stream
    to read (the next one at each sublayer), no mixing, and the output for every stream once, W as zero and
    s as 0.01, all as published. The norm is a root mean square here, its gain part of W. In a new
    model all streams are what the one stream of the standard model is, and it computes the same.

    Source:
        Zhu et al., arXiv:2409.19606, the dynamic form.

    Example:
        >>> rule = HyperConnections(streams=2).build(num_layers=2, width=8)
        >>> sum(parameter.numel() for parameter in rule.parameters()) // 4  # a sublayer
        42
    """

    formula: ClassVar[str] = (
        "h = sum_k alpha_k H_k, then H_j = sum_k A_kj H_k + beta_j v; alpha, A, beta learned + tanh of token"
    )

    def build(self, *, num_layers: int, width: int) -> "HyperConnectionsRule":
        """Makes the rule, with (n + 2) (D + n) + 2 parameters per sublayer and none at the output."""
        return HyperConnectionsRule(self, num_layers, width)


class HyperGates(nn.Module):
    """The gates of one sublayer; rows of what it learns: read, write, into stream 0, 1, ..."""

    def __init__(self, streams: int, width: int, sublayer: int) -> None:
        super().__init__()
        one_hot = torch.eye(streams)
        self.projection = nn.Parameter(torch.zeros(2 + streams, width))
        self.static = nn.Parameter(
            torch.cat([one_hot[[sublayer % streams]], torch.ones(1, streams), one_hot])
        )
        self.read_scale = nn.Parameter(torch.full((1,), 0.01))
        self.write_scale = nn.Parameter(torch.full((1,), 0.01))

    def forward(self, streams: Float[Tensor, "B T S D"]) -> Gates:
        """Makes the gates of each token."""
        num_streams = streams.shape[-2]
        scale = torch.cat([self.read_scale, self.write_scale, self.read_scale.expand(num_streams)])
        gate_BTSG = self.static.T + scale * gate_scores(streams, self.projection).tanh()
        return Gates(gate_BTSG[..., 0], gate_BTSG[..., 1], gate_BTSG[..., 2:].mT)


class HyperConnectionsRule(StreamsRule):
    """Gates without bounds."""

    def make_gates(self, site: Site) -> HyperGates:
        """Makes the gates of a sublayer."""
        return HyperGates(self.config.streams, self.width, site.sublayer)


@dataclass(frozen=True, kw_only=True)
class ManifoldHyperConnections(StreamsConfig):
    """Hyper-connections with gates in bounds, whose mixing keeps the mean of the streams.

    Read gates are between 0 and 1, write gates between 0 and 2, and the mixing is doubly stochastic: its
    rows and columns sum to 1. All are made from the token's streams as one vector, divided by its root
    mean square.

    From the paper: the gates' form, 4 streams, 20 steps, and scales that start at 0.01. Not published, and
    chosen here: projections start at zero; read gates at 3/4 for one stream (the next one at each sublayer)
    and 1/4 in all for the others; write gates at 1; the mixing near the identity. So a new model computes
    what the standard one does, up to the eps of norms.

    Args:
        sinkhorn_steps: How often columns and then rows are divided by their sums, 1 or more.

    Source:
        Xie et al., arXiv:2512.24880.

    Example:
        >>> rule = ManifoldHyperConnections(streams=2).build(num_layers=2, width=8)
        >>> sum(parameter.numel() for parameter in rule.parameters()) // 4  # a sublayer
        139
    """

    formula: ClassVar[str] = (
        "h = sum_k a_k H_k, then H_j = sum_k R_jk H_k + b_j v; a = sigmoid, b = 2 sigmoid, R = Sinkhorn of token"
    )
    sinkhorn_steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.sinkhorn_steps):
            raise ConfigError(
                got=f"sinkhorn_steps={self.sinkhorn_steps!r}", expected="1 or more", do="the paper has 20"
            )

    def build(self, *, num_layers: int, width: int) -> "ManifoldHyperConnectionsRule":
        """Makes the rule, with (n^2 + 2 n) (n D + 1) + 3 parameters per sublayer and none at the output."""
        return ManifoldHyperConnectionsRule(self, num_layers, width)


class ManifoldGates(nn.Module):
    """The gates of one sublayer; rows of what it learns: read, write, mixing."""

    def __init__(self, streams: int, width: int, sublayer: int, sinkhorn_steps: int) -> None:
        super().__init__()
        self.sinkhorn_steps = sinkhorn_steps
        self.sizes = (streams, streams, streams**2)
        self.projection = nn.Parameter(torch.zeros(sum(self.sizes), streams * width))
        self.scales = nn.Parameter(torch.full((3,), 0.01))
        # Streams that hold the same and are read by the same weight would get the same gradient for ever.
        # Other streams have sigmoid(-log(4 n - 5)) = 1 / (4 (n - 1)), so that all sum to 1.
        read_S = torch.full((streams,), -math.log(max(1, 4 * streams - 5)))
        read_S[sublayer % streams] = math.log(3)
        mixing_SS = 3 * torch.eye(streams)
        self.bias = nn.Parameter(torch.cat([read_S, torch.zeros(streams), mixing_SS.flatten()]))

    def forward(self, streams: Float[Tensor, "B T S D"]) -> Gates:
        """Makes the gates of each token."""
        parts = gate_scores(streams.flatten(-2), self.projection).split(self.sizes, dim=-1)
        read, write, mixing = (
            scale * part + bias
            for scale, part, bias in zip(self.scales, parts, self.bias.split(self.sizes), strict=True)
        )
        carry = sinkhorn(mixing.unflatten(-1, (streams.shape[-2], -1)), self.sinkhorn_steps)
        return Gates(read.sigmoid(), 2 * write.sigmoid(), carry)


class ManifoldHyperConnectionsRule(StreamsRule):
    """Gates in bounds, and a mixing that keeps the mean of the streams."""

    config: ManifoldHyperConnections

    def make_gates(self, site: Site) -> ManifoldGates:
        """Makes the gates of a sublayer."""
        return ManifoldGates(self.config.streams, self.width, site.sublayer, self.config.sinkhorn_steps)


def sinkhorn(logits: Float[Tensor, "*BT S S"], steps: int) -> Float[Tensor, "*BT S S"]:
    """Makes matrices of positive numbers whose rows and columns sum to 1, nearly.

    Rows do exactly, columns in the limit: after 20 steps, of 4 by 4 standard normal logits 99 columns in
    100 are within 1e-6, of logits three times as large within 0.03.

    Args:
        logits: Logarithms of positive matrices.
        steps: How often columns and then rows are divided by their sums, 1 or more.

    Example:
        >>> sinkhorn(torch.tensor([[2.0, 0.0], [0.0, 0.0]]), 20)
        tensor([[0.7311, 0.2689],
                [0.2689, 0.7311]])
    """
    # The axes of the matrices first, so that sums over them run along tokens.
    logit_SSN = logits.reshape(-1, *logits.shape[-2:]).movedim(0, -1).contiguous()
    matrix_SSN: Tensor = _Sinkhorn.apply(logit_SSN, steps)  # type: ignore[no-untyped-call]
    return matrix_SSN.movedim(-1, 0).contiguous().view(logits.shape)


class _Sinkhorn(torch.autograd.Function):
    """Backward walks the steps back, and makes each step's matrix from the next one and the sums."""

    @staticmethod
    def forward(ctx: Any, logit_SSN: Tensor, steps: int) -> Tensor:
        matrix_SSN, sums = logit_SSN.softmax(0), []
        for number in range(1, 2 * steps):  # columns and rows in turn; the softmax was the first
            sums.append(matrix_SSN.sum(number % 2, keepdim=True))
            matrix_SSN.div_(sums[-1])
        ctx.save_for_backward(matrix_SSN, *sums)
        return matrix_SSN

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative()
        matrix_SSN, *sums = ctx.saved_tensors
        # In logarithms a step takes away the logarithm of a sum.
        grad_SSN, matrix_SSN = grad.contiguous() * matrix_SSN, matrix_SSN.clone()
        for number in reversed(range(1 + len(sums))):
            grad_SSN.addcmul_(matrix_SSN, grad_SSN.sum(number % 2, keepdim=True), value=-1)
            if number:
                matrix_SSN.mul_(sums[number - 1])
        return grad_SSN, None
