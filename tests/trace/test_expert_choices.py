"""Traces tell the routing over experts from the routing over depth, and statistics can be split by either."""

import json
from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from models.hf.kimi_linear_models import TOKENS, made, run

from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.inference import Engine, Sampling
from attention_residuals.layers.tap import Chain, ExpertTap, Onlooker
from attention_residuals.models import Decoder, RouterShape, presets
from attention_residuals.stats import (
    average_routing,
    expert_loads,
    normalised_entropy,
    perplexity,
    routing_by_expert,
    site_means,
    tokens_of_expert,
)
from attention_residuals.trace import Recorder, Trace, record, trace_bytes
from attention_residuals.trace.generation import joined

MASK = torch.ones_like(TOKENS, dtype=torch.bool)
MASK[1, :11] = False
SPARSE = [f"L{layer}.mlp" for layer in range(1, 8)]


@pytest.fixture(scope="module")
def model():
    return made()


@pytest.fixture(scope="module")
def trace(model):
    return record(model, TOKENS, mask=MASK)


def chosen_by_hand(model, layer):
    """What the router of a layer chooses, from its input and its equations."""
    moe, seen = model.transformers.model.layers[layer].mlp, []
    hook = moe.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    run(model, mask=MASK)
    hook.remove()
    scores = (seen[0] @ moe.gate.weight.T).sigmoid() + moe.gate.e_score_correction_bias
    return scores.topk(2).indices


def test_a_trace_holds_the_experts_that_each_token_was_sent_to(model, trace):
    assert list(trace.experts) == SPARSE
    assert trace.num_experts == dict.fromkeys(SPARSE, 8)
    assert model.routers == dict.fromkeys(SPARSE, RouterShape(8, 2))
    for layer in (1, 4, 7):
        found = trace.experts[f"L{layer}.mlp"]
        assert found.shape == (*TOKENS.shape, 2)
        expected = chosen_by_hand(model, layer)
        assert torch.equal(found.long().sort(-1).values[MASK], expected.sort(-1).values[MASK])


def test_a_trace_says_what_each_sublayer_is(trace):
    assert [trace.kinds[f"L{layer}.attention"] for layer in range(8)] == ["KDA", "KDA", "KDA", "MLA"] * 2
    assert [trace.kinds[f"L{layer}.mlp"] for layer in range(8)] == ["MLP"] + ["MoE"] * 7


def test_telling_the_choices_changes_nothing_and_leaves_no_hook(model):
    recorder = Recorder()
    assert torch.equal(run(model, tap=Chain(Onlooker(), recorder)), run(model))
    assert isinstance(recorder, ExpertTap)
    assert not isinstance(Onlooker(), ExpertTap)
    assert list(recorder.trace(model).experts) == SPARSE
    assert not any(module._forward_hooks for name, module in model.named_modules() if name.endswith(".gate"))


def test_a_trace_comes_back_from_disk_and_its_size_is_foretold(model, trace, tmp_path):
    trace.save(tmp_path / "trace")
    again = Trace.load(tmp_path / "trace")
    assert again == trace
    other = replace(trace, experts={**trace.experts, "L1.mlp": trace.experts["L1.mlp"] + 1})
    assert other != trace
    assert trace_bytes(model, TOKENS.numel()) == record(model, TOKENS).num_bytes
    file = tmp_path / "trace" / "trace.json"
    about = json.loads(file.read_text())
    del about["num_experts"]["L1.mlp"]
    file.write_text(json.dumps(about))
    with pytest.raises(CheckpointError, match="7 choices of experts for 6"):
        Trace.load(tmp_path / "trace")


