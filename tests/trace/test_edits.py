import json
from dataclasses import fields

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.trace import (
    EDITS,
    Drop,
    Force,
    Mean,
    MeanWrite,
    Patch,
    PatchWeights,
    PatchWrite,
    RemoveWriter,
    ReplaceQuery,
    Resample,
    ResampleWrite,
    RotateQuery,
    ScaleQuery,
    Shuffle,
    Skip,
    Static,
    Temperature,
    Zero,
    ZeroWrite,
    decode_edits,
    encode_edits,
    load_edits,
    save_edits,
)
from attention_residuals.trace.selection import chosen, in_numbers

names = st.sampled_from(
    ["L3.mlp", "attention", "B3.open@L2.mlp", ("*", "!L0.attention"), ("L[1-2].*", "output")]
)
spans = st.tuples(st.one_of(st.integers(-9, 9), st.sampled_from(["3..7", "-4..", "..-1", "0..2"])))
finite = st.floats(-9, 9, allow_nan=False)
BY_FIELD = {
    "positions": st.none() | spans,
    "rows": st.none() | st.just((0, 2)),
    "sites": names,
    "part": st.sampled_from([None, "q", "in"]),
    "heads": st.none() | st.just((1,)),
    "sources": names,
    "to": st.sampled_from(["uniform", "embedding", (0.25, 0.75), (1.0, 0.0)]),
    "reference": st.sampled_from(["paired", "mean", "other run", "on", "1:30"]),
    "reroute": st.booleans(),
    "row": st.none() | st.integers(0, 3),
    "seed": st.integers(0, 2**40),
    "temperature": st.floats(0.01, 100),
    "factor": finite,
    "degrees": finite,
    "by": st.sampled_from(["L3.mlp", (0.5, -1.0)]),
    "writer": st.sampled_from(["embedding", "L3.mlp"]),
    "writers": names,
    "layers": spans,
}
some_verb = st.sampled_from(sorted(EDITS)).flatmap(
    lambda verb: st.tuples(
        st.just(verb),
        st.fixed_dictionaries({field.name: BY_FIELD[field.name] for field in fields(EDITS[verb])}),
    )
)


def test_every_verb_is_registered_by_its_own_name():
    assert {kind.__name__: kind for kind in EDITS.values()} == EDITS
    verbs = {Drop, Force, Mean, MeanWrite, Patch, PatchWeights, PatchWrite, RemoveWriter, ReplaceQuery, Resample,
             ResampleWrite, RotateQuery, ScaleQuery, Shuffle, Skip, Static, Temperature, Zero, ZeroWrite}  # fmt: skip
    assert set(EDITS.values()) == verbs


@given(st.lists(some_verb, min_size=1, max_size=4))
def test_edits_come_back_from_json_and_yaml_as_they_were(described):
    edits = [EDITS[verb](**values) for verb, values in described]
    data = encode_edits(edits)
    assert decode_edits(json.loads(json.dumps(data))) == tuple(edits)
    assert decode_edits(yaml.safe_load(yaml.safe_dump(data))) == tuple(edits)


@pytest.mark.parametrize("verb", sorted(EDITS))
@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_every_verb_comes_back_from_a_file(verb, suffix, tmp_path):
    needed = {"sources": "B1", "writers": "L0.mlp", "writer": "L0.mlp", "temperature": 2.0, "factor": 2.0,
              "degrees": 9.0, "by": "L0.mlp", "layers": ("1..3",)}  # fmt: skip
    own = {field.name for field in fields(EDITS[verb])}
    edit = EDITS[verb](positions=(0, "3..7", -1), **{k: v for k, v in needed.items() if k in own})
    save_edits([edit, edit], tmp_path / f"edits.{suffix}")
    assert load_edits(tmp_path / f"edits.{suffix}") == (edit, edit)


def test_edits_can_be_written_by_hand():
    text = """
    - type: Drop
      sites: ["*", "!L0.attention"]
      sources: embedding
      positions: [3..7, -1]
    - {type: Skip, layers: [2..4]}
    - {type: Force, sites: output, to: [0.5, 0.5]}
    """
    assert decode_edits(yaml.safe_load(text)) == (
        Drop(sites=("*", "!L0.attention"), sources="embedding", positions=("3..7", -1)),
        Skip(layers=("2..4",)),
        Force(sites="output", to=(0.5, 0.5)),
    )


