"""Rotary position embedding."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["Rotation", "rotate", "rotation"]


class Rotation(NamedTuple):
    """Cosines and sines of every position's angles, in float32 (float64 for a float64 model)."""

    cosine: Float[Tensor, "B 1 T K"]
    sine: Float[Tensor, "B 1 T K"]


def rotation(positions: Int[Tensor, "B T"], head_width: int, base: float, dtype: torch.dtype) -> Rotation:
    """Computes the rotation of every position.

    Channels i and i + K/2 turn together by ``position / base ** (2 i / K)`` radians.

    Args:
        positions: Absolute positions, counted in tokens from 0.
        head_width: K, even.
        base: Sets the slowest turn; 10000 by custom.
        dtype: Of the result.

    Source:
        Su et al., arXiv:2104.09864.

    Example:
        >>> rotation(torch.tensor([[0, 1]]), 4, 10_000.0, torch.float32).cosine[0, 0, 0]
        tensor([1., 1., 1., 1.])
    """
    exponents = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float64) / head_width
    angles = positions[:, None, :, None].to(torch.float64) * base**-exponents
    angles = torch.cat([angles, angles], dim=-1)
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(heads: Float[Tensor, "B H T K"], by: Rotation) -> Float[Tensor, "B H T K"]:
    """Turns queries or keys by their positions; lengths are kept.

    Example:
        >>> heads = torch.randn(1, 2, 3, 4)
        >>> turned = rotate(heads, rotation(torch.arange(3)[None], 4, 10_000.0, torch.float32))
        >>> torch.allclose(turned.norm(dim=-1), heads.norm(dim=-1))
        True
    """
    first, second = heads.chunk(2, dim=-1)
    turned = heads * by.cosine + torch.cat([-second, first], dim=-1) * by.sine
    return turned.to(heads.dtype)
