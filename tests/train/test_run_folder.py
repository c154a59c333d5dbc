import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_checks import Killed, assert_same_run, change_json, command, message, rows, stop_after
from tiny_run import NUM_STEPS, make_corpus, model_config, train_config

from attention_residuals.data import Corpus, Tokenizer
from attention_residuals.errors import ConfigError, DataError
from attention_residuals.train import Saving, load_run, train
from attention_residuals.train import environment as environment_module
from attention_residuals.train import metrics as metrics_module
from attention_residuals.train.environment import describe
from attention_residuals.train.metrics import NO_ROWS, Metrics
from attention_residuals.train.run_folder import check_folder


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
    assert f"while writing {metrics}" in message(go)


def test_a_disk_that_fills_up_at_the_start_is_named(monkeypatch, go):
    def full(self, text, **_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    text = message(go)
    assert "[Errno 28] No space left on device while writing" in text
    assert "run/config.json\n" in text
    assert "free some space" in text


def test_a_disk_that_fills_up_before_the_first_step_is_named(monkeypatch, go, tmp_path):
    monkeypatch.setattr(Path, "replace", fails_at(2, Path.replace))
    text = message(go)
    assert "[Errno 28] No space left on device while writing" in text
    assert "run/environment.json\n" in text


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
        kept = metrics.sync()
        monkeypatch.setattr(metrics, "_file", Half(metrics._file))
        assert "only a part of the row went through" in message(metrics.append, {"step": 1})
    with Metrics(tmp_path) as metrics:
        metrics.cut(kept)
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
    with Metrics(run):  # the lock
        assert "another process is training" in message(go)
    assert go().step == NUM_STEPS


TRAINED = {
    "split": "train",
    "step": 1,
    "tokens": 96,
    "loss": 5.0,
    "bits_per_byte": None,
    "learning_rate": 0.1,
}
TRAINED |= {"grad_norm": 1.0, "tokens_per_second": 10.0, "seconds": 9.6}
VALIDATED = {"split": "valid", "step": 1, "tokens": 96, "loss": 5.0, "bits_per_byte": 4.0}
NO_ROW_AT_ALL = [
    {},
    [1],
    TRAINED | {"step": "1"},
    TRAINED | {"step": True},
    TRAINED | {"split": "test"},
    TRAINED | {"split": ["train"]},
    TRAINED | {"seconds": "9"},
    TRAINED | {"bits_per_byte": "4"},
    TRAINED | {"loss": True},
    VALIDATED | {"loss": None},
    VALIDATED | {"bits_per_byte": None},
    VALIDATED | {"loss": float("nan")},
    *(
        {name: value for name, value in TRAINED.items() if name != gone}
        for gone in ("loss", "seconds", "split")
    ),
]


@pytest.mark.parametrize(
    "line", ["not json", "[" * 100_000, *map(json.dumps, NO_ROW_AT_ALL)], ids=lambda text: text[:40]
)
def test_a_damaged_row_is_named_and_nothing_is_cut(run, go, line):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    before = path.read_bytes()
    assert "metrics.jsonl, line 2" in message(load_run, run)
    assert "are changed" in message(go)
    assert path.read_bytes() == before


def test_rows_that_are_whole_are_read(run):
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (TRAINED, VALIDATED)))
    assert load_run(run).metrics == (TRAINED, VALIDATED)


def without(number):
    return lambda lines: [*lines[:number], *lines[number + 1 :]]


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "killed"])
@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (None, "missing"),
        (lambda lines: [], "missing"),
        (lambda lines: lines[:2], "missing"),
        (without(1), ""),
        (lambda lines: [lines[0].replace(b"1", b"2", 1), *lines[1:]], "changed"),
    ],
    ids=["removed", "emptied", "cut", "a row removed", "a digit changed"],
)
def test_rows_from_before_the_checkpoint_that_are_lost_stop_the_run(run, go, finished, damage, what):
    if not finished:
        shutil.rmtree(run / "checkpoints" / "step-00000006")
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(b"".join(damage(lines)))
    before = path.read_bytes() if damage else b""
    for _ in range(2):
        text = message(go)
        assert f"rows from before the checkpoint are {what}" in text
        assert "copy the file again" in text
        assert "remove" not in text
        assert path.read_bytes() == before
    path.write_bytes(b"".join(lines))
    assert go().step == NUM_STEPS


def test_a_row_that_is_being_written_is_not_read_yet(run):
    whole = load_run(run).metrics
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"split": "train", "st')
    assert load_run(run).metrics == whole


