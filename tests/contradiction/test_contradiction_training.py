"""Training goes on where it stopped and is shared by calls, and only a study that can be run is taken."""

import shutil
from dataclasses import replace

import pytest
import torch
from contradiction_fixtures import SMALL

from attention_residuals.configs import encode
from attention_residuals.contradiction import models, run_study, study_of
from attention_residuals.contradiction.models import model_of
from attention_residuals.durable import locked
from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.train import Saving
from attention_residuals.train import trainer as trainer_module


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    assert models.train_models(SMALL, folder, progress=False)
    return folder


def test_training_that_was_killed_goes_on(tmp_path, monkeypatch):
    calls = []
    step = trainer_module.Trainer.step

    def killed(self, number):
        calls.append(number)
        if len(calls) == 5:  # in the second model
            raise KeyboardInterrupt
        return step(self, number)

    monkeypatch.setattr(trainer_module.Trainer, "step", killed)
    often = Saving(every=1, evaluate_every=3, evaluate_batches=1, log_every=1)
    with pytest.raises(KeyboardInterrupt):
        models.train_models(SMALL, tmp_path, progress=False, saving=often)
    with pytest.raises(CheckpointError, match="goes on where it stopped"):
        model_of(SMALL, tmp_path, "full", 0)
    assert models.train_models(SMALL, tmp_path, progress=False, saving=often)
    assert calls[5] == 2  # the step that was lost, and none that was saved
    assert len(calls) == 5 + 2 + 3
    assert model_of(SMALL, tmp_path, "standard", 0) is not None


def test_calls_at_the_same_time_share_the_models(tmp_path, capfd):
    few = Saving(every=9, evaluate_every=9, evaluate_batches=1, log_every=1)
    with locked(tmp_path / "locks" / "full-0.lock"):  # as another call that trains it
        assert not models.train_models(SMALL, tmp_path, saving=few)
        assert sorted(one.name for one in (tmp_path / "models").iterdir()) == ["block-0", "standard-0"]
    assert "another process trains full-0; call again when it is done" in capfd.readouterr().err
    assert models.train_models(SMALL, tmp_path, progress=False, saving=few)
    assert model_of(SMALL, tmp_path, "full", 0) is not None


def test_a_model_that_lies_there_is_not_trained_again_and_another_studys_is_refused(trained, tmp_path):
    shutil.copytree(trained / "trained", tmp_path / "trained")
    assert models.train_models(SMALL, tmp_path, progress=False)
    assert not (tmp_path / "models").exists()
    taken, own = (dict(model_of(SMALL, place, "full", 0).named_parameters()) for place in (tmp_path, trained))
    assert all(torch.equal(taken[name], own[name]) for name in own)
    longer = replace(SMALL, train=replace(SMALL.train, num_steps=4))
    with pytest.raises(CheckpointError, match=r"train\.num_steps is 3 there and 4 here"):
        models.train_models(longer, tmp_path, progress=False)


def test_a_model_that_was_half_kept_is_kept_again(trained, tmp_path):
    shutil.copytree(trained / "models", tmp_path / "models")
    shutil.copytree(trained / "corpus", tmp_path / "corpus")
    (tmp_path / "trained" / ".partial-block-0").mkdir(parents=True)
    (tmp_path / "trained" / ".partial-block-0" / "model.safetensors").write_bytes(b"half")
    assert models.train_models(SMALL, tmp_path, progress=False)
    assert sorted(one.name for one in (tmp_path / "trained").iterdir()) == ["block-0", "full-0", "standard-0"]


def test_progress_says_which_model_is_trained_and_when_all_are(trained, tmp_path, capfd):
    shutil.copytree(trained / "trained", tmp_path / "trained")
    shutil.rmtree(tmp_path / "trained" / "standard-0")
    for told in ("model 1 of 1: standard, seed 0", "all 3 models are trained"):
        run_study(SMALL, tmp_path, tmp_path / "none.md", stage="train")
        assert told in capfd.readouterr().err


def test_a_signal_ends_the_command_and_nothing_else(tmp_path, monkeypatch):
    stopped = type("Stopped", (), {"interrupted": True})
    monkeypatch.setattr(models, "train", lambda *_, **__: stopped)
    assert not run_study(SMALL, tmp_path, tmp_path / "none.md", progress=False)


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": ()},
        {"seeds": (1, 1)},
        {"num_steps": 2},
        {"causal_items": 3},
        {"num_draws": 0},
        {"train": SMALL.train_config("full", 0)},
        {"train": SMALL.train_config("standard", 0)},
    ],
)
def test_a_study_that_cannot_be_run_is_refused(change):
    with pytest.raises(ConfigError):
        replace(SMALL, **change)


def test_what_is_no_study_is_refused():
    with pytest.raises(ConfigError, match="a Study"):
        study_of(encode(SMALL.documents))
