"""Prefill spread over processes: each holds the depth sources of its own tokens only."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor

from attention_residuals.errors import ConfigError
from attention_residuals.inference.cache import KVCache
from attention_residuals.inference.prefill import Prefilled, checked_prompt, checked_schedule
from attention_residuals.layers.residual import ResidualRule
from attention_residuals.layers.tap import Tap
from attention_residuals.models import LanguageModel

__all__ = ["ShardedCache", "shard_of", "sharded_prefill", "shared_chunks"]


def shard_of(num_tokens: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Returns the first token of a rank's shard and the one behind its last; earlier ranks get one more.

    Example:
        >>> [shard_of(7, rank, 3) for rank in range(3)]
        [(0, 3), (3, 5), (5, 7)]
    """
    size, rest = divmod(num_tokens, num_ranks)
    start = rank * size + min(rank, rest)
    return start, start + size + (rank < rest)


def shared_chunks(num_tokens: int, chunk: int, num_ranks: int) -> list[tuple[int, int]]:
    """Cuts a prompt into chunks that have a token for each process; what is left over joins the last one.

    Raises:
        ConfigError: Fewer tokens in a chunk than processes.

    Example:
        >>> shared_chunks(9, 4, 2)
        [(0, 4), (4, 9)]
    """
    if min(chunk, num_tokens) < num_ranks:
        raise ConfigError(
            got=f"{min(chunk, num_tokens)} tokens at once for {num_ranks} processes",
            expected="at least one token for each process",
            do="pass a larger chunk, or use prefill in one process",
        )
    starts = list(range(0, num_tokens, chunk))
    if num_tokens - starts[-1] < num_ranks:
        starts.pop()
    return list(zip(starts, [*starts[1:], num_tokens], strict=True))


class ShardedCache:
    """A cache through which the processes of a group read one chunk together, each its own tokens.

    The new keys and values of all processes are gathered and kept by each, so that decoding can go on
    anywhere; a process sees those up to the end of its own shard, which is all that causal attention asks
    for.

    Args:
        cache: Where keys and values are kept.
        num_tokens: Of the chunk; at least one for each process.
        group: The processes.
    """

    def __init__(self, cache: KVCache, num_tokens: int, group: dist.ProcessGroup) -> None:
        self.cache, self.group = cache, group
        self.shards = [shard_of(num_tokens, rank, group.size()) for rank in range(group.size())]
        self.start, self.end = self.shards[group.rank()]
        self.chunk = num_tokens

    @property
    def num_tokens(self) -> int:
        """How many tokens come before this process's own."""
        return self.cache.num_tokens + self.start

    def extend(
        self, layer: int, key: Float[Tensor, "B H T K"], value: Float[Tensor, "B H T _"]
    ) -> tuple[Float[Tensor, "B H U K"], Float[Tensor, "B H U _"]]:
        """Gathers a layer's new keys and values, keeps them, and returns those that this process may see."""
        keys, values = self.cache.extend(layer, self._gathered(key), self._gathered(value))
        visible = self.cache.num_tokens + self.end
        return keys[:, :, :visible], values[:, :, :visible]

    def advance(self, num_tokens: int) -> None:
        """Keeps the chunk, once every layer has it."""
        self.cache.advance(self.chunk)

    def _gathered(self, own: Tensor) -> Tensor:
        """Puts the shards of all processes behind each other; the first is the longest."""
        longest = self.shards[0][1]
        padded = torch.nn.functional.pad(own, (0, 0, 0, longest - own.shape[2])).contiguous()
        parts = [torch.empty_like(padded) for _ in self.shards]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat(
            [part[:, :, : end - start] for part, (start, end) in zip(parts, self.shards, strict=True)], dim=2
        )


@torch.no_grad()
def sharded_prefill(
    model: LanguageModel,
    tokens: Int[Tensor, "B T"],
    group: dist.ProcessGroup,
    *,
    chunk: int = 2048,
    residual: ResidualRule[Any] | None = None,
    tap: Callable[[], Tap] | None = None,
) -> Prefilled:
    """Reads prompts into a cache, with the tokens of each chunk spread over the processes of a group.

    All processes call it with the same tokens and get the same result, that of ``prefill`` but for
    rounding. Depth sources, and all else that is local to a token, exist on each process for its own tokens
    only, so their memory falls as one over the number of processes. Whatever is wrong with the prompts is
    found by all of them before they exchange anything. ``docs/inference.md`` has an example.

    Args:
        model: The same on every process.
        tokens: The prompts, not padded; the same on every process.
        group: The processes, such as ``torch.distributed.group.WORLD``.
        chunk: Tokens at once over all processes, at least one for each.
        residual: Another schedule of the model's rule.
        tap: Is called for a tap before each chunk; it sees this process's tokens.

    Raises:
        ConfigError: Fewer tokens in a chunk than processes, no group, or the rule of another model.
        ShapeError: More tokens than the model accepts, or no batch axis.
        DataError: A token id out of range.

    Source:
        Attention Residuals (arXiv:2603.15031), section on long-context prefill.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            got=f"group={group!r}",
            expected="a process group that this process belongs to",
            do="call torch.distributed.init_process_group, then pass torch.distributed.group.WORLD",
        )
    checked_prompt(model, tokens, 0, chunk)
    checked_schedule(model, residual)
    cache, num_ranks = KVCache(), group.size()
    pieces = shared_chunks(tokens.shape[1], chunk, num_ranks)
    last = torch.empty(0)
    for start, end in pieces:
        shared = ShardedCache(cache, end - start, group)
        own = tokens[:, start + shared.start : start + shared.end]
        last = model(own, cache=shared, residual=residual, tap=None if tap is None else tap(), num_logits=1)[
            :, -1
        ].contiguous()
    newest = dist.get_global_rank(group, num_ranks - 1)
    dist.broadcast(last, src=newest, group=group)
    return Prefilled(last, cache, None)
