import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from attention_residuals.errors import CheckpointError
from attention_residuals.models.formats.checkpoint import (
    StoredTensor,
    read_checkpoint,
    refuse_own_code,
    write_checkpoint,
)

CONFIG = {"model_type": "toy", "width": 3, "name": "Größe"}
TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "a.bias": torch.tensor([1.0, -2.0, float("nan")], dtype=torch.bfloat16),
    "scale": torch.tensor(0.5, dtype=torch.float64),
    "half": torch.ones(3, dtype=torch.float16),
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "toy", config=CONFIG, tensors=TENSORS)
    return tmp_path / "toy"


@pytest.fixture
def sharded(tmp_path):
    """Two shards and their index."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    for file, inside in shards.items():
        save_file({name: TENSORS[name] for name in inside}, tmp_path / file)
    weight_map = {name: file for file, inside in shards.items() for name in inside}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return tmp_path


def edit_index(folder, edit):
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def same_bits(one, other):
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    )


def refused(folder, *parts, claims=None):
    """Checks that reading, or loading all, fails with every one of these parts in the message."""
    with pytest.raises(CheckpointError) as raised:
        read_checkpoint(folder).load(SHAPES if claims is None else claims)
    for part in parts:
        assert part in str(raised.value)


def test_what_is_written_comes_back_bit_for_bit(folder):
    checkpoint = read_checkpoint(folder)
    assert checkpoint.config == CONFIG
    loaded = checkpoint.load(SHAPES)
    assert loaded.keys() == TENSORS.keys()
    assert all(same_bits(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_what_is_written_says_that_it_is_pytorchs_as_transformers_wants(folder):
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensors_that_are_views_are_written_as_they_look(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    write_checkpoint(tmp_path, config={}, tensors={"turned": base.T, "tail": base[1:].requires_grad_()})
    loaded = read_checkpoint(tmp_path).load({"turned": (4, 3), "tail": (2, 4)})
    assert torch.equal(loaded["turned"], base.T)
    assert torch.equal(loaded["tail"], base[1:])


def test_shards_are_read_as_one(sharded):
    loaded = read_checkpoint(sharded).load(SHAPES)
    assert all(same_bits(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_shards_may_be_links_to_elsewhere_as_in_a_download_cache(sharded, tmp_path_factory):
    blob = tmp_path_factory.mktemp("blobs") / "0123"
    shard = sharded / "model-00001-of-00002.safetensors"
    shard.rename(blob)
    shard.symlink_to(blob)
    assert read_checkpoint(sharded).load(SHAPES).keys() == TENSORS.keys()


def test_names_shapes_and_dtypes_are_known_before_any_data_is_read(folder):
    weights = folder / "model.safetensors"
    checkpoint = read_checkpoint(folder)
    assert checkpoint.tensors["a.bias"] == StoredTensor((3,), "BF16", weights)
    assert checkpoint.tensors["scale"].shape == ()
    weights.unlink()
    assert set(checkpoint.tensors) == set(TENSORS)


def test_a_part_is_claimed_and_the_rest_is_named(sharded):
    checkpoint = read_checkpoint(sharded)
    (sharded / "model-00002-of-00002.safetensors").unlink()  # Whose data nobody claims.
    part = checkpoint.load_part({"a.weight": (2, 3)})
    assert torch.equal(part["a.weight"], TENSORS["a.weight"])
    assert list(part) == ["a.weight"]
    assert checkpoint.unclaimed(part) == ("a.bias", "half", "scale")


@given(st.sets(st.sampled_from(sorted(TENSORS))))
def test_claims_and_the_unclaimed_are_all_there_is(tmp_path_factory, claimed):
    folder = tmp_path_factory.mktemp("toy") / "checkpoint"
    write_checkpoint(folder, config=CONFIG, tensors=TENSORS)
    checkpoint, claims = read_checkpoint(folder), {name: SHAPES[name] for name in claimed}
    assert set(checkpoint.load_part(claims)) | set(checkpoint.unclaimed(claims)) == set(TENSORS)
    if claimed == set(TENSORS):
        assert checkpoint.load(claims).keys() == claimed
    else:
        with pytest.raises(CheckpointError, match="claims"):
            checkpoint.load(claims)


def test_an_unclaimed_tensor_is_named(folder):
    refused(folder, "a.bias and 1 more", claims={"a.weight": (2, 3), "half": (3,)})
    refused(folder, "scale that no part", claims={name: SHAPES[name] for name in SHAPES if name != "scale"})


def test_a_missing_tensor_is_named_with_what_it_may_be_called(folder):
    claims = {name.replace("a.weight", "b.weight"): shape for name, shape in SHAPES.items()}
    refused(folder, "without b.weight", "of shape [2, 3]", "did you mean 'a.weight'", claims=claims)


def test_a_missing_tensor_that_nothing_resembles_is_named_alone(folder):
    refused(folder, "without other and 1 more", "download is complete", claims={"other": (9,), "z": (8,)})


@pytest.mark.parametrize("method", ["load", "load_part"])
def test_a_tensor_of_another_shape_is_named_with_both(folder, method):
    with pytest.raises(CheckpointError, match=r"a\.weight is F32 of shape \[2, 3\][\s\S]*shape \[3, 2\]"):
        getattr(read_checkpoint(folder), method)({**SHAPES, "a.weight": (3, 2)})


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_only_plain_floating_point_is_loaded(tmp_path, dtype):
    write_checkpoint(tmp_path, config={}, tensors={"w": torch.ones(2).to(dtype)})
    refused(tmp_path, "w is ", "stored as F64, F32, F16 or BF16", claims={"w": (2,)})


def test_nothing_is_read_when_one_claim_fails(folder, monkeypatch):
    checkpoint = read_checkpoint(folder)
    monkeypatch.setattr(type(checkpoint), "_read", lambda *args: pytest.fail("data was read"))
    with pytest.raises(CheckpointError):
        checkpoint.load({**SHAPES, "half": (4,)})


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt"])
def test_a_pickle_is_named_and_not_opened(tmp_path, suffix):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / f"pytorch_model{suffix}").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    refused(tmp_path, f"pytorch_model{suffix}", "never opened", "safetensors")


def test_a_pickle_beside_safetensors_does_no_harm(folder):
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    assert read_checkpoint(folder).load(SHAPES).keys() == TENSORS.keys()


def test_a_folder_without_weights_or_config_says_so(tmp_path):
    refused(tmp_path, "no file", "config.json")
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no weights", "model.safetensors")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[1]", "list"),
        ("null", "NoneType"),
        ('{"a": 1', "config.json"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' stands there twice"),
        ("[" * 100_000, "config.json"),
        ("\udcff", "config.json"),
    ],
    ids=["list", "null", "cut", "twice", "deep", "not UTF-8"],
)
def test_a_config_that_is_no_object_is_refused(folder, text, named):
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    refused(folder, named)


def forge(folder, entries, data, length=None):
    """Writes a safetensors file by hand."""
    header = json.dumps(entries).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_forged_file_that_tells_the_truth_is_read(folder):
    forge(folder, {"w": entry([2], 0, 8)}, struct.pack("<2f", 1, 2))
    assert read_checkpoint(folder).load({"w": (2,)})["w"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("entries", "length"),
    [
        ({"w": entry([3], 0, 8)}, None),
        ({"w": entry([4], 0, 16)}, None),
        ({"w": entry([1], 4, 8)}, None),
        ({"w": entry([1], 8, 4)}, None),
        ({"w": entry([2], 0, 8), "v": entry([2], 0, 8)}, None),
        ({"w": entry([1], 0, 4)}, None),
        ({"w": entry([2**62, 2**62], 0, 8)}, None),
        ({"w": entry([-2], 0, 8)}, None),
        ({"w": entry([2], 0, 8, "F33")}, None),
        ({"w": entry([2], 0, 8)}, 10**15),
        ({"w": entry([2], 0, 8)}, 3),
        ([1], None),
    ],
    ids=[
        "shape",
        "beyond",
        "gap",
        "reversed",
        "overlap",
        "leftover",
        "overflow",
        "negative",
        "dtype",
        "long",
        "short",
        "list",
    ],
)
def test_a_header_that_lies_is_refused(folder, entries, length):
    forge(folder, entries, struct.pack("<2f", 1, 2), length)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: [\s\S]*copy it again"):
        read_checkpoint(folder)


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1])
def test_a_truncated_file_is_refused(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_checkpoint(folder)


def test_a_file_that_is_damaged_between_header_and_data_is_refused(folder):
    checkpoint = read_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        checkpoint.load(SHAPES)


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "model.bin",
        "",
        None,
        ["model.safetensors"],
    ],
    ids=str,
)
def test_an_index_that_points_elsewhere_is_refused(sharded, file):
    save_file({"half": TENSORS["half"]}, sharded.parent / "model.safetensors")
    edit_index(sharded, lambda weight_map: weight_map.update(half=file))
    refused(sharded, INDEX, repr(file), "same folder")


def test_a_shard_that_is_missing_is_named(sharded):
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "no file", "model-00002-of-00002.safetensors")


def test_a_tensor_in_two_shards_is_refused(sharded):
    path = sharded / "model-00002-of-00002.safetensors"
    save_file({**load_file(path), "a.bias": torch.ones(3)}, path)
    refused(sharded, "model-00002-of-00002.safetensors with a.bias", "place is model-00001-of-00002")


def test_a_tensor_listed_twice_is_refused(sharded):
    text = (
        (sharded / INDEX).read_text().replace('"weight_map": {', '"weight_map": {"half": "x.safetensors", ')
    )
    (sharded / INDEX).write_text(text)
    refused(sharded, "'half' stands there twice")


def test_an_index_and_shards_that_differ_are_refused(sharded):
    whole = (sharded / INDEX).read_text()
    edit_index(sharded, lambda weight_map: weight_map.pop("half"))
    refused(sharded, "with half, whose place is not listed")
    (sharded / INDEX).write_text(whole)
    edit_index(sharded, lambda weight_map: weight_map.update(more=weight_map["half"]))
    refused(sharded, "without more")
    (sharded / INDEX).write_text(whole)
    edit_index(sharded, lambda weight_map: weight_map.update(half=weight_map["a.bias"]))
    refused(sharded, "with half, whose place is model-00001-of-00002.safetensors")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["half"]}], ids=str)
def test_an_index_without_a_map_is_refused(sharded, index):
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, "without weight_map")


def test_weights_that_are_there_twice_are_refused(sharded):
    save_file(TENSORS, sharded / "model.safetensors")
    refused(sharded, "both model.safetensors and")


@pytest.mark.parametrize("key", ["auto_map", "trust_remote_code"])
def test_code_of_a_checkpoint_is_never_run_and_refused_where_a_format_would_need_it(folder, key):
    (folder / "modeling.py").write_text("raise SystemExit('was run')")
    (folder / "config.json").write_text(json.dumps({key: {"AutoModel": "modeling.Model"}}))
    checkpoint = read_checkpoint(folder)
    assert checkpoint.load(SHAPES).keys() == TENSORS.keys()
    with pytest.raises(CheckpointError, match=f"{key}[\\s\\S]*never run"):
        refuse_own_code(checkpoint)


def test_a_config_without_code_of_its_own_passes(folder):
    refuse_own_code(read_checkpoint(folder))


@pytest.mark.parametrize("taken", ["config.json", "model.safetensors", INDEX])
def test_nothing_is_overwritten(tmp_path, taken):
    (tmp_path / taken).write_text("mine")
    with pytest.raises(CheckpointError, match="exists"):
        write_checkpoint(tmp_path, config=CONFIG, tensors=TENSORS)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(taken, "mine")]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attention_residuals.models.formats.checkpoint.sync", full)
    with pytest.raises(CheckpointError, match="free some space"):
        write_checkpoint(tmp_path / "toy", config=CONFIG, tensors=TENSORS)
    assert list((tmp_path / "toy").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file"):
        write_checkpoint(tmp_path / "file" / "toy", config=CONFIG, tensors=TENSORS)


def test_a_shard_that_is_no_file_is_refused(sharded):
    shard = sharded / "model-00001-of-00002.safetensors"
    shard.unlink()
    shard.mkdir()
    refused(sharded, "no file", shard.name)
