"""Statistics of traces, each with its range and the meaning of both ends."""

from attention_residuals.stats.routing import (
    Routing,
    average_routing,
    embedding_share,
    normalised_entropy,
    output_magnitude,
    token_routing,
)

__all__ = [
    "Routing",
    "average_routing",
    "embedding_share",
    "normalised_entropy",
    "output_magnitude",
    "token_routing",
]
