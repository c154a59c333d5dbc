"""The one table of tolerances, and what they bound: the relative L2 distance of two tensors."""

import torch

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance; absolute where the expected tensor is zero."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    actual, expected = actual.detach().double(), expected.detach().double()
    norm = expected.norm().item()
    return (actual - expected).norm().item() / (norm if norm > 0 else 1.0)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> None:
    """Fails when two tensors differ in dtype or by more than the table allows."""
    assert actual.dtype == expected.dtype
    bound = TOLERANCE[expected.dtype] if tolerance is None else tolerance
    assert distance(actual, expected) <= bound
