"""The schedules of torch.distributed.pipelining: in which order each rank works, what it costs and holds."""

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from torch import nn

from attention_residuals.errors import ConfigError, is_count, nearest
from attention_residuals.parallel.plan import Placement, Plan

__all__ = [
    "SCHEDULES",
    "Action",
    "Schedule",
    "bubble",
    "most_held",
    "most_in_flight",
    "orders",
    "schedule_named",
]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a schedule of PyTorch asks of a pipeline.

    Args:
        name: Of the class, without ``Schedule``.
        placement: Of its stages on ranks.
        stages_per_rank: How many it admits; None for any number.
        splits_backward: Gradients of inputs and of weights are computed apart, which compiled stages cannot.
    """

    name: str
    placement: Placement = "loop"
    stages_per_rank: int | None = None
    splits_backward: bool = False

    @property
    def torch_class(self) -> Any:
        """Is the class of ``torch.distributed.pipelining``."""
        # Imported when a pipeline is made or planned: PyTorch's pipelining brings its compiler with it.
        from torch.distributed.pipelining import schedules

        return getattr(schedules, f"Schedule{self.name}")

    def check(self, stages_per_rank: int, num_ranks: int, num_microbatches: int) -> None:
        """Checks that the schedule admits a pipeline.

        Raises:
            ConfigError: It wants another number of stages on a rank, or other microbatches.
        """
        if not is_count(num_microbatches):
            raise ConfigError(
                got=f"num_microbatches={num_microbatches!r}",
                expected="1 or more",
                do="4 per stage keep bubbles small",
            )
        if self.stages_per_rank not in (None, stages_per_rank):
            raise ConfigError(
                got=f"{stages_per_rank} stages on each rank for {self.name}",
                expected=f"{self.stages_per_rank} on each rank",
                do=f"use {num_ranks * (self.stages_per_rank or 1)} stages in all, or a schedule that takes "
                f"{stages_per_rank} on each rank: {', '.join(_taking(stages_per_rank))}",
            )
        fewest = self._fewest(stages_per_rank * num_ranks)
        rounds = max(1, num_microbatches // num_ranks)
        if num_microbatches < fewest or (self.name.startswith("Interleaved") and num_microbatches % rounds):
            raise ConfigError(
                got=f"{num_microbatches} microbatches for {self.name} on {num_ranks} ranks",
                expected=f"{fewest} or more microbatches"
                + (f", a multiple of {num_ranks}" if self.name.startswith("Interleaved") else ""),
                do=f"use {max(fewest, num_ranks * rounds)} microbatches",
            )

    def _fewest(self, num_stages: int) -> int:
        """Says how many microbatches it needs."""
        return num_stages if self.name in ("1F1B", "DualPipeV") else 1


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="GPipe", stages_per_rank=1),
        Schedule(name="1F1B", stages_per_rank=1),
        Schedule(name="LoopedBFS"),
        Schedule(name="Interleaved1F1B"),
        Schedule(name="InterleavedZeroBubble", splits_backward=True),
        Schedule(name="ZBVZeroBubble", placement="v", stages_per_rank=2, splits_backward=True),
        Schedule(name="DualPipeV", placement="v", stages_per_rank=2, splits_backward=True),
    )
}
"""What ``Pipeline`` runs, by name."""


def _taking(stages_per_rank: int) -> list[str]:
    """Names the schedules that admit so many stages on a rank."""
    return [name for name, one in SCHEDULES.items() if one.stages_per_rank in (None, stages_per_rank)]


class Action(NamedTuple):
    """One step of a rank's work."""

    stage: int
    microbatch: int
    kind: Literal["F", "B", "I", "W"]
    """Forward, backward, or the backward of inputs and of weights apart."""


