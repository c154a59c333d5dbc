"""The gated MLP, with its own norm."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from attention_residuals.layers.norm import RMSNorm

__all__ = ["MLP"]


class MLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``; no biases.

    ``norm`` belongs to the reader: whoever calls this module passes a normalised input.

    Args:
        width: Model width D.
        mlp_width: Inner width F.
        norm_eps: The eps of ``norm``.

    Source:
        Shazeer, arXiv:2002.05202.
    """

    def __init__(self, width: int, mlp_width: int, *, norm_eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(width, norm_eps)
        self.gate = nn.Linear(width, mlp_width, bias=False)
        self.up = nn.Linear(width, mlp_width, bias=False)
        self.down = nn.Linear(mlp_width, width, bias=False)

    def forward(self, hidden: Float[Tensor, "B T D"], *, context: object = None) -> Float[Tensor, "B T D"]:
        """Maps each token by itself; ``context`` is there for attention and not used."""
        output: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return output
