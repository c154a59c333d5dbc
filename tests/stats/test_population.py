"""Statistics of many tokens: sinks, input dependence, what token ids explain."""

import math

import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st
from stats.planted import TOKENS, model_of, one_hot, planted, uniform

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes, StaticMixing
from attention_residuals.stats import (
    input_dependence,
    lexical_baseline,
    sink_scores,
)
from attention_residuals.trace import Summary, record

SITE = "output"


def summed(weights, **options):
    return Summary().add(planted(weights, **options))[SITE]


def softmax_weights(seed, count=4, shape=(1, 50), scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(count, *shape, generator=generator, dtype=torch.float64)).softmax(0)


def rotating(count, rounds=5):
    """Each token reads one source, all sources alike often."""
    return torch.eye(count, dtype=torch.float64).repeat(1, rounds)[:, None]


def test_the_same_weights_for_every_token_are_static_and_all_mass_is_a_sinks():
    weights = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)[:, None, None].expand(3, 1, 9)
    scores = sink_scores(summed(weights))
    assert_close(scores.score, scores.mass)
    assert_close(scores.mass, weights[:, 0, 0])
    assert input_dependence(summed(weights)) == pytest.approx(0.0, abs=1e-12)


@given(st.integers(2, 6))
def test_one_source_a_token_all_sources_alike_is_the_other_end(count):
    summary = summed(rotating(count))
    assert input_dependence(summary) == pytest.approx(math.log(count), rel=1e-12)
    assert sink_scores(summary).score.abs().max() < 1e-12


@given(st.integers(0, 99), st.sampled_from([0.0, 0.3, 3.0, 30.0]))
def test_sinks_and_input_dependence_are_in_their_ranges_and_are_the_formulas(seed, scale):
    weights = softmax_weights(seed, scale=scale)
    summary = summed(weights)
    scores, flat = sink_scores(summary), weights[:, 0]
    mean, variance = flat.mean(1), flat.var(1, correction=0)
    assert_close(scores.mass, mean)
    assert_close(scores.score, mean * (1 - variance / (mean * (1 - mean))), 1e-9)
    assert (scores.score >= 0).all()
    assert (scores.score <= mean + 1e-12).all()
    middle = torch.special.entr(mean).sum() - torch.special.entr(flat).sum(0).mean()
    assert input_dependence(summary) == pytest.approx(max(0.0, middle.item()), abs=1e-12)
    # The generalised Jensen-Shannon divergence by its other formula.
    divergence = (flat * (flat.clamp_min(1e-300) / mean[:, None]).log()).sum(0).mean()
    assert input_dependence(summary) == pytest.approx(divergence.item(), abs=1e-12)


def test_a_planted_sink_is_flagged_and_a_loud_or_a_changing_source_is_not_one():
    outputs = torch.randn(4, 1, 40, 8, generator=torch.Generator().manual_seed(0)).double()
    weights = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)[:, None, None].expand(4, 1, 40)
    quiet, loud = outputs.clone(), outputs.clone()
    quiet[0] *= 1e-3
    scores = sink_scores(summed(weights, outputs=quiet), effects={"embedding": 0.25})
    assert scores.sources[0] == "embedding"
    assert scores.flagged.tolist() == [True, False, False, False]
    assert scores.norm_share[0] < 0.01
    assert scores.effect[0] == 0.25
    assert scores.effect[1:].isnan().all()
    loud[0] *= 10
    assert not sink_scores(summed(weights, outputs=loud)).flagged.any()
    changing = sink_scores(summed(rotating(4, rounds=10), outputs=quiet))
    assert not changing.flagged.any()
    assert changing.score[0] < 1e-12
    with pytest.raises(ConfigError, match=r"the effect of 'embeding'(.|\n)*did you mean 'embedding'"):
        sink_scores(summed(weights), effects={"embeding": 0.1})


def test_one_source_has_no_sink_and_no_dependence():
    summary = summed(uniform(1))
    scores = sink_scores(summary)
    assert scores.mass.isnan().all()
    assert scores.score.isnan().all()
    assert not scores.flagged.any()
    assert math.isnan(input_dependence(summary))


