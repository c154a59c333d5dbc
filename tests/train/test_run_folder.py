import json
import os
import sys
from pathlib import Path

import pytest
import torch
from run_checks import Killed, change_json, message, rows, stop_after
from tiny_run import NUM_STEPS, make_corpus, model_config, train_config

from attention_residuals.data import Tokenizer
from attention_residuals.errors import ConfigError
from attention_residuals.train import Saving, load_run, train
from attention_residuals.train import environment as environment_module
from attention_residuals.train.environment import describe
from attention_residuals.train.run_folder import Metrics


def test_metrics_tell_steps_tokens_losses_rates_and_times(uninterrupted):
    metrics = load_run(uninterrupted).metrics
    trained = [row for row in metrics if row["split"] == "train"]
    assert [row["step"] for row in trained] == list(range(1, NUM_STEPS + 1))
    assert [row["tokens"] for row in trained] == [96 * step for step in range(1, NUM_STEPS + 1)]
    assert [row["learning_rate"] for row in trained] == [
        train_config().learning_rate(step) for step in range(1, NUM_STEPS + 1)
    ]
    assert set(trained[0]) == {
        "split",
        "step",
        "tokens",
        "loss",
        "bits_per_byte",
        "learning_rate",
        "grad_norm",
        "tokens_per_second",
        "seconds",
    }
    assert all(row["tokens_per_second"] > 0 and row["grad_norm"] > 0 for row in trained)
    evaluated = [row for row in metrics if row["split"] == "valid"]
    assert [row["step"] for row in evaluated] == [4, 6]
    assert evaluated[-1]["loss"] < evaluated[0]["loss"] < trained[0]["loss"]


def test_a_run_can_be_read_back(uninterrupted, corpus):
    told = load_run(str(uninterrupted))
    assert told.config == train_config()
    assert told.folder == uninterrupted
    tokenizer = Tokenizer.load(uninterrupted / "tokenizer.json")
    assert tokenizer.merges == corpus.tokenizer.merges


def test_speed_counts_all_steps_since_the_row_before(go, tmp_path):
    go(saving=Saving(log_every=3))
    first, second = (row for row in load_run(tmp_path / "run").metrics if row["split"] == "train")
    elapsed = second["seconds"] - first["seconds"]
    assert second["tokens_per_second"] == pytest.approx(3 * 96 / elapsed)
    assert first["tokens_per_second"] == pytest.approx(3 * 96 / first["seconds"])


def test_a_finished_run_started_again_says_so_and_trains_nothing(run, go, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    evaluated = [row for row in rows(run) if row["split"] == "valid"]
    result = go(monitor=lambda *_: pytest.fail("a step was made"), progress=True)
    assert "is finished: all 6 steps are done" in capsys.readouterr().err
    assert (result.step, result.interrupted, result.folder) == (NUM_STEPS, False, run)
    assert (result.loss, result.bits_per_byte) == (evaluated[-1]["loss"], evaluated[-1]["bits_per_byte"])
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 4}, "another run: seed is 3 there and 4 here"),
        ({"model": model_config(mlp_width=64)}, "another run: model.mlp_width is 48 there and 64 here"),
        ({"num_steps": 7, "seed": 4}, "another run: num_steps is 6 there and 7 here"),
    ],
)
def test_a_folder_of_another_run_is_refused_and_left_alone(run, go, changes, named):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert named in message(lambda: go(**changes))
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_folder_trained_on_another_corpus_is_refused(run, tmp_path):
    (tmp_path / "more").mkdir()
    other = make_corpus(tmp_path / "more", documents=300)
    assert "corpus.sha256 is" in message(lambda: train(train_config(), other, run, progress=False))


