"""What each stage of a pipeline receives, holds, sends on and frees: a pure function, without processes."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from attention_residuals.errors import ConfigError, is_count

__all__ = ["Piece", "Placement", "Plan", "StageLayout", "StagePlan", "Transport", "even_layers", "plan"]

Placement = Literal["loop", "v"]
"""``"loop"``: stage i is on rank i mod P. ``"v"``: every second round of stages runs through the ranks backwards."""

Transport = Literal["cached", "paper", "naive"]
"""``"cached"``: a hop carries what the next rank lacks. ``"paper"``: a rank keeps what it was sent, not what it
made itself. ``"naive"``: every hop carries the whole state."""


class Piece(NamedTuple):
    """One tensor of a residual state, known by whose outputs it sums.

    Writer 0 is the embedding and writer i + 1 the sublayer i. Blocks, open blocks, single outputs and the
    standard stream are all such sums, so that equal pieces are the same tensor.

    Example:
        >>> Piece(0, 1).is_embedding, Piece(1, 5).is_embedding
        (True, False)
    """

    first: int
    """The first writer in the sum."""
    end: int
    """The one behind the last."""

    @property
    def is_embedding(self) -> bool:
        """Tells whether it is the embedding alone."""
        return self == (0, 1)


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """Which sublayers each stage holds, and where the stages are.

    Args:
        sublayers: How many sublayers each stage holds, in order, each 1 or more.
        num_ranks: P, the processes of the pipeline; the number of stages is a multiple of it.
        placement: Of stages on ranks.
        sublayers_per_block: The rule's; 1 is the full form, None the standard residual.

    Raises:
        ConfigError: A stage without a sublayer, or stages that cannot be placed so.

    Example:
        >>> layout = StageLayout(sublayers=(2, 2, 2, 2), num_ranks=2, sublayers_per_block=4)
        >>> [layout.rank_of(stage) for stage in range(4)]
        [0, 1, 0, 1]
    """

    sublayers: tuple[int, ...]
    num_ranks: int
    placement: Placement = "loop"
    sublayers_per_block: int | None

    def __post_init__(self) -> None:
        if not is_count(self.num_ranks) or not all(map(is_count, self.sublayers)):
            raise ConfigError(
                got=f"num_ranks={self.num_ranks!r}, sublayers={self.sublayers}",
                expected="at least one rank, and at least one sublayer in every stage",
                do="use fewer stages, or a deeper model",
            )
        if not self.sublayers or len(self.sublayers) % self.num_ranks:
            raise ConfigError(
                got=f"{len(self.sublayers)} stages on {self.num_ranks} ranks",
                expected="the same number of stages on every rank, 1 or more",
                do=f"use {self.num_ranks} or {2 * self.num_ranks} stages",
            )
        if self.sublayers_per_block is not None and not is_count(self.sublayers_per_block):
            raise ConfigError(
                got=f"sublayers_per_block={self.sublayers_per_block!r}",
                expected="1 (the full form) or more, or None",
                do="None is the standard residual",
            )

    @property
    def num_stages(self) -> int:
        """C, the stages of all ranks."""
        return len(self.sublayers)

    @property
    def stages_per_rank(self) -> int:
        """V, the stages of one rank."""
        return self.num_stages // self.num_ranks

    def rank_of(self, stage: int) -> int:
        """Says on which rank a stage is."""
        turn, place = divmod(stage, self.num_ranks)
        backwards = self.placement == "v" and turn % 2 == 1
        return self.num_ranks - 1 - place if backwards else place

    def written_before(self, stage: int) -> int:
        """Counts the sublayers of earlier stages."""
        return sum(self.sublayers[:stage])

    def state_after(self, num_written: int) -> tuple[Piece, ...]:
        """Lists the state once so many sublayers have written, in the order in which a rule holds it."""
        size = self.sublayers_per_block
        if size is None:
            return (Piece(0, num_written + 1),)
        ends = [*range(1, num_written + 1, size), num_written + 1]  # of the embedding, blocks, the open one
        pieces = (Piece(first, end) for first, end in itertools.pairwise(ends))
        return (Piece(0, 1), *(piece for piece in pieces if piece.first < piece.end))


class StagePlan(NamedTuple):
    """What one stage does for each microbatch.

    In backward each line runs the other way: the gradients of ``receives`` are sent back, those of ``holds``
    are added to an account of the rank, and the accounts of ``keeps`` are collected and freed.
    """

    stage: int
    rank: int
    inputs: tuple[Piece, ...]
    """The state that it starts with; nothing for the first stage, which is given tokens."""
    outputs: tuple[Piece, ...]
    """The state that it leaves; nothing for the last stage, which makes logits."""
    receives: tuple[Piece, ...]
    """What of its inputs the stage before it hands over."""
    holds: tuple[Piece, ...]
    """What of its inputs is on its rank already."""
    keeps: tuple[Piece, ...]
    """What it puts aside for later stages of its rank; freed by its own backward."""
    sends: tuple[Piece, ...]
    """What it hands to the next stage."""
    frees: tuple[Piece, ...]
    """What no later stage of its rank holds any more: freed here when there is no backward."""


class Plan(NamedTuple):
    """What all stages do, and what it costs."""

    layout: StageLayout
    transport: Transport
    stages: tuple[StagePlan, ...]

    def stages_of(self, rank: int) -> tuple[StagePlan, ...]:
        """Lists the stages of a rank."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def hops(self) -> Iterator[StagePlan]:
        """Yields the stages that send to another rank; the turn of a V sends nothing."""
        for stage, following in itertools.pairwise(self.stages):
            if stage.rank != following.rank:
                yield stage

    @property
    def num_sent(self) -> int:
        """Counts what crosses from rank to rank, for one microbatch and one direction."""
        return sum(len(stage.sends) for stage in self.hops())

    @property
    def num_embeddings_sent(self) -> int:
        """Counts how often the embedding crosses; ``num_sent`` holds it too."""
        return sum(piece.is_embedding for stage in self.hops() for piece in stage.sends)

    def num_sent_by(self, rank: int) -> tuple[int, int]:
        """Counts what a rank sends for one microbatch: pieces in forward, gradients in backward."""
        forward = sum(len(stage.sends) for stage in self.hops() if stage.rank == rank)
        senders = {stage.stage for stage in self.hops()}
        backward = sum(len(stage.receives) for stage in self.stages_of(rank) if stage.stage - 1 in senders)
        return forward, backward

    def num_alive_on(self, rank: int) -> int:
        """Counts the different pieces that a rank has for one microbatch until backward: memory of sources."""
        return len({piece for stage in self.stages_of(rank) for piece in (*stage.inputs, *stage.outputs)})