def test_traces_of_a_generation_are_joined_with_their_experts(model):
    recorders = []

    def tap():
        recorders.append(Recorder())
        return recorders[-1]

    prompt = TOKENS[0, :9].tolist()
    pieces = list(Engine(model).stream(prompt, max_new_tokens=4, sampling=Sampling(temperature=0.0), tap=tap))
    found = joined([recorder.trace(model) for recorder in recorders])
    whole = record(model, torch.tensor([[*prompt, *(piece.token for piece in pieces[:-1])]]))
    assert list(found.experts) == SPARSE
    for writer, chosen in whole.experts.items():
        assert torch.equal(found.experts[writer].sort(-1).values, chosen.sort(-1).values)


def test_loads_are_shares_of_the_real_choices(trace):
    loads = expert_loads(trace)
    assert list(loads) == SPARSE
    counted = trace.experts["L2.mlp"][MASK]
    for expert in range(8):
        assert loads["L2.mlp"][expert].item() == pytest.approx((counted == expert).float().mean().item())
    assert all(load.sum().item() == pytest.approx(1) for load in loads.values())


def test_routing_by_expert_averages_to_the_routing_of_all_tokens(trace):
    for site, writer in (("L3.mlp", None), ("L5.attention", "L4.mlp"), ("output", "L7.mlp")):
        found = routing_by_expert(trace, site, writer)
        share = found.num_tokens / found.num_tokens.sum()
        together = (found.weights.nan_to_num() * share[:, None]).sum(0)
        overall = average_routing(trace, site if site == "output" else site.split(".")[1])
        row = overall.weights[overall.sites.index(site)]
        own = [overall.sources.index(source) for source in found.sources]
        assert_close(together, row[own])
        assert found.num_tokens.sum() == 2 * MASK.sum()


def test_statistics_are_conditioned_on_the_kind_of_sublayer_and_on_an_expert(trace):
    assert average_routing(trace, "MLA").sites == ("L3.attention", "L7.attention")
    assert average_routing(trace, "MLP").sites == ("L0.mlp",)
    busiest = int(expert_loads(trace)["L3.mlp"].argmax())
    where = tokens_of_expert(trace, "L3.mlp", busiest)
    assert 0 < where.sum() < MASK.sum()
    assert not (where & ~MASK).any()
    found = average_routing(trace, "MoE", where=where)
    read = trace["L3.mlp"]
    row = found.weights[found.sites.index("L3.mlp")]
    assert_close(row[~row.isnan()], read.weights[:, where].mean(1))
    everywhere = average_routing(trace, "MLA", where=torch.ones_like(MASK))  # padding stays out
    assert torch.equal(everywhere.weights.nan_to_num(), average_routing(trace, "MLA").weights.nan_to_num())
    by_expert = routing_by_expert(trace, "L3.mlp")
    assert_close(by_expert.weights[busiest], read.weights[:, where].mean(1))
    for statistic in (normalised_entropy, perplexity):
        means = site_means(trace, statistic, kind="KDA", where=where)
        assert list(means) == [f"L{layer}.attention" for layer in (1, 2, 4, 5, 6)]
        expected = statistic(trace, "L5.attention")[where].mean().item()
        assert means["L5.attention"] == pytest.approx(expected)


def test_what_is_not_there_is_told(trace):
    with pytest.raises(ConfigError, match="use one of attention, mlp, output, KDA, MLP, MoE, MLA"):
        average_routing(trace, "GQA")
    with pytest.raises(ConfigError, match="0 to 7"):
        tokens_of_expert(trace, "L3.mlp", 8)
    with pytest.raises(ConfigError, match="a sublayer that chooses experts"):
        routing_by_expert(trace, "L3.attention")
    with pytest.raises(ConfigError, match="no token to average over"):
        average_routing(trace, where=torch.zeros_like(MASK))
    plain = record(Decoder(presets.scaled(2, vocab_size=9)), torch.tensor([[5, 6]]))
    assert (plain.experts, plain.kinds, expert_loads(plain)) == ({}, {}, {})
    with pytest.raises(ConfigError, match="record a Kimi Linear model"):
        routing_by_expert(plain, "L1.mlp")
