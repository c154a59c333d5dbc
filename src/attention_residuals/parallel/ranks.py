"""What ranks of a pipeline tell one another beside the residual state: that they agree, a tied weight's gradient."""

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from attention_residuals.errors import AttentionResidualsError

__all__ = ["RankError", "add_up_gradients", "agree", "wait"]


class RankError(AttentionResidualsError, RuntimeError):
    """A rank that no longer answers, or ranks that were told different things."""


def agree(verb: str, what: str, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Refuses ranks that were told different things, before they wait for one another.

    Args:
        verb: What happened to the ranks, for the message.
        what: Must be the same on all.
        group: The ranks.
        device: Of this rank.

    Raises:
        RankError: It is not the same; every rank raises it.
    """
    number = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
    bounds = torch.tensor([number, -number], device=device)
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group)
    if bounds[0] != -bounds[1]:
        raise RankError(
            got=f"ranks that were {verb} different things; rank {dist.get_rank(group)}: {what}",
            expected="the same model, options and shapes on every rank",
            do="compare this line of all ranks",
        )


def add_up_gradients(
    weight: nn.Parameter, peer: int, group: dist.ProcessGroup | None, *, own_first: bool
) -> None:
    """Gives both ranks that have a weight the sum of their gradients, with the same bits.

    Args:
        weight: On this rank; a missing gradient counts as zero.
        peer: The other rank, within the group.
        group: The ranks.
        own_first: True on one of them, False on the other.
    """
    own = torch.zeros_like(weight) if weight.grad is None else weight.grad
    other = torch.empty_like(own)
    exchange = [
        dist.P2POp(dist.isend, own, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    wait(dist.batch_isend_irecv(exchange))
    weight.grad = own + other if own_first else other + own


def wait(works: Sequence[dist.Work]) -> None:
    """Waits until all of it is sent or received."""
    for work in works:
        work.wait()