def plan(layout: StageLayout, transport: Transport = "cached") -> Plan:
    """Plans which pieces of the residual state go where.

    Args:
        layout: Stages and their places.
        transport: What a hop carries.

    Source:
        Attention Residuals (arXiv:2603.15031), section on training infrastructure, has the naive and the
        cached transport; leaving out what a rank made itself is this library's.

    Example:
        >>> blocks = StageLayout(sublayers=(2,) * 8, num_ranks=4, sublayers_per_block=2)
        >>> [plan(blocks, transport).num_sent for transport in ("naive", "paper", "cached")]
        [35, 25, 21]
    """
    on_rank: list[set[Piece]] = [set() for _ in range(layout.num_ranks)]
    found: list[StagePlan] = []
    for stage in range(layout.num_stages):
        rank, before = layout.rank_of(stage), layout.written_before(stage)
        there, last = on_rank[rank], stage == layout.num_stages - 1
        inputs = layout.state_after(before) if stage else ()
        outputs = () if last else layout.state_after(before + layout.sublayers[stage])
        holds = tuple(piece for piece in inputs if piece in there)
        receives = tuple(piece for piece in inputs if piece not in there)
        # The first stage's rank has the embedding, which the paper's transport counts as given.
        stays = {"naive": (), "paper": inputs or (Piece(0, 1),), "cached": (*inputs, *outputs)}[transport]
        keeps = tuple(piece for piece in dict.fromkeys(stays) if piece not in there)
        there.update(stays)
        found.append(StagePlan(stage, rank, inputs, outputs, receives, holds, keeps, (), holds))
    return Plan(layout, transport, tuple(_looking_ahead(found, stage) for stage in range(len(found))))


def _looking_ahead(found: list[StagePlan], number: int) -> StagePlan:
    """Narrows what a stage keeps and frees to what later stages ask for, and says what it sends."""
    stage, following = found[number], found[number + 1 : number + 2]
    later = {piece for other in found[number + 1 :] if other.rank == stage.rank for piece in other.holds}
    return stage._replace(
        keeps=tuple(piece for piece in stage.keeps if piece in later),
        sends=following[0].receives if following else (),
        frees=tuple(piece for piece in stage.holds if piece not in later),
    )


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Spreads layers over stages; stages in the middle get one more, since the ends have embedding and head.

    Raises:
        ConfigError: Fewer layers than stages.

    Example:
        >>> even_layers(10, 4)
        (2, 3, 3, 2)
    """
    if not is_count(num_stages) or num_layers < num_stages:
        raise ConfigError(
            got=f"{num_layers} layers for {num_stages} stages",
            expected="at least one layer in every stage",
            do=f"use at most {num_layers} stages, or a deeper model",
        )
    size, more = divmod(num_layers, num_stages)
    first = (num_stages - more) // 2
    return tuple(size + (first <= stage < first + more) for stage in range(num_stages))