def test_a_folder_of_something_else_is_refused(go, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    assert "holds 'thesis.tex' and no run" in message(go)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("begun", ["empty", "killed while it was made"])
def test_an_empty_or_barely_begun_folder_is_taken(go, tmp_path, begun):
    (tmp_path / "run").mkdir()
    if begun != "empty":
        (tmp_path / "run" / ".partial-config.json").write_text("{")
    assert go().step == NUM_STEPS
    assert not list((tmp_path / "run").rglob(".partial-*"))


def test_a_refused_start_leaves_no_folder_behind(corpus, tmp_path, go):
    with pytest.raises(ConfigError, match="vocab_size=300"):
        go(model=model_config(vocab_size=299))
    assert not (tmp_path / "run").exists()


def test_a_place_that_cannot_be_written_is_named(go, tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert f"{tmp_path / 'file'}" in message(lambda: go(folder=tmp_path / "file" / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".partial-metrics").mkdir()
    go(saving=Saving(every=3))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    assert f"{metrics} could not be written" in message(go)


def test_a_disk_that_fills_up_at_the_start_is_named(monkeypatch, go):
    def full(self, text, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert "config.json could not be written: [Errno 28] No space" in message(go)


def test_a_disk_that_fills_up_before_the_first_step_is_named(monkeypatch, go, tmp_path):
    monkeypatch.setattr(Path, "replace", fails_at(2, Path.replace))
    assert "environment.json could not be written: [Errno 28] No space" in message(go)


def fails_at(number, original):
    calls = []

    def call(*arguments):
        calls.append(arguments)
        if len(calls) == number:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    return call


def test_a_row_that_is_cut_short_by_a_full_disk_is_named_and_not_kept(monkeypatch, tmp_path):
    with Metrics(tmp_path) as metrics:
        monkeypatch.setattr(metrics, "_file", Half(metrics._file))
        assert "only a part of the row went through" in message(metrics.append, {"step": 1})
    with Metrics(tmp_path) as metrics:
        metrics.cut(10)
        assert metrics.rows == []
        metrics.append({"step": 2})
    assert rows(tmp_path) == [{"step": 2}]


class Half:
    """A file on a disk with room for five more bytes."""

    def __init__(self, file):
        self.file, self.close = file, file.close

    def write(self, line):
        return self.file.write(line[:5])


def test_two_processes_cannot_train_in_one_folder(run, go):
    with Metrics(run):
        assert "another process is training" in message(go)
    assert go().step == NUM_STEPS


@pytest.mark.parametrize("line", ["{}", "not json", "[1]", '{"step": "1"}'])
def test_a_damaged_row_is_named_and_nothing_is_cut(run, go, line):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    before = path.read_bytes()
    assert "metrics.jsonl, line 2" in message(go)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"train": None}, "no TrainConfig"),
        ({"train": {"type": "Cosine"}}, "no TrainConfig"),
        ({"train": {"type": "Sine"}}, "'Sine'"),
        ({"format": 2}, "format 2"),
    ],
)
def test_a_config_that_is_no_run_is_refused(run, change, named):
    change_json(run / "config.json", **change)
    assert named in message(load_run, run)


def test_a_run_without_a_row_yet_can_be_read(run):
    (run / "metrics.jsonl").unlink()
    assert load_run(run).metrics == ()


def test_the_environment_of_every_start_is_kept_without_users_or_places(go, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys,
        "argv",
        ["/home/someone/bin/attnres", "train", "--out=/home/someone/run", "--seed", "3", "~/data"],
    )
    with pytest.raises(Killed):
        go(monitor=stop_after(5))
    go()
    text = (tmp_path / "run" / "environment.json").read_text()
    starts = json.loads(text)["starts"]
    assert [start["from_step"] for start in starts] == [0, 4]
    assert starts[0]["command"] == ["attnres", "train", "--out=run", "--seed", "3", "data"]
    assert starts[0]["torch"] == torch.__version__
    assert starts[0]["threads"] == 1
    assert starts[0]["seed"] == 3
    assert starts[0]["cpu_count"] == os.cpu_count()
    assert "someone" not in text
    assert str(tmp_path) not in text


def test_a_resumed_run_says_what_may_change_its_bits(go, tmp_path, capsys):
    with pytest.raises(Killed):
        go(monitor=stop_after(5))
    path = tmp_path / "run" / "environment.json"
    path.write_text(path.read_text().replace('"threads": 1', '"threads": 8'))
    go(progress=True)
    assert "the last bits may differ, since the run began with threads 8, now 1\n" in capsys.readouterr().err


def test_places_of_every_kind_are_cut_to_their_last_part():
    cut = environment_module._without_place
    assert cut("../../someone/run") == "run"
    assert cut(r"C:\Users\someone\run") == "run"
    assert cut("runs/first") == "runs/first"
    assert cut("a=b=/c/d") == "a=b=d"


def test_the_commit_is_told_only_inside_a_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outside = describe()
    assert outside["git_commit"] is None
    assert outside["git_clean"] is None
    monkeypatch.setenv("PATH", "")
    assert describe()["git_commit"] is None


def test_a_processor_without_proc_is_named_by_the_platform(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr(environment_module.platform, "processor", lambda: "some processor")
    assert describe()["cpu"] == "some processor"
