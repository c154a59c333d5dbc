import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention_residuals.errors import CheckpointError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import Decoder, load_model, presets, save_model
from attention_residuals.models.weights import load_tensors

CONFIG = presets.scaled(2, vocab_size=30)


@pytest.fixture
def saved(tmp_path):
    save_model(Decoder(CONFIG), tmp_path / "model")
    return tmp_path / "model"


def change(path, edit):
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "residual", [StandardResidual(), AttnRes(sublayers_per_block=3)], ids=["standard", "block"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_comes_back_with_the_same_bits(tmp_path, tied, residual, dtype):
    model = Decoder(replace(CONFIG, tied=tied, residual=residual)).to(dtype)
    save_model(model, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
        assert loaded.state_dict()[name].dtype == dtype
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(tokens), model(tokens))


def test_a_model_is_not_overwritten(saved):
    with pytest.raises(CheckpointError, match="exists"):
        save_model(Decoder(CONFIG), saved)


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no file .*config\.json"):
        load_model(tmp_path)


def test_missing_weights_are_named(saved):
    (saved / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no file .*model\.safetensors"):
        load_model(saved)


def test_truncated_weights_are_refused(saved):
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match="another checksum"):
        load_model(saved)


def test_a_file_that_is_no_safetensors_is_refused_even_with_its_checksum(saved):
    (saved / "model.safetensors").write_bytes(b"nonsense")
    change(saved / "config.json", lambda data: data.update(sha256=hashlib.sha256(b"nonsense").hexdigest()))
    with pytest.raises(CheckpointError, match="a safetensors file"):
        load_model(saved)


def test_a_newer_format_is_refused(saved):
    change(saved / "config.json", lambda data: data.update(format=2))
    with pytest.raises(CheckpointError, match="update attention-residuals"):
        load_model(saved)


DAMAGED = [
    "",
    "{",
    "[1]",
    '{"no": "format"}',
    '{"format": -5}',
    '{"format": 0}',
    '{"format": true}',
    "[" * 99_999,
]


@pytest.mark.parametrize("text", DAMAGED, ids=lambda text: text[:20])
def test_a_damaged_description_is_refused(saved, text):
    (saved / "config.json").write_text(text)
    with pytest.raises(CheckpointError):
        load_model(saved)


def test_weights_of_another_config_are_refused_by_the_first_tensor_that_does_not_fit(saved):
    change(saved / "config.json", lambda data: data["model"].update(num_layers=3))
    with pytest.raises(CheckpointError, match=r"the first is layers\.2"):
        load_model(saved)
    change(saved / "config.json", lambda data: data["model"].update(num_layers=2, vocab_size=31))
    with pytest.raises(CheckpointError, match=r"1 tensors .* embedding\.weight"):
        load_model(saved)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda model: model.update(widht=3), "did you mean 'width'"),
        (lambda model: model.update(width="64"), "width='64'"),
        (lambda model: model.update(width=True), "width=True"),
        (lambda model: model.update(tied=1), "tied=1"),
        (lambda model: model.update(norm_eps="small"), "norm_eps='small'"),
        (lambda model: model.pop("width"), "without width"),
        (lambda model: model["residual"].update(type="AttnRez"), "did you mean 'AttnRes'"),
        (lambda model: model["residual"].update(source_dtype="float16"), "source_dtype='float16'"),
        (lambda model: model.update(residual=None), "residual=None"),
        (lambda model: model["residual"].update(sublayers_per_block=0), "sublayers_per_block=0"),
    ],
)
def test_a_config_with_what_it_must_not_hold_is_refused(saved, edit, message):
    change(saved / "config.json", lambda data: edit(data["model"]))
    with pytest.raises(CheckpointError, match=message):
        load_model(saved)


def test_a_description_of_something_else_is_refused(saved):
    change(saved / "config.json", lambda data: data.update(model={"type": "StandardResidual"}))
    with pytest.raises(CheckpointError, match="without a model's config"):
        load_model(saved)


@pytest.mark.parametrize("kind", ["a folder", "below a file", "forbidden"])
def test_a_description_that_cannot_be_read_is_named(saved, monkeypatch, kind):
    path = saved / "config.json"
    if kind == "a folder":
        path.unlink()
        path.mkdir()
    elif kind == "below a file":
        saved = path
    else:
        monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(CheckpointError, match=r"config\.json.*: \[Errno"):
        load_model(saved)


def test_weights_that_cannot_be_read_are_named(saved, monkeypatch):
    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(CheckpointError, match=r"Permission denied"):
        load_tensors(saved / "model.safetensors", sha256_expected="0")


def forbidden(*_, **__):
    raise PermissionError(13, "Permission denied")


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="while writing"):
        save_model(Decoder(CONFIG), tmp_path / "file" / "model")
