"""What ranks of a pipeline tell one another beside the residual state: that they agree, a tied weight's gradient."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from attention_residuals.errors import AttentionResidualsError, RankError
from attention_residuals.train.config import first_difference
from attention_residuals.train.optimizer import local

__all__ = ["add_up_gradients", "agreeing", "fingerprint", "wait"]

_REFUSED = -1


@contextmanager
def agreeing(verb: str, group: dist.ProcessGroup | None, device: torch.device) -> Iterator[dict[str, Any]]:
    """Lets every rank check what it was given, and goes on when all of them accept the same.

    The body puts what must be the same on all ranks, as JSON, into the dictionary that it gets. What one rank
    refuses with an error of this package, the others are told, so that nobody waits for it.

    Args:
        verb: What happened to the ranks, for the message.
        group: The ranks.
        device: Of this rank.

    Raises:
        RankError: It is not the same, or another rank refused it; every rank raises an error.
    """
    told: dict[str, Any] = {}
    try:
        yield told
    except AttentionResidualsError:
        _numbers(_REFUSED, group, device)
        raise
    text = json.dumps(told).encode()
    ranks = dist.get_process_group_ranks(group)
    numbers = _numbers(int.from_bytes(hashlib.sha256(text).digest()[:7], "big"), group, device)
    ranks_of: dict[int, list[int]] = {}
    for rank, number in zip(ranks, numbers, strict=True):
        ranks_of.setdefault(number, []).append(rank)
    if _REFUSED in ranks_of:
        raise RankError(
            got=f"{_named(ranks_of[_REFUSED])} refused what it was {verb}; rank {dist.get_rank()} would go on",
            expected="the same model, options and batches on every rank",
            do="read the error of that rank; this one found nothing wrong",
        )
    if len(ranks_of) > 1:
        texts = dict(zip(ranks, _texts(text, group, device), strict=True))
        there, here = (found[0] for found in list(ranks_of.values())[:2])
        difference = first_difference(json.loads(texts[there]), json.loads(texts[here]))
        raise RankError(
            got=f"ranks that were {verb} different things: {difference} (there: rank {there}; here: rank {here})",
            expected="the same model, options and batches on every rank; they differ between "
            + " and ".join(map(_named, ranks_of.values())),
            do="give all of them the same",
        )


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Hashes the bits of tensors, of which ranks can then tell whether they have the same.

    Example:
        >>> fingerprint([torch.arange(3)]) == fingerprint([torch.tensor([0, 1, 2])])
        True
    """
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def _numbers(number: int, group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """Gathers a number of every rank."""
    own = torch.tensor([number], device=device)
    gathered = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    return [int(one) for one in torch.cat(gathered)]


def _texts(text: bytes, group: dist.ProcessGroup | None, device: torch.device) -> list[bytes]:
    """Gathers a text of every rank."""
    lengths = _numbers(len(text), group, device)
    own = torch.zeros(max(lengths), dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    own = own.to(device)
    gathered = [torch.zeros_like(own) for _ in lengths]
    dist.all_gather(gathered, own, group=group)
    return [bytes(one[:length].tolist()) for one, length in zip(gathered, lengths, strict=True)]


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def add_up_gradients(
    weight: nn.Parameter, peer: int, group: dist.ProcessGroup | None, *, own_first: bool
) -> None:
    """Gives both ranks that have a weight the sum of their gradients, with the same bits.

    Args:
        weight: On this rank, or the part of it where both ranks have the same; a missing gradient counts as zero.
        peer: The other rank, within the group.
        group: The ranks.
        own_first: True on one of them, False on the other.
    """
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    own = local(weight.grad)
    other = torch.empty_like(own)
    exchange = [
        dist.P2POp(dist.isend, own, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
    ]
    wait(dist.batch_isend_irecv(exchange))
    own.copy_(own + other if own_first else other + own)


def wait(works: Sequence[dist.Work]) -> None:
    """Waits until all of it is sent or received."""
    for work in works:
        work.wait()
