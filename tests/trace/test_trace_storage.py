"""Traces on disk: whole or not there, and nothing else is taken for one."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from attention_residuals.errors import CheckpointError
from attention_residuals.layers.residual import (
    AttnRes,
    Inkling2,
    MultiHead,
    StandardResidual,
)
from attention_residuals.models import Decoder, presets
from attention_residuals.trace import (
    Trace,
    record,
)

TOKENS = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(0))


def model_of(residual):
    model = Decoder(presets.scaled(4, vocab_size=40, residual=residual))
    for name, parameter in model.named_parameters():
        if name.endswith("pseudo_query"):
            parameter.data.normal_()
    return model


CONFIGS = {
    "standard": StandardResidual(),
    "full": AttnRes(sublayers_per_block=1),
    "block": AttnRes(sublayers_per_block=3),
    "heads": MultiHead(num_heads=2),
    "inkling2": Inkling2(sublayers_per_block=4),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return model_of(request.param)


def test_a_trace_is_not_overwritten(model, tmp_path):
    record(model, TOKENS).save(tmp_path)
    with pytest.raises(CheckpointError, match="holds a trace"):
        record(model, TOKENS).save(tmp_path)


def test_a_damaged_or_newer_trace_is_refused(model, tmp_path):
    record(model, TOKENS).save(tmp_path)
    tensors = tmp_path / "trace.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match="another checksum"):
        Trace.load(tmp_path)
    tensors.unlink()
    with pytest.raises(CheckpointError, match="no file"):
        Trace.load(tmp_path)
    tensors.write_bytes(whole)
    description = json.loads((tmp_path / "trace.json").read_text())
    (tmp_path / "trace.json").write_text(json.dumps({**description, "format": 4}))
    with pytest.raises(CheckpointError, match="update attention-residuals"):
        Trace.load(tmp_path)
    (tmp_path / "trace.json").write_text(json.dumps({**description, "format": 2}))
    with pytest.raises(CheckpointError, match="record the trace again"):
        Trace.load(tmp_path)
    del description["rule"]
    (tmp_path / "trace.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="'rule'"):
        Trace.load(tmp_path)


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_trace_with_a_flipped_bit_is_refused(tmp_path, place):
    record(model_of(StandardResidual()), TOKENS).save(tmp_path)
    path = tmp_path / "trace.safetensors"
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * place)] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="another checksum"):
        Trace.load(tmp_path)


def test_the_tensors_of_another_trace_are_refused(tmp_path):
    model = model_of(StandardResidual())
    for name, tokens in (("one", TOKENS), ("other", TOKENS.flip(1))):
        record(model, tokens).save(tmp_path / name)
    shutil.copy(tmp_path / "other" / "trace.safetensors", tmp_path / "one" / "trace.safetensors")
    with pytest.raises(CheckpointError, match="another checksum"):
        Trace.load(tmp_path / "one")


class Killed(BaseException):
    """Ends the process, as a kill would."""


@pytest.mark.parametrize("writes", [1, 2])
def test_a_trace_is_whole_or_not_there_and_can_be_saved_again(monkeypatch, tmp_path, writes):
    trace, replace, calls = record(model_of(StandardResidual()), TOKENS), Path.replace, []

    def dies(path, target):
        calls.append(target)
        if len(calls) == writes:
            raise Killed
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dies)
        with pytest.raises(Killed):
            trace.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"no file .*trace\.json"):
        Trace.load(tmp_path)
    trace.save(tmp_path)
    assert Trace.load(tmp_path) == trace
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.safetensors"]


READ = {"site": "a", "part": "in", "sources": ["a"], "same_as": [0], "writers": ["embedding"]}
GARBLED = {
    "sites": [None, 3, [], {"site": 1}, [3], [{"site": "L0.mlp"}], [READ | {"sources": "abc"}],
              [READ | {"sources": [1]}], [READ | {"site": 1}], [READ | {"sources": ["a", "b", "c"]}],
              [READ | {"same_as": [1]}], [READ | {"same_as": [-1]}], [READ | {"same_as": [True]}],
              [READ | {"writers": ["embedding", "L0.mlp"]}], [READ]],
    "token_texts": [None, "abc", [3], [["a"], ["b"]], [[1] * 7] * 2, [["a"] * 7]],
    "width": ["8", None, True],
    "rule": [None, "AttnRes", []],
    "about": [None, 3],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GARBLED for value in GARBLED[name]])
def test_a_description_of_wrong_types_is_refused(tmp_path, name, value):
    record(model_of(StandardResidual()), TOKENS).save(tmp_path)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(CheckpointError, match=r"trace\.json"):
        Trace.load(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="while writing"):
        record(model, TOKENS).save(tmp_path / "file" / "trace")
