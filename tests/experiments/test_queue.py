"""The queue: each run once, whatever happens to it and to the queue."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import pytest
from experiments.made_up import cell, small_corpus

from attention_residuals.durable import locked
from attention_residuals.errors import ConfigError
from attention_residuals.experiments import Outcome, Results, run_queue
from attention_residuals.experiments import queue as module
from attention_residuals.experiments.cell import digest_of
from attention_residuals.experiments.launchers import OneProcess
from attention_residuals.experiments.results import DONE

CELLS = tuple(cell(arm, seed) for seed in range(2) for arm in ("standard", "block"))


@dataclass(frozen=True)
class Fake:
    """Starts the worker that only pretends."""

    ways: dict = field(default_factory=dict)
    device = "cpu"

    def command(self):
        return [
            sys.executable,
            "-S",
            "-E",
            str(Path(__file__).with_name("fake_worker.py")),
            json.dumps(self.ways),
        ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("texts") / "corpus")


@pytest.fixture
def go(tmp_path, corpus):
    def call(ways=None, cells=CELLS, **options):
        notes = []
        digests = {one.name: digest_of(one, corpus) for one in CELLS}
        fake = Fake({**(ways or {}), "config": digests})
        cells_of = cells if callable(cells) else lambda table: cells
        results = Results(tmp_path / "results.csv")
        options = {"launcher": fake, "note": notes.append, **options}
        ended = run_queue(cells_of, {"text": corpus}, tmp_path, results, **options)
        started = (
            (tmp_path / "started.txt").read_text().splitlines() if (tmp_path / "started.txt").exists() else []
        )
        return ended, results.read(), started, notes

    return call


def test_every_run_is_done_once_and_never_again(go):
    ended, table, started, notes = go()
    assert ended.is_finished
    assert set(table.outcomes) == {one.key for one in CELLS}
    assert sorted(started) == ["block 0", "block 1", "standard 0", "standard 1"]
    assert any("done, validation loss 3.5" in note for note in notes)
    again, _, after, _ = go()
    assert again.is_finished
    assert after == started


def test_no_worker_is_refused(go):
    with pytest.raises(ConfigError, match="workers"):
        go(workers=0)


def test_one_worker_takes_the_runs_in_their_order(go):
    _, _, started, _ = go(workers=1)
    assert started == ["standard 0", "block 0", "standard 1", "block 1"]


@pytest.mark.parametrize("workers", [1, 2])
def test_so_many_runs_are_under_way_at_once_and_no_more(go, tmp_path, workers):
    runs = [f"{one.key.arm} {one.key.seed}" for one in CELLS]
    ended, _, _, _ = go(dict.fromkeys(runs, f"waits for {workers}"), workers=workers)
    assert ended.is_finished
    changes = (tmp_path / "under-way.txt").read_text().split()
    assert max(accumulate(map(int, changes))) == workers


@pytest.mark.parametrize("status", ["diverged: a loss of nan", "out of memory: 3 GB"])
def test_a_run_without_numbers_is_an_outcome_and_the_rest_goes_on(go, status):
    ways = {"block 0": status}
    ended, table, _, notes = go(ways)
    assert ended.is_finished
    assert [one.status for one in table.outcomes.values() if not one.is_done] == [status]
    assert any(status in note for note in notes)
    assert len(go(ways)[2]) == 4
    ended, table, started, _ = go(again=True)
    assert len(started) == 5
    assert all(one.is_done for one in table.outcomes.values())


def test_a_run_that_was_killed_once_goes_on_and_one_killed_twice_at_a_step_is_told(go):
    ended, table, started, notes = go({"block 0": "killed", "standard 1": "killed once"})
    assert ended.is_finished
    assert started.count("block 0") == started.count("standard 1") == 2
    (told,) = [one for one in table.outcomes.values() if not one.is_done]
    assert told.status.startswith("killed by signal 9 twice after step 0")
    assert sum("goes on" in note for note in notes) == 2


def test_what_a_run_leaves_half_written_when_it_is_killed_is_reported_by_whoever_cuts_it_off(go):
    ended, table, _, notes = go({"standard 0": "killed in its write"}, cells=CELLS[:1])
    assert ended.is_finished
    assert (len(table.outcomes), table.torn) == (1, None)
    (told,) = [note for note in notes if note.startswith("cut off: ")]
    assert "main,blo" in told


def test_an_error_that_says_nothing_of_the_model_is_no_outcome_and_is_tried_again(go):
    ended, table, _, _ = go({"block 1": "crashes"})
    assert not ended.is_finished
    assert list(ended.crashed.values()) == ["OSError: the disk is full"]
    assert len(table.outcomes) == 3
    ended, table, started, _ = go()
    assert ended.is_finished
    assert started.count("block 1") == 2


def test_a_run_that_another_process_has_is_left_to_it(go, tmp_path):
    with locked(tmp_path / "locks" / f"{CELLS[0].name}.lock") as is_ours:
        assert is_ours
        ended, table, _, _ = go()
    assert ended.elsewhere == (CELLS[0].name,)
    assert not ended.is_finished
    assert len(table.outcomes) == 3
    assert go()[0].is_finished


def test_later_runs_wait_for_the_outcomes_that_decide_them(go):
    def cells_of(table):
        return CELLS if CELLS[0].key in table.outcomes else CELLS[:1]

    ended, _, started, _ = go(cells=cells_of)
    assert ended.is_finished
    assert started[0] == "standard 0"
    assert len(started) == 4


def test_an_outcome_of_another_recipe_under_the_same_name_is_refused(go, tmp_path):
    Results(tmp_path / "results.csv").append(Outcome(key=CELLS[1].key, config="other", status=DONE))
    with pytest.raises(ConfigError, match="trained as other"):
        go()


def test_a_torn_last_line_is_reported_and_its_run_is_done_again(go, tmp_path):
    go(cells=CELLS[:1])
    path = tmp_path / "results.csv"
    path.write_bytes(path.read_bytes()[:-30])
    # A pretender that ended well would append without looking, which the real one does not.
    _, table, started, notes = go({"standard 0": "crashes"}, cells=CELLS[:1])
    assert any("does not count" in note for note in notes)
    assert not table.outcomes
    assert started == ["standard 0", "standard 0"]


@pytest.fixture
def when_hanging(tmp_path):
    """Does something once a run hangs."""

    def later(act):
        def wait():
            while not (tmp_path / "hanging").exists():
                time.sleep(0.02)
            act()

        thread = threading.Thread(target=wait)
        thread.start()
        return thread

    return later


def test_one_interrupt_lets_runs_save_and_starts_no_more(go, when_hanging):
    thread = when_hanging(lambda: os.kill(os.getpid(), signal.SIGINT))
    ended, table, started, notes = go({"standard 0": "hangs"}, workers=1)
    thread.join()
    assert ended.is_interrupted
    assert not ended.is_finished
    assert started == ["standard 0"]
    assert not table.outcomes
    assert any("saves" in note for note in notes)
    assert go()[0].is_finished


def test_a_second_interrupt_ends_every_run_at_once_and_loses_no_outcome(
    go, when_hanging, monkeypatch, tmp_path
):
    go(cells=CELLS[:1])
    stubborn = subprocess.Popen.terminate
    monkeypatch.setattr(subprocess.Popen, "terminate", lambda self: None)  # a run that does not get to saving

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = when_hanging(twice)
    with pytest.raises(KeyboardInterrupt):
        go({"block 0": "hangs"}, workers=1)
    thread.join()
    monkeypatch.setattr(subprocess.Popen, "terminate", stubborn)
    with locked(tmp_path / "locks" / f"{CELLS[1].name}.lock") as is_free:
        assert is_free
    ended, table, _, _ = go()
    assert ended.is_finished
    assert len(table.outcomes) == 4


def test_progress_names_what_runs_and_how_much_time_is_left(go, when_hanging, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "SECONDS_BETWEEN_LINES", 0.15)

    def act():
        time.sleep(0.8)
        os.kill(os.getpid(), signal.SIGINT)

    thread = when_hanging(act)
    _, _, _, notes = go({"block 0": "hangs"}, workers=1)
    thread.join()
    lines = [note for note in notes if "waiting" in note]
    assert lines
    told = "left; main, block, seed 0 at step 0 of 4"
    assert any(line.startswith("2 waiting, about ") and line.endswith(told) for line in lines)


def test_times_are_told_in_words_that_people_use():
    assert [module._duration(seconds) for seconds in (5.0, 600.0, 36_000.0)] == ["5 s", "10 min", "10.0 h"]


def test_the_worker_is_started_alone():
    assert OneProcess().command() == [sys.executable, "-m", "attention_residuals.experiments.worker"]
    assert (OneProcess().device, OneProcess(device="cuda").device) == ("cpu", "cuda")


def test_a_lock_is_had_by_one_at_a_time_and_waits_where_it_is_told_to(tmp_path):
    path = tmp_path / "folder" / "lock"
    with locked(path) as first, locked(path) as second:
        assert (first, second) == (True, False)
    with locked(path, wait=True) as later:
        assert later