def schedule_named(name: str) -> Schedule:
    """Finds a schedule.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in SCHEDULES:
        raise ConfigError(got=f"schedule {name!r}", expected="a known schedule", do=nearest(name, SCHEDULES))
    return SCHEDULES[name]


def orders(
    name: str, *, num_ranks: int, stages_per_rank: int, num_microbatches: int
) -> tuple[tuple[Action, ...], ...]:
    """Asks PyTorch in which order each rank works; no process group is needed.

    Raises:
        ConfigError: The schedule does not admit that.

    Example:
        >>> order = orders("GPipe", num_ranks=2, stages_per_rank=1, num_microbatches=2)
        >>> ["".join(map(str, action[1:])) for action in order[0]]
        ['0F', '1F', '0B', '1B']
    """
    schedule = schedule_named(name)
    schedule.check(stages_per_rank, num_ranks, num_microbatches)
    if schedule.stages_per_rank == 1:
        return tuple(_single_order(name, num_ranks, rank, num_microbatches) for rank in range(num_ranks))
    # The constructors look at no more than this of a stage.
    stages = [
        SimpleNamespace(
            num_stages=num_ranks * stages_per_rank, group_size=num_ranks, group_rank=0, submod=nn.Identity()
        )
        for _ in range(stages_per_rank)
    ]
    made = schedule.torch_class(stages, num_microbatches)
    return tuple(tuple(_actions(made.pipeline_order[rank])) for rank in range(num_ranks))


def _single_order(name: str, num_ranks: int, rank: int, num_microbatches: int) -> tuple[Action, ...]:
    """Lists the work of one stage per rank, of which PyTorch 2.13 has a faulty list (1F1B, last rank)."""
    forward = [Action(rank, microbatch, "F") for microbatch in range(num_microbatches)]
    backward = [Action(rank, microbatch, "B") for microbatch in range(num_microbatches)]
    ahead = num_microbatches if name == "GPipe" else min(num_microbatches, num_ranks - rank)
    pairs = itertools.zip_longest(backward, forward[ahead:])
    return (*forward[:ahead], *(action for pair in pairs for action in pair if action is not None))


def _actions(order: Iterable[Any]) -> Iterable[Action]:
    """Reads PyTorch's actions; idle steps, and what is done once a step, are left out."""
    for action in order:
        if action is None:
            continue
        kind = action.computation_type
        if action.sub_actions is not None:
            yield from _actions(action.sub_actions)
        elif kind.value in ("F", "B", "I", "W"):
            yield Action(action.stage_index, action.microbatch_index, kind.value)


def bubble(order: tuple[tuple[Action, ...], ...], costs: Mapping[str, float] | None = None) -> float:
    """Returns the share of time in which ranks wait, when communication takes none.

    Args:
        order: Of all ranks.
        costs: Time of each kind of action; by default a backward takes twice a forward, half of it for the
            weights.

    Returns:
        0 (nobody ever waits) to below 1.

    Example:
        >>> bubble(orders("1F1B", num_ranks=4, stages_per_rank=1, num_microbatches=8))  # 3 / (8 + 3)
        0.2727272727272727
    """
    costs = costs or {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    num_stages = 1 + max(action.stage for actions in order for action in actions)
    done: dict[tuple[int, int, str], float] = {}
    clocks, places = [0.0] * len(order), [0] * len(order)
    while any(place < len(actions) for place, actions in zip(places, order, strict=True)):
        before = sum(places)
        for rank, actions in enumerate(order):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                waits = [done.get(need) for need in _needs(action, num_stages)]
                if None in waits:
                    break
                start = max([clocks[rank], *(wait for wait in waits if wait is not None)])
                clocks[rank] = start + costs[action.kind]
                direction = "B" if action.kind == "I" else action.kind
                done[action.stage, action.microbatch, direction] = clocks[rank]
                places[rank] += 1
        assert sum(places) > before, "the order waits for itself"
    busy = sum(costs[action.kind] for actions in order for action in actions)
    return 1 - busy / (len(order) * max(clocks))


def _needs(action: Action, num_stages: int) -> list[tuple[int, int, str]]:
    """Lists what must be done before an action."""
    stage, microbatch, kind = action
    if kind == "F":
        return [(stage - 1, microbatch, "F")] if stage else []
    if kind == "W":
        return [(stage, microbatch, "B")]
    after = [(stage + 1, microbatch, "B")] if stage + 1 < num_stages else []
    return [(stage, microbatch, "F"), *after]


def most_in_flight(actions: Iterable[Action]) -> int:
    """Counts the most (stage, microbatch) pairs whose activations a rank holds at once."""
    steps = ({"F": 1, "B": -1, "W": -1}.get(action.kind, 0) for action in actions)
    return max(itertools.accumulate(steps), default=0)


def most_held(plan: Plan, actions: Iterable[Action]) -> int:
    """Predicts how many pieces a rank's store holds at its fullest, over all microbatches in flight.

    Args:
        plan: What stages keep.
        actions: The rank's order, with backward; each stage frees in its own backward what it kept.
    """
    most, held = 0, Counter[int]()
    for action in actions:
        kept = len(plan.stages[action.stage].keeps)
        if action.kind == "F":
            held[action.stage] += kept
        elif action.kind == _frees(action):
            held[action.stage] -= kept
        most = max(most, held.total())
    return most


def _frees(action: Action) -> str:
    """Says which part of a split backward frees: of the first stage, PyTorch runs all of it as the second."""
    return "B" if action.kind == "B" else "I" if action.stage else "W"
