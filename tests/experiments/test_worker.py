"""The worker: one run, trained, measured, and told in the file whatever became of it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments.made_up import cell, small_corpus

from attention_residuals.configs import encode
from attention_residuals.durable import locked
from attention_residuals.errors import CheckpointError, NonFiniteError
from attention_residuals.experiments import Results
from attention_residuals.experiments import worker as module
from attention_residuals.experiments.cell import digest_of
from attention_residuals.experiments.cost import training_flops
from attention_residuals.experiments.measures import Dynamics, Removal
from attention_residuals.experiments.worker import HELD, STOPPED, read_cell, run_folder, work, write_cell
from attention_residuals.train import Muon, load_checkpoint_model, load_run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return small_corpus(tmp_path_factory.mktemp("texts") / "corpus")


@pytest.fixture
def do(tmp_path, corpus):
    def call(one, *, again=False):
        write_cell(tmp_path, one, corpus.folder)
        code = work(tmp_path, tmp_path / "results.csv", one.name, again=again)
        return code, Results(tmp_path / "results.csv").read().outcomes.get(one.key)

    return call


def test_an_outcome_holds_what_was_trained_what_it_cost_and_what_came_out(do, tmp_path, corpus):
    one = cell()
    code, outcome = do(one)
    assert code == 0
    assert outcome.is_done
    assert outcome.config == digest_of(one, corpus)
    run = load_run(run_folder(tmp_path, one))
    assert run.config == one.train
    valid = {row["step"]: row["loss"] for row in run.metrics if row["split"] == "valid"}
    assert outcome.series("validation loss") == valid
    assert set(valid) == {2, 4}
    model = load_checkpoint_model(run.folder)
    assert outcome.value("parameters") == sum(p.numel() for p in model.parameters())
    assert outcome.value("parameters of the rule") == sum(p.numel() for p in model.residual.parameters()) > 0
    assert outcome.value("training FLOP") == training_flops(one.train)
    assert outcome.value("training tokens") == 4 * 2 * 48


def test_a_finished_run_is_not_repeated(do, tmp_path, monkeypatch):
    one = cell()
    do(one)
    before = (tmp_path / "results.csv").read_bytes()
    monkeypatch.setattr(module, "do", None)
    assert do(one)[0] == 0
    assert (tmp_path / "results.csv").read_bytes() == before


def test_a_run_that_another_process_has_is_not_touched(do, tmp_path):
    one = cell()
    with locked(tmp_path / "locks" / f"{one.name}.lock"):
        assert do(one) == (HELD, None)
    assert not run_folder(tmp_path, one).exists()


def test_a_run_that_was_stopped_has_no_outcome_and_goes_on_to_the_same_bits(
    do, tmp_path, corpus, monkeypatch
):
    one, train = cell(num_steps=6), module.train

    def stopped(*args, **options):
        def monitor(step, model):
            if step == 3:
                signal.raise_signal(signal.SIGTERM)

        return train(*args, **options, monitor=monitor)

    with monkeypatch.context() as patch:
        patch.setattr(module, "train", stopped)
        assert do(one) == (STOPPED, None)
    _, resumed = do(one)
    other = tmp_path / "other"
    write_cell(other, one, corpus.folder)
    work(other, other / "results.csv", one.name)
    whole = Results(other / "results.csv").read().outcomes[one.key]
    assert resumed.series("validation loss") == whole.series("validation loss")
    for name, weight in load_checkpoint_model(run_folder(tmp_path, one)).state_dict().items():
        assert torch.equal(weight, load_checkpoint_model(run_folder(other, one)).state_dict()[name])


def test_a_run_that_diverges_says_so_and_where_and_is_done_once_unless_asked(do, tmp_path):
    one = cell("standard", num_steps=30, optimizer=Muon(learning_rate=1e30))
    code, outcome = do(one)
    assert code == 0
    assert outcome.status.startswith("diverged: ")
    assert "at step" in outcome.status
    assert not outcome.numbers
    rows = (tmp_path / "results.csv").read_bytes()
    assert do(one)[0] == 0
    assert (
        tmp_path / "results.csv"
    ).read_bytes() == rows  # as another call sends it that had not seen it end
    do(one, again=True)
    assert len((tmp_path / "results.csv").read_bytes()) > len(rows)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
    ],
)
def test_a_run_without_enough_memory_says_so(do, monkeypatch, error):
    def fails(*args, **options):
        raise error

    monkeypatch.setattr(module, "train", fails)
    code, outcome = do(cell())
    assert code == 0
    assert outcome.status.startswith("out of memory: ")


def test_numbers_that_break_only_in_the_measuring_are_no_half_results(do, monkeypatch):
    def fails(self, run):
        yield module.Number("half", 1.0)
        raise NonFiniteError(got="nan", expected="numbers", do="nothing")

    monkeypatch.setattr(Dynamics, "numbers", fails)
    _, outcome = do(cell(measure=Dynamics()))
    assert (outcome.status, outcome.numbers) == ("diverged: nan", ())


@pytest.mark.parametrize(
    "error", [RuntimeError("a shape does not fit"), CheckpointError(got="", expected="", do="")]
)
def test_an_error_that_says_nothing_of_the_run_is_no_outcome(do, monkeypatch, tmp_path, error):
    def fails(*args, **options):
        raise error

    monkeypatch.setattr(module, "train", fails)
    with pytest.raises(type(error)):
        do(cell())
    assert not (tmp_path / "results.csv").exists()


def test_a_torn_file_is_repaired_by_the_next_outcome(do, tmp_path, capsys):
    do(cell())
    path = tmp_path / "results.csv"
    path.write_bytes(path.read_bytes()[:-5])
    _, outcome = do(cell("standard"))
    assert outcome.is_done
    assert "cut off" in capsys.readouterr().out
    assert len(Results(path).read().outcomes) == 1


def test_a_cell_is_read_as_it_was_written(tmp_path, corpus):
    one = cell(measure=Removal(counts=(1, 2)), setting="rate 0.004: long/short")
    write_cell(tmp_path, one, corpus.folder)
    assert read_cell(tmp_path, one.name) == (one, corpus.folder, "cpu")
    path = tmp_path / "cells" / f"{one.name}.json"
    path.write_text(json.dumps({"format": 1, "corpus": "x", "cell": encode(one.train)}))
    with pytest.raises(CheckpointError, match="without a cell"):
        read_cell(tmp_path, one.name)


def test_whatever_decides_a_run_decides_its_digest(corpus, tmp_path_factory):
    one = cell()
    others = [
        cell(seed=1),
        cell("standard"),
        cell(num_steps=5),
        cell(measure=Dynamics()),
        replace(one, setting="x"),
    ]
    digests = {digest_of(other, corpus) for other in (one, *others)}
    assert len(digests) == 6
    assert digest_of(cell(), corpus) in digests


def test_names_of_files_differ_where_keys_do():
    cells = [
        cell(setting=setting, stage=stage) for setting in ("a b", "a-b", "A b", "") for stage in ("m", "a")
    ]
    assert len({one.name for one in cells}) == len(cells)
    assert all(set(one.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for one in cells)


def test_the_process_works_and_ends_by_itself_when_nobody_waits_for_it_any_more(tmp_path, corpus):
    one = cell(num_steps=2000)
    write_cell(tmp_path, one, corpus.folder)
    command = [sys.executable, "-m", module.__name__, str(tmp_path), str(tmp_path / "results.csv"), one.name]
    environment = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    process.stdin.close()  # as when the queue is killed
    assert process.wait(timeout=300) in (STOPPED, -signal.SIGTERM)
    with locked(tmp_path / "locks" / f"{one.name}.lock") as is_free:
        assert is_free
    assert not (tmp_path / "results.csv").exists()
