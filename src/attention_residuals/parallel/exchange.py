"""A pipeline stage of PyTorch that sends only what the next rank lacks, and keeps the rest on its own."""

import inspect
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from attention_residuals.errors import BackendError
from attention_residuals.parallel.plan import Piece, Plan
from attention_residuals.parallel.stages import Stage
from attention_residuals.parallel.store import Store
from attention_residuals.parallel.watch import Watch

__all__ = ["TESTED", "ExchangeStage", "check_torch"]

TESTED = ("2.13",)
"""The versions of PyTorch whose stages these hooks were tested on; they are no public interface of it."""

_HOOKS = {
    "forward_one_chunk": ("self", "fwd_chunk_id", "args", "kwargs", "save_forward_output"),
    "forward_maybe_with_nosync": ("self", "args", "kwargs"),
    "backward_one_chunk": ("self", "bwd_chunk_id", "loss", "full_backward", "last_backward"),
    "backward_weight_one_chunk": ("self", "bwd_chunk_id", "last_backward"),
    "backward_maybe_with_nosync": ("self", "backward_type", "bwd_kwargs", "last_backward"),
    "get_fwd_send_ops": ("self", "fwd_chunk_id"),
    "get_bwd_send_ops": ("self", "bwd_chunk_id"),
    "clear_runtime_states": ("self",),
}


def check_torch(version: str = torch.__version__) -> None:
    """Refuses a PyTorch whose pipeline stages were never tested with this package.

    Raises:
        BackendError: Another version, or a hook that takes other arguments.

    Example:
        >>> check_torch("2.13.0+cpu")
    """
    if ".".join(version.split(".")[:2]) not in TESTED:
        raise BackendError(
            got=f"torch {version}",
            expected=f"torch {' or '.join(TESTED)}: stages hook into private methods of its pipelining",
            do=f"pip install 'torch=={TESTED[-1]}.*', or train without stages",
        )
    for name, expected in _HOOKS.items():
        found = getattr(PipelineStage, name, None)
        arguments = tuple(inspect.signature(found).parameters) if found else ()
        if arguments != expected:
            raise BackendError(
                got=f"PipelineStage.{name}{arguments or ', which is missing'} in torch {version}",
                expected=f"({', '.join(expected)})",
                do=f"pip install 'torch=={TESTED[-1]}.*'",
            )


