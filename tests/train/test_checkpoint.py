import json
import shutil

import pytest
import torch
from run_checks import Killed, change_json, message, rows, run_process
from safetensors.torch import load_file
from tiny_run import NUM_STEPS, model_config, train_config

from attention_residuals.errors import NonFiniteError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import load_model
from attention_residuals.train import AdamW, Saving, load_checkpoint_model
from attention_residuals.train import checkpoint as checkpoint_module
from attention_residuals.train.checkpoint import checkpoints, newest_checkpoint, step_of

FILES = ["config.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def test_the_last_checkpoints_are_kept_and_hold_four_files(uninterrupted):
    assert [path.name for path in checkpoints(uninterrupted)] == ["step-00000004", "step-00000006"]
    for path in checkpoints(uninterrupted):
        assert sorted(file.name for file in path.iterdir()) == FILES


def test_a_checkpoint_is_a_model_folder(uninterrupted):
    newest = newest_checkpoint(uninterrupted)
    model, same = load_checkpoint_model(uninterrupted), load_model(newest)
    assert model.config == train_config().model
    assert all(map(torch.equal, model.parameters(), same.parameters()))


def test_optimizer_state_is_stored_by_the_parameters_names(uninterrupted):
    state = load_file(newest_checkpoint(uninterrupted) / "optimizer.safetensors")
    assert state["momentum_buffer/layers.1.mlp.up.weight"].shape == (48, 32)
    assert state["step/norm.gain"] == NUM_STEPS


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_newest_checkpoint_is_named_with_the_good_one_before_it(run, go, name, damage):
    older, newest = checkpoints(run)
    file = newest / name
    whole = file.read_bytes()
    file.unlink()
    if damage == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    elif damage == "flip":
        place = whole.index(b'"step": 6') + 8 if name == "state.json" else len(whole) // 2
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    for text in (message(go), message(load_checkpoint_model, run)):
        assert str(file) in text
        assert f"the newest good one is {older}" in text
        assert "move every later one" in text
        assert "remove" not in text
    shutil.rmtree(newest)
    assert go().step == NUM_STEPS


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_of_it(monkeypatch, go, tmp_path):
    def half(folder, **_):
        next(folder.iterdir()).unlink()
        raise Killed

    monkeypatch.setattr(checkpoint_module.shutil, "rmtree", half)
    with pytest.raises(Killed):
        go()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000004", "step-00000006"]
    assert all(len(list(path.iterdir())) == len(FILES) for path in checkpoints(tmp_path / "run"))


def test_without_a_good_checkpoint_the_message_says_how_to_start_again(run, go):
    for path in checkpoints(run):
        (path / "model.safetensors").write_bytes(b"")
    text = message(go)
    assert str(checkpoints(run)[-1] / "model.safetensors") in text
    assert "no good checkpoint is left: to start from the beginning, name another folder" in text
    assert "remove" not in text


def test_a_checkpoint_of_a_newer_format_is_not_read(run, go):
    change_json(checkpoints(run)[-1] / "state.json", format=99)
    text = message(go)
    assert "format 99" in text
    assert text.endswith("do: update attention-residuals")


def test_a_state_that_is_no_file_is_named_with_the_good_one_before_it(run, go):
    older, newest = checkpoints(run)
    (newest / "state.json").unlink()
    (newest / "state.json").mkdir()
    text = message(go)
    assert f"{newest / 'state.json'}: [Errno" in text
    assert f"the newest good one is {older}" in text


@pytest.mark.parametrize("name", ["step", "sha256", "config", "metrics"])
def test_a_state_that_lacks_a_part_is_named(run, go, name):
    path = checkpoints(run)[-1] / "state.json"
    state = json.loads(path.read_text())
    del state[name]
    path.write_text(json.dumps(state))
    assert f"{path}, which garbles {name}" in message(go)


GARBLED = [{"step": 5}, {"step": None}, {"step": "6"}, {"sha256": []}, {"config": 3}, {"format": -5}]
GARBLED += [{"format": True}, {"metrics": {}}, {"metrics": {"bytes": "9", "sha256": "0"}}]
GARBLED += [{"metrics": {"bytes": -1, "sha256": "0"}}, {"metrics": {"bytes": 1, "sha256": 0}}]


@pytest.mark.parametrize("change", GARBLED)
def test_a_changed_state_is_noticed(run, change):
    change_json(checkpoints(run)[-1] / "state.json", **change)
    assert "state.json" in message(load_checkpoint_model, run)


def test_a_checkpoint_of_another_run_is_refused_by_its_first_difference(run, go, tmp_path):
    go(folder=tmp_path / "other", seed=8)
    shutil.rmtree(checkpoints(run)[-1])
    shutil.copytree(checkpoints(tmp_path / "other")[-1], run / "checkpoints" / "step-00000006")
    text = message(go)
    assert "of another config: seed is 8 there and 3 here" in text
    assert text.endswith("do: correct the config, or name another folder")


def test_a_folder_without_a_checkpoint_has_no_model(tmp_path):
    assert "without a checkpoint" in message(load_checkpoint_model, tmp_path)


def test_only_folders_named_for_a_step_are_checkpoints(run):
    (run / "checkpoints" / "step-best").mkdir()
    (run / "checkpoints" / ".partial-step-00000008").mkdir()
    assert [path.name for path in checkpoints(run)] == ["step-00000004", "step-00000006"]


def test_the_step_of_a_checkpoint_is_read_from_its_name_however_long(run):
    assert [step_of(path) for path in checkpoints(run)] == [4, 6]
    long = run / "checkpoints" / "step-1234567890"
    long.mkdir()
    assert step_of(checkpoints(run)[-1]) == 1234567890


def test_a_full_disk_leaves_the_checkpoint_before_it_and_names_it(corpus, run, go, tmp_path):
    shutil.rmtree(checkpoints(run)[-1])
    (older,) = checkpoints(run)
    ended = run_process(corpus, run, "fill_the_disk")
    assert ended.returncode == 1
    assert "CheckpointError" in ended.stderr
    assert "File too large" in ended.stderr
    assert "free some space" in ended.stderr
    assert f"the last good checkpoint is {older}" in ended.stderr
    assert [path.name for path in (run / "checkpoints").iterdir()] == [older.name]
    assert go().step == NUM_STEPS


def test_a_disk_that_fails_the_first_checkpoint_says_that_there_is_none(monkeypatch, go):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    text = message(go)
    assert "No space left on device while writing" in text
    assert "checkpoints/step-00000002, at step 2" in text
    assert "no checkpoint was written yet" in text


def poison(at_step):
    def monitor(step, model):
        if step == at_step:
            model.layers[1].mlp.up.weight.data[3, 5] = float("nan")

    return monitor


@pytest.mark.parametrize(
    ("at_step", "said"),
    [(3, "at step 4"), (4, "at step 4"), (5, "at step 6")],
    ids=["before a step", "before an evaluation", "before the last step"],
)
def test_numbers_that_are_not_finite_stop_the_run_before_they_are_saved(go, tmp_path, at_step, said):
    with pytest.raises(NonFiniteError) as caught:
        go(monitor=poison(at_step))
    good = f"step-0000000{2 if at_step < 5 else 4}"
    assert said in str(caught.value)
    assert "with learning rate 0.00" in str(caught.value)
    assert f"the last good checkpoint is {tmp_path / 'run' / 'checkpoints' / good}" in str(caught.value)
    assert newest_checkpoint(tmp_path / "run").name == good
    assert all(value == value for row in rows(tmp_path / "run") for value in row.values())
    assert go().step == NUM_STEPS


def test_a_validation_loss_that_is_not_finite_stops_the_run(go):
    with pytest.raises(NonFiniteError, match="validation loss of nan, at step 4"):
        go(model=model_config(StandardResidual()), monitor=poison(4))


def test_a_broken_weight_is_not_saved_even_where_no_step_or_evaluation_meets_it(go, tmp_path):
    quiet = Saving(every=2, evaluate_every=100)
    with pytest.raises(NonFiniteError, match=r"a weight of layers\.1\.mlp\.up\.weight"):
        go(saving=quiet, monitor=poison(2))
    assert not checkpoints(tmp_path / "run")


@pytest.mark.parametrize("residual", ["standard", "attnres"])
def test_a_learning_rate_that_explodes_stops_the_run(go, residual):
    rule = StandardResidual() if residual == "standard" else AttnRes(sublayers_per_block=2)
    with pytest.raises(NonFiniteError, match=r"learning rate (2|3|5)\.?\d*e\+"):
        go(model=model_config(rule), optimizer=AdamW(learning_rate=3e30, clip_norm=None))
