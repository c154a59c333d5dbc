"""The processes of a run that torchrun has started: they find one another, and say who ended it for all."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from attention_residuals.configs import encode
from attention_residuals.errors import AttentionResidualsError, ConfigError, RankError
from attention_residuals.parallel.blame import (
    RESTART,
    SECONDS_TO_REPORT,
    WaitedError,
    blame,
    line_of,
    tell,
    when,
)
from attention_residuals.parallel.config import Parallel
from attention_residuals.train.config import first_difference

__all__ = ["SECONDS_TO_REPORT", "Ranks", "joined", "launched"]

_BEGIN_HERE = (AttentionResidualsError, torch.OutOfMemoryError, NotImplementedError)
"""Errors that are a rank's own, though some derive from RuntimeError, which a broken connection raises."""

T = TypeVar("T")


class Ranks:
    """All processes of a run, as this one sees them.

    Args:
        parallel: How they share the work.
        device: Of this process: ``"cpu"`` or ``"cuda"``.
        store: What all of them can write to and read.
    """

    def __init__(self, parallel: Parallel, device: str, store: dist.Store) -> None:
        self.parallel, self.device, self.store = parallel, device, store
        self.rank, self.step, self._agreements = dist.get_rank(), 0, 0
        self.agree({"parallel": encode(parallel)})
        self.mesh: DeviceMesh = init_device_mesh(
            device,
            (parallel.pipeline, parallel.replicate, parallel.shard, parallel.tensor),
            mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
        )
        timeout = timedelta(seconds=parallel.timeout_seconds)
        self.background = dist.new_group(backend="gloo", timeout=timeout)
        """For what is saved while training goes on."""

    @property
    def is_lead(self) -> bool:
        """Tells whether this is the rank that writes files and speaks."""
        return self.rank == 0

    @property
    def data_mesh(self) -> DeviceMesh:
        """Returns the ranks that spread one copy of the weights, and the copies if there are more."""
        return self.mesh["shard"] if self.parallel.replicate == 1 else self.mesh["replicate", "shard"]

    def place(self, axis: str) -> int:
        """Returns where on an axis of the mesh this rank is."""
        return self.mesh.get_local_rank(axis)

    @property
    def data_place(self) -> int:
        """Which share of a batch this rank has."""
        return self.place("replicate") * self.parallel.shard + self.place("shard")

    def sum(self, number: float) -> float:
        """Adds up a number of each rank."""
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()

    def begin(self, step: int) -> None:
        """Notes, for the others too, which step comes next."""
        self.step = step
        self.store.set(f"step/{self.rank}", str(step))

    def agree(self, what: dict[str, Any]) -> None:
        """Refuses ranks that would do different things.

        Args:
            what: They do, as JSON; all ranks call this as often and in the same order.

        Raises:
            RankError: They would; every rank raises it.
        """
        self._agreements += 1
        topic, text = f"agreement {self._agreements}", json.dumps(what, sort_keys=True)
        self.store.set(f"{topic}/{self.rank}", text)
        timeout = timedelta(seconds=self.parallel.timeout_seconds)

        def said(rank: int) -> str:
            self.store.wait([f"{topic}/{rank}"], timeout)
            found: str = self.store.get(f"{topic}/{rank}").decode()
            return found

        if not self.sum(float(text != said(0))):
            return
        first = json.loads(said(0))
        found = (
            (rank, first_difference(first, json.loads(said(rank)))) for rank in range(dist.get_world_size())
        )
        rank, difference = next((rank, text) for rank, text in found if text is not None)
        raise RankError(
            got=f"ranks that would do different things: {difference} (there: rank 0; here: rank {rank})",
            expected="the same options, the same data and the same files on every rank",
            do="start all of them with the same command, on a disk that they share",
        )

    def lead_first(self, work: Callable[[], T], then: Callable[[], T]) -> T:
        """Lets the lead do something first, such as preparing a corpus, and the others what follows from it.

        Args:
            work: Of the lead.
            then: Of the others, once the lead's is done, such as opening that corpus.
        """
        if self.is_lead:
            result = work()
            self.store.set("prepared", "yes")
            return result
        while not self.store.check(["prepared"]):
            if self.store.check(["failed/0"]):
                raise WaitedError
            time.sleep(0.05)
        return then()

    def explained(self, error: BaseException) -> BaseException:
        """Tells the others how this rank ended, and finds out whose fault it was if it only waited for them.

        Args:
            error: What ended this rank.

        Returns:
            The same error if it began here or names another rank already, else a RankError that names the ranks
            and their steps.
        """
        began_here = not isinstance(error, RankError) and (
            isinstance(error, _BEGIN_HERE) or not isinstance(error, RuntimeError)
        )
        names_another = self._names_another(error)
        try:
            tell(error, self.store, self.rank, self.step, began_here=began_here)
            return error if began_here or names_another else blame(error, self.store, self.rank, self.step)
        except RuntimeError:  # whoever keeps the store is gone
            if names_another:
                return error
            return RankError(
                got=f"rank {self.rank} was left alone {when(self.step)}: {line_of(error)}",
                expected="every rank to finish the step, and the process that keeps the store to live",
                do=RESTART,
            )

    def _names_another(self, error: BaseException) -> bool:
        """Tells whether an error says already who ended the run, as a pipeline does, which watches its ranks.

        Not where a rank found none but itself, nor in copies of a pipeline, each of which sees only its own ranks.
        """
        if not isinstance(error, RankError) or self.parallel.num_data > 1:
            return False
        return not error.got.startswith(f"rank {self.rank} failed")


@contextmanager
def launched(parallel: Parallel, device: str = "cpu") -> Iterator[Ranks]:
    """Joins the processes that torchrun has started.

    A rank that dies, hangs or fails ends all others with a RankError that names it and its step: at once where
    connections break, after ``timeout_seconds`` where it hangs, and ``SECONDS_TO_REPORT`` later at most.

    Args:
        parallel: How they share the work.
        device: ``"cpu"`` (gloo) or ``"cuda"`` (nccl, one GPU for each process of a machine).

    Raises:
        ConfigError: The process was not started by torchrun, or not as often as ``parallel`` asks for.
        RankError: Another rank died, hung or failed.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise ConfigError(
            got=f"one process, for {parallel.num_ranks} ranks",
            expected="processes that torchrun starts",
            do=f"torchrun --nproc-per-node {parallel.num_ranks} --no-python -- attnres train ...",
        )
    parallel.check_world()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=parallel.timeout_seconds)))
    with joined(parallel, device, store, rank) as ranks:
        yield ranks


@contextmanager
def joined(parallel: Parallel, device: str, store: dist.Store, rank: int) -> Iterator[Ranks]:
    """Does what ``launched`` does, with a store that is there already.

    Args:
        parallel: How the processes share the work.
        device: As for ``launched``.
        store: The same for all processes.
        rank: Of this process.

    Raises:
        RankError: Another rank died, hung or failed.
    """
    # torchrun's store outlives a restart, and so does what was said there before it.
    store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=rank,
        world_size=parallel.num_ranks,
        timeout=timedelta(seconds=parallel.timeout_seconds),
    )
    ranks = Ranks(parallel, device, PrefixStore("attnres", store))
    try:
        yield ranks
        ranks.sum(0.0)  # nobody leaves early: one of them may keep the store
    except BaseException as error:
        cause = ranks.explained(error)
        if cause is error:
            raise
        raise cause from error
    dist.destroy_process_group()
