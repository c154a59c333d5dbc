"""Runs on several ranks: whatever becomes of a rank or of torchrun is told as it is in one process."""

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from experiments.made_up import cell, small_corpus
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from attention_residuals.configs import decode
from attention_residuals.errors import ConfigError, DataError, RankError
from attention_residuals.experiments import STUDIES, Results, run_experiment, run_queue, torchrun
from attention_residuals.experiments import rank as rank_module
from attention_residuals.experiments.cell import digest_of
from attention_residuals.experiments.launchers import Torchrun
from attention_residuals.experiments.measures import Dynamics
from attention_residuals.experiments.rank import do_as_rank, end_of_ranks
from attention_residuals.experiments.worker import HELD, STOPPED, do, run_folder, work, write_cell
from attention_residuals.parallel.config import Parallel
from attention_residuals.train import AdamW, Muon
from attention_residuals.train.checkpoint import checkpoints

TWO = Parallel(shard=2, timeout_seconds=120.0)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("texts") / "corpus")


@pytest.fixture
def ranks_end(tmp_path, corpus, monkeypatch):
    """Does a run whose ranks end as told, the first one first."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests' own process still listens

    def call(*told, codes=None, error=None):
        one = cell()

        def run(args):
            assert (args.nproc_per_node, args.standalone) == ("2", True)
            for place, (number, what) in enumerate(told):
                path = end_of_ranks(tmp_path, one.name) / f"rank-{number}.json"
                path.write_text(json.dumps(what))
                os.utime(path, ns=(place, place))
            if error is not None:
                raise error
            if codes:
                raise ChildFailedError(
                    "rank", {n: ProcessFailure(n, 1, code, "") for n, code in codes.items()}
                )

        monkeypatch.setattr(torchrun, "run", run)
        write_cell(tmp_path, one, corpus.folder)
        results, doing = Results(tmp_path / "results.csv"), torchrun.doing_on_ranks(tmp_path, TWO)
        try:
            code = work(tmp_path, results.path, one.name, doing=doing)
        except SystemExit as end:
            code = end.code
        return code, results.read().outcomes.get(one.key)

    return call


def test_what_the_lead_has_measured_is_the_outcome(ranks_end, corpus):
    code, outcome = ranks_end((0, {"status": "done", "numbers": [["validation loss", 0.1 + 0.2, 4, None]]}))
    assert (code, outcome.is_done, outcome.config) == (0, True, digest_of(cell(), corpus))
    assert outcome.series("validation loss") == {4: 0.1 + 0.2}


WAITED = {"waited": "RankError: rank 1 gives no sign since step 3"}
NO_MEMORY = {"status": "out of memory: 2 GiB", "numbers": []}
FULL = {"error": "OSError: the disk is full"}


def test_what_a_rank_has_met_itself_counts_before_what_others_waited_for(ranks_end):
    code, outcome = ranks_end((0, WAITED), (1, NO_MEMORY), codes={1: 1})
    assert (code, outcome.status) == (0, "out of memory: 2 GiB")


def test_an_error_that_says_nothing_of_the_run_is_told_and_is_no_outcome(ranks_end):
    assert ranks_end((0, WAITED), (1, FULL), codes={0: 1}) == ("OSError: the disk is full", None)
    assert ranks_end((0, FULL), (1, {"error": "later"}), codes={0: 1})[0] == "OSError: the disk is full"


def test_a_rank_that_was_killed_is_a_killed_run(ranks_end):
    assert ranks_end((0, WAITED), codes={1: -9}) == (128 + 9, None)
    assert ranks_end((0, FULL), codes={0: 1, 1: -9})[0] == FULL["error"]


def test_ranks_that_only_waited_or_said_nothing_are_told(ranks_end):
    assert ranks_end((0, WAITED), codes={0: 1}) == (WAITED["waited"], None)
    assert ranks_end(codes={1: -6}) == ("ended without a word: rank 1 by exit code -6", None)


def test_a_run_that_was_stopped_goes_on_later_whatever_an_earlier_attempt_has_left(ranks_end):
    ranks_end((1, FULL), codes={1: 1})
    assert ranks_end() == (STOPPED, None)
    assert ranks_end(error=SignalException("", signal.SIGTERM)) == (STOPPED, None)
    done = {"status": "done", "numbers": []}
    assert ranks_end((0, done), error=SignalException("", signal.SIGTERM))[0] == 0


@pytest.fixture
def as_rank(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("RANK", "3")

    def call(one, training=None):
        if training is not None:
            monkeypatch.setattr(rank_module, "trained", training)
        write_cell(tmp_path, one, corpus.folder)
        end_of_ranks(tmp_path, one.name).mkdir(parents=True)
        return do_as_rank(tmp_path, one.name, Parallel())

    return call


@pytest.fixture
def told(tmp_path):
    def read(one):
        path = end_of_ranks(tmp_path, one.name) / "rank-3.json"
        return json.loads(path.read_text()) if path.exists() else None

    return read


def test_a_rank_alone_finds_what_one_process_finds(as_rank, told, tmp_path, corpus):
    one = cell(measure=Dynamics(points=2, num_windows=2))
    assert as_rank(one) == 0
    outcome = do(one, corpus, tmp_path / "other", digest_of(one, corpus))
    same = [list(number) for number in outcome.numbers if number.quantity != "training seconds"]
    assert told(one)["status"] == "done"
    assert [number for number in told(one)["numbers"] if number[0] != "training seconds"] == same


@pytest.mark.parametrize(
    ("error", "written"),
    [
        (OSError("the disk is full"), FULL),
        (DataError(got="a hole", expected="", do=""), {"error": "DataError: a hole"}),
        # what another rank has said is not this one's outcome
        (RankError(got="out of memory", expected="", do=""), {"waited": "RankError: out of memory"}),
    ],
)
def test_a_rank_writes_down_the_error_that_ended_it(as_rank, told, error, written):
    def fails(*args, **options):
        raise error

    with pytest.raises(type(error)):
        as_rank(cell(), fails)
    assert told(cell()) == written


def test_a_rank_without_memory_has_an_outcome_and_ends_the_others(as_rank, told):
    def fails(*args, **options):
        raise MemoryError("9 bytes")

    assert as_rank(cell(), fails) == 1
    assert told(cell()) == {"status": "out of memory: 9 bytes", "numbers": []}


def test_a_rank_that_was_stopped_writes_nothing(as_rank, told):
    assert as_rank(cell(), lambda *args, **options: False) == 0
    assert told(cell()) is None


def test_the_launcher_says_how_ranks_share_the_work():
    launcher = Torchrun(parallel=TWO, device="cuda")
    python, _, module, told = launcher.command()
    assert (python, module) == (sys.executable, torchrun.__name__)
    assert decode(json.loads(told), {"Parallel": Parallel}) == TWO


def test_runs_that_cannot_be_shared_out_so_are_refused_before_one_is_started(tmp_path):
    with pytest.raises(ConfigError, match="batch_size=2 for replicate x shard = 3"):
        run_experiment(
            STUDIES["dynamics"].at("smoke"),
            tmp_path,
            tmp_path / "results.csv",
            launcher=Torchrun(parallel=Parallel(shard=3)),
        )
    assert not (tmp_path / "cells").exists()


@pytest.mark.parametrize("name", [name for name in STUDIES if name not in ("depth-retrieval", "kimi-linear")])
def test_every_run_of_the_papers_size_can_be_spread_over_eight_gpus(name):
    for one in STUDIES[name].at("paper").foreseen({"text": 1000}):
        for parallel in (Parallel(shard=8), Parallel(replicate=8), Parallel(replicate=2, shard=4)):
            parallel.check(one.train)
        assert (one.train.precision, one.train.sequence_length) == ("bfloat16", 8192)


def test_kimi_linear_of_the_papers_size_takes_one_gpu_and_says_so():
    for one in STUDIES["kimi-linear"].at("paper").foreseen({"text": 1000}):
        Parallel().check(one.train)
        with pytest.raises(ConfigError, match="for a model of Transformers"):
            Parallel(shard=8).check(one.train)


@dataclass(frozen=True)
class Faulty(Torchrun):
    """The real thing, with what a run's setting says happening to it."""

    def command(self):
        script = Path(__file__).with_name("faulty_torchrun.py")
        return [sys.executable, str(script), super().command()[-1]]


