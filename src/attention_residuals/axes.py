"""The axis letters of every tensor name, signature and einsum in this package."""

__all__ = ["AXES"]

AXES = {
    "S": "sources: what a depth read attends over",
    "L": "layers: attention + MLP together",
    "N": "depth blocks",
    "W": "writers: the embedding, one attention, one MLP",
    "Q": "pseudo-queries handled together",
    "B": "batch",
    "T": "tokens",
    "D": "model width",
    "H": "attention heads",
    "K": "head width",
    "F": "MLP width",
    "V": "vocabulary",
}
"""One legend: a tensor called ``value_SBTD`` has these axes in this order."""