def test_a_source_that_is_always_or_never_read_has_a_score_of_its_mass():
    scores = sink_scores(summed(one_hot(1, 3)))
    assert scores.score.tolist() == [0.0, 1.0, 0.0]


def test_static_rules_do_not_depend_on_their_input_and_attention_residuals_do():
    static, routed = (Summary().add(record(model_of(rule), TOKENS)) for rule in (StaticMixing(), AttnRes()))
    assert input_dependence(static["L2.mlp"]) < 1e-12
    assert input_dependence(routed["L2.mlp"]) > 1e-6


IDS = torch.randint(0, 5, (1, 400), generator=torch.Generator().manual_seed(1))


def by_id(count=4, scale=2.0):
    table = scale * torch.randn(count, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return table[:, IDS].softmax(0)


def test_routing_by_token_id_alone_is_explained_fully():
    found = lexical_baseline(planted(by_id(), tokens=IDS), SITE)
    assert found.held_out == pytest.approx(1.0, abs=1e-9)
    assert found.in_sample == pytest.approx(1.0, abs=1e-9)
    assert found.divergence == pytest.approx(1.0, abs=1e-9)
    assert found.covered == 1.0


def test_routing_that_ignores_the_token_is_not_explained_and_held_out_says_so():
    for seed in range(3):
        weights = softmax_weights(seed, shape=(1, 400))
        rare = torch.arange(400)[None] // 2  # each id twice: means of two explain much of noise in sample
        found = lexical_baseline(planted(weights, tokens=rare), SITE)
        assert found.in_sample > 0.4
        assert found.divergence > 0.4
        assert found.held_out < -0.5
        common = lexical_baseline(planted(weights, tokens=IDS), SITE)
        assert abs(common.held_out) < 0.05
        assert 0 <= common.in_sample < 0.05


def test_half_of_the_variance_from_the_token_is_half_explained():
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 200, (1, 8000), generator=generator)
    table = torch.randn(3, 200, generator=generator, dtype=torch.float64)
    noise = torch.randn(3, 1, 8000, generator=generator, dtype=torch.float64)
    weights = (table[:, ids] + noise).softmax(0)
    assert lexical_baseline(planted(weights, tokens=ids), SITE).held_out == pytest.approx(0.5, abs=0.05)


def test_held_out_means_are_those_without_the_token():
    ids = torch.tensor([[1, 1, 1, 2, 2, 3]])
    weights = softmax_weights(5, count=3, shape=(1, 6))
    found = lexical_baseline(planted(weights, tokens=ids), SITE)
    logs = weights[:, 0, :5].log()
    ratios = (logs - logs.mean(0)).T
    errors, around = [], []
    for token in range(5):
        others = [n for n in range(5) if n != token]
        same = [n for n in others if ids[0, n] == ids[0, token]]
        errors.append((ratios[token] - ratios[same].mean(0)).square().sum())
        around.append((ratios[token] - ratios[others].mean(0)).square().sum())
    assert found.held_out == pytest.approx(1 - (sum(errors) / sum(around)).item(), rel=1e-9)
    assert found.covered == pytest.approx(5 / 6)


def test_what_cannot_be_explained_is_not_a_number():
    weights = softmax_weights(0, shape=(1, 6))
    unique = lexical_baseline(planted(weights, tokens=torch.arange(6)[None]), SITE)
    assert unique.covered == 0.0
    assert math.isnan(unique.held_out)
    repeated = torch.tensor([[1, 1, 2, 2, 3, 3]])
    static = lexical_baseline(planted(uniform(4, (1, 6)), tokens=repeated), SITE)
    assert math.isnan(static.held_out)
    assert static.covered == 1.0
    assert math.isnan(lexical_baseline(planted(uniform(1, (1, 6)), tokens=repeated), SITE).in_sample)


def test_padding_is_not_explained():
    weights, mask = by_id(), torch.arange(400)[None] < 300
    noise = softmax_weights(3, shape=(1, 400))
    mixed = torch.where(mask, weights, noise)
    assert lexical_baseline(planted(mixed, tokens=IDS, mask=mask), SITE).held_out == pytest.approx(
        1.0, abs=1e-9
    )
