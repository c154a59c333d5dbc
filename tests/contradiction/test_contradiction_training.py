"""Training goes on where it stopped and is shared by calls, and only a study that can be run is taken."""

from dataclasses import replace

import pytest
from contradiction_fixtures import SMALL

from attention_residuals.configs import encode
from attention_residuals.contradiction import models, run_study, study_of
from attention_residuals.contradiction.models import model_of
from attention_residuals.durable import locked
from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.train import Saving
from attention_residuals.train import trainer as trainer_module


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
