"""Killed and started again, a run ends with the same bits."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from run_checks import Killed, assert_same_run, rows, run_process, stop_after
from tiny_run import NUM_STEPS, model_config

from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.train import AdamW, Saving
from attention_residuals.train import checkpoint as checkpoint_module


@pytest.mark.parametrize(
    ("death", "steps_before", "left"),
    [
        ("die_inside_the_update", 4, ["step-00000002", "step-00000004"]),
        ("die_inside_the_checkpoint", 4, [".partial-step-00000004", "step-00000002"]),
        ("die_before_the_rename", 4, [".partial-step-00000004", "step-00000002"]),
    ],
)
def test_a_killed_process_started_again_ends_with_the_same_bits(
    corpus, uninterrupted, tmp_path, go, death, steps_before, left
):
    folder = tmp_path / "run"
    killed = run_process(corpus, folder, death)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert killed.stdout.split() == [str(step) for step in range(1, steps_before + 1)]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == left
    if death == "die_inside_the_update":
        again = run_process(corpus, folder)
        assert again.returncode == 0, again.stderr
        assert again.stdout.split() == ["5", "6", "done", "6"]
        assert again.stderr == "going on from step 4\n"
    else:
        assert go().step == NUM_STEPS
    assert_same_run(folder, uninterrupted)


def dying(monkeypatch, owner, name, number):
    """Makes the n-th call of a function the last thing that happens."""
    original, calls = getattr(owner, name), [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] == number:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


@pytest.mark.parametrize(
    ("owner", "name", "stride"),
    # A checkpoint takes 7 of fsync, so that every third still meets each of them.
    [(os, "fsync", 3), (Path, "rename", 1), (Path, "replace", 1), (checkpoint_module.shutil, "rmtree", 1)],
    ids=["fsync", "rename", "replace", "rmtree"],
)
def test_no_moment_of_writing_is_a_bad_moment_to_be_killed(
    monkeypatch, tmp_path, uninterrupted, go, owner, name, stride
):
    number, finished = 1 - stride, False
    while not finished:
        number += stride
        folder = tmp_path / f"{name}-{number}"
        with monkeypatch.context() as patch:
            calls = dying(patch, owner, name, number)
            with contextlib.suppress(Killed):
                go(folder=folder)
            finished = calls[0] < number
        go(folder=folder)
        assert_same_run(folder, uninterrupted)
    assert number > 1


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs the names of open files")
def test_what_a_checkpoint_is_made_of_is_safe_before_it_gets_its_name(monkeypatch, tmp_path, go):
    events, fsync, rename = [], os.fsync, Path.rename

    def watched_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def watched_rename(path, target):
        events.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    go(num_steps=2)
    place = events.index(".partial-step-00000002 -> step-00000002")
    assert set(events[place - 6 : place]) == {
        "metrics.jsonl",
        "config.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        ".partial-step-00000002",
    }
    assert (events[place - 6], events[place - 1]) == ("metrics.jsonl", ".partial-step-00000002")
    assert events[place + 1 :] == ["checkpoints"]


def test_a_run_killed_in_every_step_ends_with_the_same_bits(tmp_path, uninterrupted, go):
    def monitor(step, model):
        if step not in seen:
            seen.add(step)
            raise Killed

    seen = set()
    for _ in range(NUM_STEPS):
        with pytest.raises(Killed):
            go(
                saving=Saving(every=1, keep=1, evaluate_every=4, evaluate_batches=2, log_every=1),
                monitor=monitor,
            )
    go(saving=Saving(every=1, keep=1, evaluate_every=4, evaluate_batches=2, log_every=1))
    assert_same_run(tmp_path / "run", uninterrupted)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": AdamW(), "model": model_config(StandardResidual())},
        {"optimizer": AdamW(), "model": model_config(AttnRes(sublayers_per_block=1), tied=False)},
        {"precision": "bfloat16", "cross_documents": True},
        {"checkpoint_activations": True, "micro_batch_size": None},
    ],
    ids=["adamw-standard", "adamw-full-untied", "bfloat16-cross", "checkpointed"],
)
def test_every_kind_of_run_resumes_to_the_same_bits(tmp_path, go, changes):
    go(folder=tmp_path / "straight", **changes)
    with pytest.raises(Killed):
        go(monitor=stop_after(5), **changes)
    go(**changes)
    assert_same_run(tmp_path / "run", tmp_path / "straight")


def test_housekeeping_changes_no_weight(tmp_path, uninterrupted, go):
    go(saving=Saving(every=5, keep=1, evaluate_every=1, evaluate_batches=1, log_every=3))
    last = f"checkpoints/step-{NUM_STEPS:08d}/model.safetensors"
    assert (tmp_path / "run" / last).read_bytes() == (uninterrupted / last).read_bytes()
    steps = [(row["split"], row["step"]) for row in rows(tmp_path / "run") if row["split"] == "train"]
    assert steps == [("train", 3), ("train", 6)]


def test_another_seed_gives_another_run(tmp_path, uninterrupted, go):
    go(seed=4)
    assert rows(tmp_path / "run")[0]["loss"] != rows(uninterrupted)[0]["loss"]


def test_a_run_does_not_depend_on_the_global_random_state_nor_change_it(tmp_path, uninterrupted, go):
    torch.manual_seed(77)
    before = torch.get_rng_state()
    go()
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert_same_run(tmp_path / "run", uninterrupted)


def test_resumed_rows_follow_the_earlier_ones_and_time_goes_on(tmp_path, go):
    with pytest.raises(Killed):
        go(monitor=stop_after(5))
    path = tmp_path / "run" / "metrics.jsonl"
    before = path.read_text()
    path.write_text(before + '{"split": "train", "st')
    go()
    after = path.read_text()
    kept = [line for line in before.splitlines() if json.loads(line)["step"] <= 4]
    assert after.splitlines()[: len(kept)] == kept
    seconds = [json.loads(line)["seconds"] for line in after.splitlines() if "seconds" in json.loads(line)]
    assert seconds == sorted(seconds)