@pytest.mark.parametrize(("data", "message"), [
    ({"type": "Drop"}, "dict as edits"),
    ("Drop", "str as edits"),
    ([["Drop"]], "list as edits"),
    ([{"type": "Dorp", "sources": "B1"}], "did you mean 'Drop'"),
    ([{"type": "Drop", "source": "B1"}], "did you mean 'sources'"),
    ([{"type": "Drop", "sources": 3}], r"Drop\.sources=3"),
    ([{"type": "Temperature"}], "Temperature without temperature"),
    ([{"type": "Drop", "sources": "B1", "part": "x"}], r"Drop\.part='x'"),
])  # fmt: skip
def test_what_is_no_list_of_edits_is_refused(data, message):
    with pytest.raises(ConfigError, match=message):
        decode_edits(data)


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Drop(sources=""), "sources=''"),
    (lambda: Drop(sources="B1", sites=()), r"sites=\(\)"),
    (lambda: Drop(sources="B1", sites=("!output",)), "sites="),
    (lambda: Drop(sources="B1", positions=()), r"positions=\(\)"),
    (lambda: Drop(sources="B1", positions=("3:7",)), "'3:7'"),
    (lambda: Drop(sources="B1", rows=(-1,)), "rows="),
    (lambda: Drop(sources="B1", rows=()), "rows="),
    (lambda: Force(to=(0.5, 0.4)), "to="),
    (lambda: Force(to=(1.5, -0.5)), "to="),
    (lambda: Force(to=(float("nan"), 1.0)), "to="),
    (lambda: Force(to=()), "to="),
    (lambda: Force(to=""), "to="),
    (lambda: Temperature(temperature=0.0), "temperature=0"),
    (lambda: Temperature(temperature=float("inf")), "temperature=inf"),
    (lambda: ScaleQuery(factor=float("nan")), "factor=nan"),
    (lambda: RotateQuery(degrees=float("inf")), "degrees=inf"),
    (lambda: ZeroWrite(writers=""), "writers=''"),
    (lambda: Skip(layers=("a",)), "layers="),
])  # fmt: skip
def test_an_impossible_edit_is_refused_where_it_is_made(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_file_is_not_overwritten_and_what_cannot_be_read_is_named(tmp_path):
    edits = [Zero(sources="B1")]
    save_edits(edits, tmp_path / "a.json")
    with pytest.raises(CheckpointError, match="exists"):
        save_edits(edits, tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"'a\.yam'"):
        save_edits(edits, tmp_path / "a.yam")
    with pytest.raises(CheckpointError, match="while writing"):
        save_edits(edits, tmp_path / "a.json" / "b.json")
    for name, text in (("b.json", "{"), ("b.yaml", "[a"), ("c.yaml", "- !!python/object:os.system {}")):
        (tmp_path / name).write_text(text)
        with pytest.raises(CheckpointError, match="a file of edits"):
            load_edits(tmp_path / name)
    with pytest.raises(CheckpointError, match="a file of edits"):
        load_edits(tmp_path / "nowhere.json")


@given(st.integers(1, 9), st.integers(-9, 9) | st.none(), st.integers(-9, 9) | st.none())
def test_a_range_is_a_slice_of_the_text(length, start, stop):
    text = f"{'' if start is None else start}..{'' if stop is None else stop}"
    found = in_numbers(torch.arange(length)[None], (text,), torch.tensor([length]))[0]
    assert found.nonzero().flatten().tolist() == list(range(length))[start:stop]


def test_a_number_that_no_tensor_holds_is_no_range():
    with pytest.raises(ConfigError, match="numbers and ranges"):
        Drop(sites="L1.mlp", sources="embedding", positions=("0..99999999999999999999",))


def test_negative_numbers_count_from_the_end_of_each_row():
    numbers = torch.tensor([[0, 1, 2], [-1, 0, 1]])
    found = in_numbers(numbers, (-1, 0), torch.tensor([3, 2]))
    assert found.tolist() == [[True, False, True], [False, True, True]]


@pytest.mark.parametrize(("patterns", "expected"), [
    ("embedding", "embedding"),
    ("B?", "B1 B2 B3.open@L5.mlp"),
    ("B3", "B3.open@L5.mlp"),
    ("B3.open@*", "B3.open@L5.mlp"),
    ("mlp", "L5.mlp"),
    ("*.mlp", "L5.mlp"),
    (("*", "!B3"), "embedding B1 B2 L5.mlp L5.attention"),
    (("L5.*", "B1"), "B1 L5.mlp L5.attention"),
])  # fmt: skip
def test_names_are_chosen_by_pattern(patterns, expected):
    known = ("embedding", "B1", "B2", "B3.open@L5.mlp", "L5.mlp", "L5.attention")
    assert " ".join(known[number] for number in chosen(known, patterns)) == expected
