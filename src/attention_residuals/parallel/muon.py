"""Muon for matrices that are spread over ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

__all__ = ["GatheringMuon"]


class GatheringMuon(torch.optim.Muon):
    """Muon that puts each matrix's update together before it makes it orthogonal, and keeps its own part of it.

    Momentum and decay are computed on parts. Every rank orthogonalises every matrix, which costs more than the
    parts alone would, but what comes out is what one process computes.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Makes one step."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        # PyTorch's own Muon on a matrix of zeros, without momentum or decay: what is left is the step.
        step = nn.Parameter(torch.zeros_like(whole))
        step.grad = whole
        options = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([step], **options, momentum=0.0, nesterov=False, weight_decay=0.0).step()
        part = step.detach()
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            part = DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim, run_check=False)
            part = part.redistribute(placements=placements)
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(part)
