"""What dropping each edge would do to the loss, all edges at once, from one backward pass."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from attention_residuals.errors import EditError
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Onlooker, Read
from attention_residuals.models import LanguageModel
from attention_residuals.trace.edits import COMPETING, weights_of

__all__ = ["EdgeEstimate", "edge_estimates"]


class EdgeEstimate(NamedTuple):
    """The estimated change of the loss when one source is dropped at one read."""

    site: str
    part: str
    source: str
    loss: Float[Tensor, "B T"]
    """Nats, for each token whose read is changed: summed over tokens, it estimates the change of the summed
    cross-entropy of all next tokens."""


def edge_estimates(model: LanguageModel, tokens: Int[Tensor, "B T"]) -> list[EdgeEstimate]:
    """Estimates, to first order, what dropping each source at each read does to the loss.

    The weights without a source are those that ``Drop`` leaves: 0 for itself and a_s / (1 - a) for the others,
    made of their scores where there are any, since 1 - a may round to 0. The estimate is the derivative of the
    summed next-token cross-entropy by the weights, times that change.
    It is good where an edge matters little, and says nothing of what happens far away: compare a few with
    ``sweep`` before trusting the rest.

    Args:
        model: Any language model whose weights are a softmax.
        tokens: Texts without padding.

    Raises:
        EditError: Weights that are not shares of 1.

    Source:
        Attribution patching (Nanda, 2023), for edges over depth.

    Example:
        >>> from attention_residuals import Decoder, presets
        >>> model = Decoder(presets.scaled(2, vocab_size=300))
        >>> [estimate.source for estimate in edge_estimates(model, torch.tensor([[5, 6, 7]]))[:2]]
        ['embedding', 'L0.attention']
    """
    tap = _Probe()
    with torch.enable_grad():
        logits = model(tokens, tap=tap)
        nats = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        probes = [probe for _, probe in tap.reads]
        gradients = torch.autograd.grad(nats, probes) if probes else ()
    found = []
    for (read, _), gradient in zip(tap.reads, gradients, strict=True):
        weights = read.weights.detach()
        for number, source in enumerate(read.source_names):
            product = (gradient * (_without(model.residual, read, number) - weights)).sum(0)
            found.append(
                EdgeEstimate(
                    str(read.site), read.part, source, product if product.ndim == 2 else product.sum(-1)
                )
            )
    return found


def _without(rule: ResidualRule[Any], read: Read, number: int) -> Tensor:
    """Returns the weights that are left when one source is dropped."""
    weights = read.weights.detach().clone()
    if read.logits is not None and rule.semantics.weights in COMPETING:
        logits = read.logits.detach().clone()
        logits[number] = -torch.inf
        return weights_of(rule, logits)
    weights[number] = 0
    return weights / weights.sum(0).clamp_min(torch.finfo(weights.dtype).tiny)


class _Probe(Onlooker):
    """A tap that puts something differentiable into the weights."""

    def __init__(self) -> None:
        self.reads: list[tuple[Read, Tensor]] = []

    def read(self, read: Read) -> Read:
        """Adds a zero whose gradient is that of the weights; reads of a single source have no edge to drop."""
        if len(read.values) == 1:
            return read
        sums = read.weights.sum(0)
        if not torch.allclose(sums, torch.ones_like(sums), atol=1e-3):
            raise EditError(
                got=f"weights that sum to {sums.mean().item():.2f} at {read.site}",
                expected="weights of a softmax, which the others share when one is dropped",
                do="sweep with ZeroWrite edits instead",
            )
        probe = torch.zeros_like(read.weights, requires_grad=True)
        self.reads.append((read, probe))
        return read._replace(weights=read.weights + probe)
