"""Muon for stacks of matrices, as mixtures of experts keep them; PyTorch's own takes one matrix at a time."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["StackedMuon"]

COEFFICIENTS, NUM_ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7
"""Those of PyTorch's Muon: a polynomial that pulls all singular values near 1."""


class StackedMuon(torch.optim.Optimizer):
    """Steps every matrix of a stack as ``torch.optim.Muon`` with ``match_rms_adamw`` steps one.

    Args:
        groups: Of parameters with 3 axes; ``"rows"`` says how many matrices lie below each other in each
            entry of a stack, 2 for gate and up in one.
        lr: The learning rate.
        weight_decay: Per step and unit of learning rate.
        momentum: 0 to below 1.

    Source:
        Liu et al. (Muon is Scalable for LLM Training), arXiv:2502.16982.

    Example:
        >>> experts = torch.nn.Parameter(torch.randn(4, 6, 3))
        >>> optimizer = StackedMuon([{"params": [experts], "rows": 2}], lr=0.1, weight_decay=0.0, momentum=0.9)
        >>> experts.square().sum().backward()
        >>> optimizer.step()
        >>> list(optimizer.state[experts])
        ['momentum_buffer']
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, weight_decay: float, momentum: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "rows": 1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Makes one step with the gradients that are there."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_one(parameter, parameter.grad, group)

    def _step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mean: Tensor = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        stack = gradient.lerp(mean, group["momentum"]).unflatten(1, (group["rows"], -1)).flatten(0, 1)
        update = _orthogonal(stack).view_as(parameter)
        size = 0.2 * math.sqrt(max(stack.shape[1:]))
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * size)


def _orthogonal(matrices: Float[Tensor, "E X Y"]) -> Tensor:
    """Gives each matrix singular values near 1, in bfloat16."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    now = matrices.bfloat16().mT if is_tall else matrices.bfloat16()
    now = now / now.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    first, second, third = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = now @ now.mT
        now = torch.baddbmm(now, torch.baddbmm(gram, gram, gram, beta=second, alpha=third), now, beta=first)
    return (now.mT if is_tall else now).contiguous()