@pytest.fixture
def go(tmp_path, corpus, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent.parent), *sys.path]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def call(*cells):
        notes, results = [], Results(tmp_path / "results.csv")
        launcher = Faulty(parallel=TWO)
        ended = run_queue(
            lambda table: cells,
            {"text": corpus},
            tmp_path,
            results,
            workers=1,
            launcher=launcher,
            note=notes.append,
        )
        assert ended.is_finished, (ended, notes)
        return results.read().outcomes, notes

    return call


@pytest.mark.slow
def test_a_rank_that_diverges_or_has_no_memory_is_told_in_the_table_and_the_rest_goes_on(go):
    no_memory = cell(setting="no memory")
    diverging = cell("standard", num_steps=30, optimizer=Muon(learning_rate=1e30))
    outcomes, _ = go(no_memory, diverging)
    assert outcomes[no_memory.key].status.startswith("out of memory: DefaultCPUAllocator: can't allocate")
    assert outcomes[diverging.key].status.startswith("diverged: ")
    assert "at step" in outcomes[diverging.key].status


@pytest.mark.slow
def test_a_run_whose_torchrun_is_killed_goes_on_to_what_one_process_finds(go, tmp_path, corpus):
    one = cell(
        setting="slow",
        num_steps=12,
        optimizer=AdamW(learning_rate=3e-3),
        measure=Dynamics(points=6, num_windows=2),
    )
    held = []

    def kill():
        while not checkpoints(run_folder(tmp_path, one)):
            time.sleep(0.02)
        held.append(work(tmp_path, tmp_path / "results.csv", one.name))
        os.kill(int((tmp_path / "process").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    outcomes, notes = go(one)
    thread.join()
    assert held == [HELD]
    told = [note for note in notes if "waiting" not in note]
    (killed,) = [note for note in told if note.startswith("killed by signal 9 after step ")]
    assert told[2] == f"begins: {one.key}, from step {killed.split()[6].rstrip(',')}"
    alone = do(one, corpus, tmp_path / "alone", digest_of(one, corpus))
    for found, expected in zip(outcomes[one.key].numbers, alone.numbers, strict=True):
        assert found._replace(value=0.0) == expected._replace(value=0.0)
        if found.quantity != "training seconds":
            assert found.value == pytest.approx(expected.value, rel=1e-5), found
