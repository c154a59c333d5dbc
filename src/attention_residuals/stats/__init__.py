"""Statistics of traces, each with its range and the meaning of both ends."""

from attention_residuals.stats.mixing import MixingMatrix, mixing_matrix, semiseparable_order, writer_weights
from attention_residuals.stats.routing import (
    Routing,
    average_routing,
    embedding_share,
    normalised_entropy,
    output_magnitude,
    real_tokens,
    token_routing,
)

__all__ = [
    "MixingMatrix",
    "Routing",
    "average_routing",
    "embedding_share",
    "mixing_matrix",
    "normalised_entropy",
    "output_magnitude",
    "real_tokens",
    "semiseparable_order",
    "token_routing",
    "writer_weights",
]
