"""Spreads a decoder's weights over ranks, by FSDP2 and by tensor parallelism; depth reads stay where they are."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attention_residuals.models import Layer
from attention_residuals.train.config import Precision

__all__ = ["own_outputs", "shard", "split_matrices"]

_MATRICES = ("query", "key", "value", "output"), ("gate", "up", "down")


class _Arrived(torch.autograd.Function):
    """Waits until a sum over ranks has arrived, forward and backward: depth reads look into memory themselves."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return _arrived(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _arrived(grad)


def _arrived(tensor: Tensor) -> Tensor:
    if isinstance(tensor, AsyncCollectiveTensor):
        whole: Tensor = tensor.wait()
        return whole
    return tensor.detach()


def _when_arrived(tensor: Tensor) -> Tensor:
    whole: Tensor = _Arrived.apply(tensor)  # type: ignore[no-untyped-call]
    return whole


def split_matrices(layers: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Splits attention by heads and the MLP by its inner width.

    What goes in and comes out is whole on every rank, so that reads, norms, embedding and head are computed
    by each of them alike.

    Args:
        layers: Of a decoder.
        mesh: The ranks.
    """
    into = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
    out = ("attention.output", "mlp.down")
    plan = {**{name: ColwiseParallel() for name in into}, **{name: RowwiseParallel() for name in out}}
    for layer in layers:
        for name in into:  # before PyTorch's hook, which makes the input a DTensor
            layer.get_submodule(name).register_forward_pre_hook(lambda _, args: (_when_arrived(*args),))
        parallelize_module(layer, mesh, plan)
        for name in out:
            layer.get_submodule(name).register_forward_hook(lambda _, args, output: _when_arrived(output))


def own_outputs(stage: nn.Module) -> None:
    """Makes what a stage hands on no views, on which FSDP2's hooks would be lost; to be called before ``shard``."""
    stage.register_forward_hook(
        lambda _, args, output: (
            tuple(map(_when_arrived, output)) if isinstance(output, tuple) else _when_arrived(output)
        )
    )


def shard(model: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, precision: Precision) -> None:
    """Spreads weights, gradients and what the optimizer keeps over the last axis of a mesh.

    The matrices of a layer are gathered for as long as it runs. Gains and pseudo-queries are read before the
    sublayer is called, so they are gathered with the embedding, once for a pass. Gradients are added up, not
    averaged. With bfloat16, matrices are gathered in it, as autocast would make them, and gradients added in
    float32.

    Args:
        model: What is called: the decoder, or a stage.
        layers: Of it.
        mesh: The ranks that shard, or [replicate, shard].
        precision: Of the run.
    """
    policy = MixedPrecisionPolicy()
    if precision == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        assert isinstance(layer, Layer)
        attention, mlp = _MATRICES
        matrices = [getattr(layer.attention, name) for name in attention]
        fully_shard([*matrices, *(getattr(layer.mlp, name) for name in mlp)], mesh=mesh, mp_policy=policy)
    # Resharded, so that parameters are always found as parts between two passes.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
