"""How much depth reads and writes move through memory, counted while somebody asks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

__all__ = ["Traffic", "counting", "note"]


class Traffic:
    """Bytes of sources, streams and what stands between two phases, read and written by depth operations."""

    def __init__(self) -> None:
        self.read = 0
        self.written = 0


_counters: list[Traffic] = []


@contextmanager
def counting() -> Iterator[Traffic]:
    """Counts what runs inside.

    A tensor that an operation takes counts once each time: the fused operations read it that often.

    Not counted: what sublayers and their norms read and write; parameters, logits, weights and inverse norms,
    which are small beside vectors of the model's width; backward passes; other processes. Nor is it measured
    what really came from memory: the processor's caches save some of it.

    Example:
        >>> import torch
        >>> from attention_residuals import depth_attention
        >>> with counting() as traffic:
        ...     _ = depth_attention([torch.ones(1, 4)] * 3, torch.zeros(4), torch.ones(4), eps=1e-6)
        >>> traffic.read, traffic.written
        (48, 16)
    """
    counter = Traffic()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


def note(read: Iterable[Tensor] = (), written: Iterable[Tensor] = ()) -> None:
    """Adds the sizes of what an operation read and wrote to every open count."""
    if _counters:
        incoming, outgoing = (
            sum(t.numel() * t.element_size() for t in tensors) for tensors in (read, written)
        )
        for counter in _counters:
            counter.read += incoming
            counter.written += outgoing
