"""Items on models: what is measured is what single passes give, and nothing moves before a plant."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from contradiction_fixtures import STUDY, model_with

from attention_residuals import record
from attention_residuals.contradiction import Measured, measure, measurement, primary_effects
from attention_residuals.contradiction.measurement import measured_once, middle_third
from attention_residuals.data.synthetic import VERDICTS, step_tokenizer
from attention_residuals.errors import CheckpointError, ConfigError, DataError
from attention_residuals.layers.residual import AttnRes, HyperConnections, StandardResidual
from attention_residuals.models.weights import sha256
from attention_residuals.stats import clr, crossed_effects
from attention_residuals.trace import dataset_mean


@pytest.fixture(scope="module")
def items():
    return STUDY.items("pilot", "main", 6)


@pytest.fixture(scope="module")
def measured(items):
    return measure(model_with(), items)


def test_the_primary_number_is_that_of_single_passes(items, measured):
    model, item = model_with(), items[4]
    reads = [measured.sites[number] for number in middle_third(measured.sites)]
    assert reads == ["L1.attention"]
    found = np.zeros((2, 2))
    for u in range(2):
        for p in range(2):
            trace = record(model, torch.from_numpy(item.ids[u, p])[None])
            place = item.places["answer"]
            found[u, p] = np.mean([clr(trace, site)[0, 0, place].item() for site in reads])
    by_hand = (found[0, 1] + found[1, 0] - found[0, 0] - found[1, 1]) / 2
    assert abs(by_hand) > 1e-4
    assert primary_effects(measured)[4] == pytest.approx(by_hand, abs=1e-5)


def test_predictions_are_those_of_single_passes(items, measured):
    model, item, places = model_with(), items[2], items[2].places
    logits = model(torch.from_numpy(item.ids[1, 0])[None])[0].double()
    surprisal = -logits[places["plant"] - 1].log_softmax(-1)[item.ids[1, 0, places["plant"]]]
    assert measured["surprisal"][2, 1, 0] == pytest.approx(surprisal.item(), rel=1e-4)
    answer = logits[places["answer"]]
    assert measured["answer"][2, 1, 0] == pytest.approx(
        (answer[item.answers[1]] - answer[item.claimed_answers[0]]).item(), abs=1e-4
    )
    fine, conflict = (int(step_tokenizer().encode(word)[0]) for word in VERDICTS)
    check = logits[places["check"]]
    assert measured["verdict"][2, 1, 0] == pytest.approx((check[conflict] - check[fine]).item(), abs=1e-4)
    assert measured["right"][2, 1, 0] == float(answer.argmax() == item.answers[1])


def test_rare_remarks_cost_more_than_common_ones(measured):
    cost = measured["remark surprisal"]
    assert (cost[..., 1] > cost[..., 0]).all()


def test_pairs_are_the_same_before_the_plant(items, measured):
    assert measured.about["tokens_before_plant"] == sum(2 * item.places["plant"] for item in items)


def test_a_model_that_is_not_the_same_twice_is_refused(items):
    model = model_with()
    first = next(module for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding))
    first.register_forward_hook(lambda _, __, output: output + 1e-6 * torch.randn_like(output))
    with pytest.raises(DataError, match="before the plant"):
        measure(model, items)


def test_a_plant_that_is_marked_too_late_is_noticed(items):
    late = replace(items[0], places={**items[0].places})
    object.__setattr__(late, "places", {**items[0].places, "plant": items[0].places["plant"] + 1})
    with pytest.raises(DataError, match=r"item|variables"):
        measure(model_with(), [late])


@pytest.mark.parametrize("rule", [AttnRes(sublayers_per_block=2), AttnRes(sublayers_per_block=1)])
def test_without_queries_every_contrast_is_exactly_zero(items, rule):
    found = measure(model_with(rule, queries=False), items[:2])
    assert np.abs(crossed_effects(found["cell clr"])).max() == 0
    assert np.abs(found["weight"][:, 0] - found["weight"][:, 1]).max() == 0


def test_static_weights_leave_no_contrast(items, measured):
    model = model_with()
    means = dataset_mean(model, [torch.from_numpy(item.ids).flatten(0, 1) for item in items])
    found = measure(model, items, static=means)
    assert np.abs(crossed_effects(measured["cell clr"])).max() > 1e-3
    assert np.abs(crossed_effects(found["cell clr"])).max() < 1e-6
    assert found.about["is_static"]


def test_a_standard_model_has_shares_and_no_weights(items):
    model = model_with(StandardResidual())
    found = measure(model, items[:2])
    trace = record(model, torch.from_numpy(items[0].ids[0, 1])[None], keep="values")
    place = items[0].places["answer"]
    state = trace["L1.mlp"].values[0, 0, place]
    embedding = trace.writes[0, 0, place]
    share = (embedding @ state / state.square().sum()).item()
    at = found.sites.index("L1.mlp")
    assert found.at("projection share", "answer")[0, 0, 1, at] == pytest.approx(share, rel=1e-4)
    with pytest.raises(ConfigError, match="array 'clr'"):
        found["clr"]


def test_measurements_come_back_with_the_same_bits_and_are_made_once(items, tmp_path, monkeypatch):
    model = model_with()
    first = measured_once(tmp_path, model, items[:2])
    monkeypatch.setattr(measurement, "measure", None)
    again = measured_once(tmp_path, model, items[:2])
    assert first.items == again.items
    assert all((first.arrays[name] == again.arrays[name]).all() for name in first.arrays)
    assert first.arrays.keys() == again.arrays.keys()
    assert first.about == again.about
    with pytest.raises(TypeError):  # other items are measured anew
        measured_once(tmp_path, model, items[:1])
    path = next(tmp_path.glob("*.safetensors"))
    with pytest.raises(CheckpointError):
        first.save(path)
    assert Measured.load(path).cells == first.cells


def test_a_measurement_that_was_killed_halfway_is_made_again(items, tmp_path):
    model = model_with()
    measured_once(tmp_path, model, items[:1])
    (half,) = tmp_path.glob("*.json")
    half.unlink()
    assert measured_once(tmp_path, model, items[:1]).items == (items[0].name,)


def test_a_rule_that_hides_the_embedding_is_refused(items):
    with pytest.raises(ConfigError, match="AttnRes or standard residuals"):
        measure(model_with(HyperConnections()), items[:1])


def test_a_damaged_measurement_is_refused_and_says_what_to_do(items, tmp_path):
    measured_once(tmp_path, model_with(), items[:1])
    (path,) = tmp_path.glob("*.safetensors")
    beside, whole = path.with_suffix(".json"), path.read_bytes()
    told = json.loads(beside.read_text())

    path.write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match=f"{told['sha256'][:12]}(.|\n)*measure again"):
        Measured.load(path)
    beside.write_text(json.dumps({**told, "sha256": sha256(path)}))
    with pytest.raises(CheckpointError, match=r"cannot be read(.|\n)*measure again"):
        Measured.load(path)
    path.write_bytes(whole)
    beside.write_text(json.dumps({name: value for name, value in told.items() if name != "cells"}))
    with pytest.raises(CheckpointError, match=r"without 'cells'"):
        Measured.load(path)
    path.unlink()
    beside.write_text(json.dumps(told))
    with pytest.raises(CheckpointError):
        Measured.load(path)