class _Handed(torch.autograd.Function):
    """Hands a tensor on as it is, and as no view of another: PyTorch detaches outputs in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ExchangeStage(PipelineStage):
    """A stage of a plan: hands on what the plan says, takes the rest of its state from the rank's store.

    A piece that a later stage of the rank reads is kept there as a tensor without history. That stage's
    gradient for it goes to an account, and the stage that kept the piece adds the account to its own backward:
    to the gradient that it sends back for a piece it received, or as one more root for a piece it made. For
    each microbatch, backward visits a rank's stages from the last to the first, so that an account is complete
    when it is collected.

    Args:
        module: The stage's part of the model.
        plan: Of the whole pipeline.
        stage: Which stage it is.
        store: Shared by all stages of the rank.
        bytes_sent: Receives what is sent, ``"forward"`` and ``"backward"``.
        watch: Is told what the stage computes.
        shape: [B, T] of a microbatch.
        dtype: Of the pieces.
        device: Where the stage runs.
        autocast: Whether its matrix products run in bfloat16.
        group: The ranks of the pipeline.
    """

    def __init__(
        self,
        module: Stage,
        plan: Plan,
        stage: int,
        store: Store,
        bytes_sent: Counter[str],
        watch: Watch,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        autocast: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_torch()
        self.plan, self.store = plan.stages[stage], store
        self.bytes_sent, self.watch, self._autocast = bytes_sent, watch, autocast
        self._microbatch = -1
        self._leaves: dict[int, tuple[Tensor, ...]] = {}
        self._made: dict[int, dict[Piece, Tensor]] = {}
        piece = torch.empty(*shape, module.config.width, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        logits = torch.empty(*shape, module.config.vocab_size, dtype=dtype, device="meta", requires_grad=True)
        super().__init__(
            module,
            stage,
            plan.layout.num_stages,
            device,
            # Static shapes: PyTorch's own inference would run the module outside of any microbatch.
            input_args=(piece,) * len(self.plan.receives) if stage else (tokens,),
            output_args=(logits,) if module.is_last else (piece,) * len(self.plan.sends),
            group=group,
        )

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Runs a microbatch forward."""
        self._microbatch = fwd_chunk_id
        with self.watch.doing(self._what("forward")):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def _precision(self) -> AbstractContextManager[object]:
        """Turns autocast on where it was asked for, and leaves alone what the caller may have turned on."""
        return torch.autocast(self.device.type, torch.bfloat16) if self._autocast else nullcontext()

    def _what(self, direction: str) -> str:
        return f"in the {direction} of microbatch {self._microbatch} in stage {self.stage_index}"

    def forward_maybe_with_nosync(self, *args: Tensor, **kwargs: Any) -> Any:
        """Puts the state together, runs the module, and hands on what the plan sends."""
        number, plan = self._microbatch, self.plan
        if self.is_first:
            state: tuple[Tensor, ...] = args
        else:
            leaves = tuple(
                self.store.leaf(number, piece, needs_gradient=self.has_backward) for piece in plan.holds
            )
            if self.has_backward:
                self._leaves[number] = leaves
            found = dict(zip((*plan.receives, *plan.holds), (*args, *leaves), strict=True))
            state = tuple(found[piece] for piece in plan.inputs)
        with self._precision():
            output = super().forward_maybe_with_nosync(*state, **kwargs)  # type: ignore[no-untyped-call]
        if self.is_last:
            self._free(number)
            return output
        made = {
            piece: _Handed.apply(tensor)  # type: ignore[no-untyped-call]
            for piece, tensor in zip(plan.outputs, output, strict=True)
            if piece in plan.sends or piece in plan.keeps
        }
        received = dict(zip(plan.receives, args, strict=True)) if not self.is_first else {}
        for piece in plan.keeps:
            self.store.keep(number, piece, received.get(piece, made[piece]))
        self._free(number)
        if self.has_backward:
            self._made[number] = {piece: made[piece] for piece in plan.keeps if piece not in received}
        return tuple(made[piece] for piece in plan.sends)

    def _free(self, number: int) -> None:
        """Frees what was held for the last time, where no backward follows that would."""
        if not self.has_backward:
            for piece in self.plan.frees:
                self.store.free(number, piece)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Runs a microbatch backward, or the half of it that makes gradients of inputs."""
        self._microbatch = bwd_chunk_id
        with self.watch.doing(self._what("backward")):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Runs the half of a backward that makes gradients of weights."""
        self._microbatch = bwd_chunk_id
        with self.watch.doing(self._what("backward")):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Adds accounts to what flows back, and deposits the gradients of held pieces."""
        if backward_type == "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        number, plan = self._microbatch, self.plan
        accounts = {piece: self.store.collect(number, piece) for piece in plan.keeps}
        leaves, inputs = self._leaves.pop(number, ()), tuple(bwd_kwargs["input_values"])
        extended = {**bwd_kwargs, "input_values": [*inputs, *leaves]}
        if not self.is_last:
            made = self._made.pop(number)
            roots = {
                piece: gradient
                for piece, gradient in accounts.items()
                if piece in made and gradient is not None
            }
            extended["stage_output"] = (*bwd_kwargs["stage_output"], *(made[piece] for piece in roots))
            extended["output_grads"] = (*bwd_kwargs["output_grads"], *roots.values())
        gradients, groups = super().backward_maybe_with_nosync(backward_type, extended, last_backward)
        for piece, gradient in zip(plan.holds, gradients[len(inputs) :], strict=True):
            self.store.deposit(number, piece, gradient)
        own = list(gradients[: len(inputs)])
        for place, piece in enumerate(plan.receives):
            own[place] = _sum(own[place], accounts.get(piece))
        return tuple(own), groups

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Lists what is sent to the next stage, and counts its bytes."""
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id), "forward")

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Lists the gradients that are sent back, and counts their bytes."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id), "backward")

    def _counted(self, operations: list[dist.P2POp], direction: str) -> list[dist.P2POp]:
        self.bytes_sent[direction] += sum(operation.tensor.nbytes for operation in operations)
        return operations

    def clear_runtime_states(self) -> None:
        """Forgets what an earlier step left, if it ended in an error."""
        super().clear_runtime_states()
        self._leaves.clear()
        self._made.clear()
        self.backward_state.clear()
        self.dw_runner.clear()
        self.bwd_cache.clear()


def _sum(gradient: Tensor | None, account: Tensor | None) -> Tensor | None:
    """Adds what came by two ways; what is sent lies in order, which gloo asks for."""
    total = account if gradient is None else gradient if account is None else gradient + account
    return None if total is None else total.contiguous()