def test_rows_of_a_file_that_cannot_be_read_are_refused(run):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert "metrics.jsonl: [Errno" in message(load_run, run)


def test_metrics_without_a_checkpoint_begin_anew(tmp_path):
    with Metrics(tmp_path) as metrics:
        metrics.append(TRAINED)
    with Metrics(tmp_path) as metrics:
        metrics.cut(NO_ROWS)
        assert metrics.sync() == NO_ROWS
    assert rows(tmp_path) == []


def test_a_disk_that_cannot_make_rows_safe_is_named(monkeypatch, tmp_path):
    def full(path):
        raise OSError(28, "No space left on device")

    with Metrics(tmp_path) as metrics:
        monkeypatch.setattr(metrics_module, "sync", full)
        assert "metrics.jsonl" in message(metrics.sync)


@pytest.mark.parametrize(
    "garbled",
    [{}, {"starts": {}}, {"starts": []}, {"beginnings": [{}]}, {"starts": [{"torch": "2"}]}, {"starts": [3]}],
)
def test_a_garbled_environment_is_named_and_left_alone(go, tmp_path, garbled):
    with pytest.raises(Killed):
        go(monitor=stop_after(5))
    path = tmp_path / "run" / "environment.json"
    path.write_text(json.dumps({"format": 1} | garbled))
    before = path.read_bytes()
    assert f"{path}, whose starts are garbled or missing" in message(go)
    assert path.read_bytes() == before


def test_of_two_processes_that_begin_in_one_new_folder_one_trains_and_one_is_told(
    corpus, tmp_path, uninterrupted
):
    folder = tmp_path / "run"
    both = [
        subprocess.Popen(command(corpus, folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [process.communicate(timeout=120)[1] for process in both]
    for process, text in zip(both, told, strict=True):
        assert process.returncode == 0 or "another process is training" in text, text
    assert any(process.returncode == 0 for process in both)
    assert_same_run(folder, uninterrupted)


def test_a_folder_that_another_process_made_its_own_meanwhile_is_left_alone(monkeypatch, go, tmp_path, run):
    def too_late(folder, ours):
        check_folder(tmp_path / "nothing there", ours)

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    monkeypatch.setattr(sys.modules["attention_residuals.train.loop"], "check_folder", too_late)
    assert "holds another run: seed is 3 there and 4 here" in message(lambda: go(seed=4))
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_folder_that_may_not_be_read_is_named(monkeypatch, go, tmp_path):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "run").mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    assert "change its permissions" in message(go)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_a_corpus_with_a_flipped_bit_is_refused_before_a_folder_is_made(tmp_path, split):
    damaged = make_corpus(tmp_path)
    path = damaged.folder / f"{split}.bin"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=f"{split}.bin has another checksum"):
        train(train_config(), Corpus.load(damaged.folder), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


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


def git(folder, *arguments):
    names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *names, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_commit_is_that_of_the_package_and_not_of_the_current_folder(tmp_path, monkeypatch):
    source = tmp_path / "ours" / "package" / "train" / "environment.py"
    source.parent.mkdir(parents=True)
    source.write_text("")
    monkeypatch.setattr(environment_module, "SOURCE", source)
    monkeypatch.setattr(environment_module, "PACKAGE", str(source.parents[1]))
    (tmp_path / "theirs").mkdir()
    for name in ("ours", "theirs"):
        git(tmp_path / name, "init", "--quiet")
        git(tmp_path / name, "commit", "--quiet", "--allow-empty", "-m", name)
    monkeypatch.chdir(tmp_path / "theirs")
    untracked = describe()  # installed inside a repository, but not a part of it
    assert (untracked["git_commit"], untracked["git_clean"]) == (None, None)
    git(tmp_path / "ours", "add", ".")
    git(tmp_path / "ours", "commit", "--quiet", "-m", "package")
    (tmp_path / "ours" / "notes").write_text("not of the package")
    tracked = describe()
    assert tracked["git_commit"] == git(tmp_path / "ours", "rev-parse", "HEAD")
    assert tracked["git_clean"]
    source.write_text("changed")
    assert not describe()["git_clean"]
    monkeypatch.setenv("PATH", "")
    assert describe()["git_commit"] is None


def test_a_processor_without_proc_is_named_by_the_platform(monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr(environment_module.platform, "processor", lambda: "some processor")
    assert describe()["cpu"] == "some processor"
