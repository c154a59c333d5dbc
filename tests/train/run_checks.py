"""What tests of runs share: how a run ends early, and what makes two runs the same."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import NUM_STEPS

from attention_residuals.errors import CheckpointError

WALL_CLOCK = {"seconds", "tokens_per_second"}


def rows(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(line).items() if name not in WALL_CLOCK} for line in lines
    ]


def assert_same_run(folder, other):
    assert rows(folder) == rows(other)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (
            load_file(each / "checkpoints" / f"step-{NUM_STEPS:08d}" / name) for each in (folder, other)
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    for each in (folder, other):
        assert sorted(path.name for path in each.iterdir()) == [
            "checkpoints",
            "config.json",
            "environment.json",
            "metrics.jsonl",
            "tokenizer.json",
        ]
    assert not list(folder.rglob(".partial-*"))


def command(corpus, folder, death="nothing", kind="tiny"):
    """The command line of a run in a process of its own."""
    script = Path(__file__).with_name("tiny_run.py")
    return [sys.executable, str(script), str(corpus.folder), str(folder), death, kind]


def run_process(*arguments):
    """Runs such a process to its end."""
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False)


class Killed(BaseException):
    """Ends the run at once, as a kill would, where no process is to be spent on it."""


def stop_after(stopping_step):
    def monitor(step, model):
        if step == stopping_step:
            raise Killed

    return monitor


def message(function, *arguments):
    with pytest.raises(CheckpointError) as caught:
        function(*arguments)
    return str(caught.value)


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
