"""Forward only through a rank's stages: PyTorch's schedules have none for a V without backward."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.pipelining.schedules import _batch_p2p

from attention_residuals.parallel.exchange import ExchangeStage
from attention_residuals.parallel.ranks import wait

__all__ = ["run_forward"]


def run_forward(
    stages: Sequence[ExchangeStage],
    runner: Any,
    tokens: Int[Tensor, "B T"],
    given: Mapping[str, Tensor],
    num_microbatches: int,
) -> Float[Tensor, "B T V"] | None:
    """Runs all microbatches through one stage of the rank after the other; gradients must be off.

    Args:
        stages: Of this rank, in order.
        runner: PyTorch's schedule of them, which makes their buffers.
        tokens: The whole batch.
        given: Positions and mask of the whole batch, as far as there are any.
        num_microbatches: M, which the batch is cut into.

    Returns:
        The logits on the rank of the last stage; None on the others.
    """
    for stage in stages:
        stage.has_backward = False
        stage.clear_runtime_states()
    runner._initialize_pp_stages(list(stages), (), {}, None, False, False)
    here = {stage.stage_index for stage in stages}
    parts = {name: tensor.chunk(num_microbatches) for name, tensor in given.items()}
    sent = []
    for stage, following in itertools.zip_longest(stages, stages[1:]):
        beside = following is not None and following.stage_index == stage.stage_index + 1
        for microbatch, part in enumerate(tokens.chunk(num_microbatches)):
            if stage.stage_index - 1 not in here:
                wait(_batch_p2p(stage.get_fwd_recv_ops(microbatch)))
            own = {name: chunks[microbatch] for name, chunks in parts.items()}
            output = stage.forward_one_chunk(microbatch, (part,), own)
            if beside:
                following.set_local_fwd_input(output, microbatch)
            else:
                sent += _batch_p2p(stage.get_fwd_send_ops(microbatch))
    wait(sent)
    return torch.cat(stages[-1].output_chunks) if stages[-1].is_last else None
