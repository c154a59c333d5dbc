"""Measures of single tokens: both ends of each range, planted routing found again, and what leaves them alone."""

import math
from functools import cache, partial

import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st
from stats.planted import TEXTS, TOKENIZER, TOKENS, model_of, one_hot, planted, uniform

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import (
    AttnRes,
    Cumulative,
    Delta,
    HyperConnections,
    MultiHead,
    Sigmoid,
    StandardResidual,
)
from attention_residuals.stats import (
    clr,
    coherence,
    effective_distance,
    embedding_share,
    l1_proximity,
    locality,
    norm_shares,
    normalised_entropy,
    perplexity,
    projection_shares,
    reach_back,
    site_means,
    uniform_excess,
)
from attention_residuals.trace import record

PER_TOKEN = {
    "normalised_entropy": normalised_entropy,
    "perplexity": perplexity,
    "embedding_share": embedding_share,
    "locality": locality,
    "locality of 2": partial(locality, last=2),
    "reach_back": partial(reach_back, sublayers=2),
    "coherence": coherence,
    "distance by weight": lambda trace, site: effective_distance(trace, site).mean,
    "distance by norm": lambda trace, site: effective_distance(trace, site, by="norm").mean,
    "distance by projection": lambda trace, site: effective_distance(trace, site, by="projection").mean,
}
PER_SOURCE = {
    "uniform_excess": uniform_excess,
    "norm_shares": norm_shares,
    "projection_shares": projection_shares,
    "l1_proximity": l1_proximity,
    "clr": clr,
}
SITE = "output"
ROW = torch.ones(1, 3, dtype=torch.float64)
counts = st.integers(2, 7)


@st.composite
def some_weights(draw, counts=counts):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    scale = draw(st.sampled_from([0.0, 0.3, 3.0, 30.0]))
    logits = scale * torch.randn(draw(counts), 2, 4, generator=generator, dtype=torch.float64)
    return logits.softmax(0)


@given(counts, st.data())
def test_one_source_alone_is_one_end_of_each_range(count, data):
    source = data.draw(st.integers(0, count - 1))
    trace = planted(one_hot(source, count))
    away = count - source
    assert_close(normalised_entropy(trace, SITE), 0 * ROW)
    assert_close(perplexity(trace, SITE), ROW)
    assert_close(embedding_share(trace, SITE), ROW if source == 0 else 0 * ROW)
    assert_close(locality(trace, SITE), ROW if source == count - 1 else 0 * ROW)
    for by in ("weight", "norm", "projection"):
        assert_close(effective_distance(trace, SITE, by=by).mean, away * ROW)
    for sublayers in range(1, count + 1):
        is_far = source != 0 and away > sublayers
        assert_close(reach_back(trace, SITE, sublayers=sublayers), ROW if is_far else 0 * ROW)
    for last in range(1, count + 2):
        assert_close(locality(trace, SITE, last=last), ROW if source >= count - last else 0 * ROW)
    assert_close(coherence(trace, SITE), ROW)
    for shares in (norm_shares, projection_shares, l1_proximity):
        assert_close(shares(trace, SITE), one_hot(source, count))
    assert_close(uniform_excess(trace, SITE), one_hot(source, count) - 1 / count)
    assert clr(trace, SITE).argmax(0).eq(source).all()


@given(counts)
def test_all_sources_alike_are_the_other_end(count):
    trace = planted(uniform(count))
    assert_close(normalised_entropy(trace, SITE), ROW)
    assert_close(perplexity(trace, SITE), count * ROW)
    assert_close(embedding_share(trace, SITE), ROW / count)
    assert_close(locality(trace, SITE), ROW / count)
    assert_close(effective_distance(trace, SITE).mean, ROW * (count + 1) / 2)
    assert uniform_excess(trace, SITE).abs().max() < 1e-12
    assert clr(trace, SITE).abs().max() < 1e-12


@given(some_weights())
def test_every_measure_is_in_its_range_and_shares_sum_to_one(weights):
    trace, count = planted(weights), len(weights)

    def between(numbers, low, high):
        assert low - 1e-9 <= numbers.min()
        assert numbers.max() <= high + 1e-9

    for name in (
        "normalised_entropy",
        "embedding_share",
        "locality",
        "locality of 2",
        "reach_back",
        "coherence",
    ):
        between(PER_TOKEN[name](trace, SITE), 0, 1)
    between(perplexity(trace, SITE), 1, count)
    for by in ("weight", "norm", "projection"):
        distance = effective_distance(trace, SITE, by=by)
        between(distance.mean, 1, count)
        assert_close(distance.nearest, distance.farthest)
    between(uniform_excess(trace, SITE), -1 / count, 1 - 1 / count)
    one = torch.ones(2, 4).double()
    for shares in (norm_shares, projection_shares):
        assert_close(shares(trace, SITE).sum(0), one)
    nearer = l1_proximity(trace, SITE).sum(0)  # NaN where no contribution comes nearer to the state
    assert_close(nearer.nan_to_num(1.0), one)
    between(norm_shares(trace, SITE), 0, 1)
    between(l1_proximity(trace, SITE).nan_to_num(), 0, 1)
    assert uniform_excess(trace, SITE).sum(0).abs().max() < 1e-12
    assert clr(trace, SITE).sum(0).abs().max() < 1e-9


@given(some_weights())
def test_measures_of_weights_are_the_formulas(weights):
    trace, count = planted(weights), len(weights)
    entropy = -(weights * weights.clamp_min(1e-300).log()).sum(0)
    assert_close(normalised_entropy(trace, SITE), entropy / math.log(count), 1e-9)
    assert_close(perplexity(trace, SITE), entropy.exp())
    assert_close(locality(trace, SITE, last=2), weights[-2:].sum(0))
    assert_close(reach_back(trace, SITE, sublayers=2), weights[1:-2].sum(0))
    away = torch.arange(count, 0, -1).double()[:, None, None]
    assert_close(effective_distance(trace, SITE).mean, (weights * away).sum(0))
    logs = weights.clamp_min(torch.finfo(torch.float64).tiny).log()
    assert (clr(trace, SITE) - (logs - logs.mean(0))).abs().max() < 1e-9


@given(some_weights())
def test_distances_by_lengths_and_by_projections_weigh_with_those(weights):
    trace = planted(weights)
    away = torch.arange(len(weights), 0, -1, dtype=torch.float64)[:, None, None]
    along = projection_shares(trace, SITE).abs()
    for by, shares in (("norm", norm_shares(trace, SITE)), ("projection", along / along.sum(0))):
        assert_close(effective_distance(trace, SITE, by=by).mean, (shares * away).sum(0))


def test_opposite_contributions_cancel():
    vector = torch.randn(1, 3, 8, dtype=torch.float64)
    trace = planted(uniform(2), values=torch.stack([vector, -vector * (1 - 1e-9)]))
    assert coherence(trace, SITE).max() < 1e-8
    assert_close(norm_shares(trace, SITE), uniform(2), 1e-8)
    assert projection_shares(trace, SITE).abs().min() > 1e8
    zero = planted(uniform(2), values=torch.stack([vector, -vector]))
    assert projection_shares(zero, SITE).isnan().all()
    across = planted(
        torch.tensor([1.0, 3.0], dtype=torch.float64).view(2, 1, 1),
        values=torch.eye(8)[:2].double()[:, None, None],
    )
    assert_close(projection_shares(across, SITE).flatten(), torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert_close(norm_shares(across, SITE).flatten(), torch.tensor([0.25, 0.75], dtype=torch.float64))


BLOCKS = torch.tensor([[1.0, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]])


def test_a_block_is_old_when_its_newest_writer_is():
    weights = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)[:, None, None].expand(3, 1, 3)
    trace = planted(weights, membership=BLOCKS, names=("embedding", "B1", "B2"))
    assert_close(reach_back(trace, SITE, sublayers=2), 0.3 * ROW)
    assert_close(reach_back(trace, SITE, sublayers=3), 0 * ROW)
    assert_close(locality(trace, SITE), 0.5 * ROW)
    # Columns in another order change nothing.
    order = [2, 0, 1]
    mixed = planted(weights[order], membership=BLOCKS[order], names=("B2", "embedding", "B1"))
    for measure in PER_TOKEN.values():
        assert_close(measure(mixed, SITE), measure(trace, SITE))


@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_SOURCE])
def test_a_read_of_one_source_has_nothing_to_measure(name):
    measure = (PER_TOKEN | PER_SOURCE)[name]
    assert measure(planted(uniform(1)), SITE).isnan().all()
    trace = record(model_of(StandardResidual()), TOKENS, keep="values")
    assert measure(trace, "L1.mlp").isnan().all()


def test_streams_that_hold_the_same_writers_have_no_newest():
    trace = record(model_of(HyperConnections()), TOKENS)
    assert locality(trace, "L1.mlp").isnan().all()
    assert_close(locality(trace, "L1.mlp", last=4), torch.ones(2, 5).double())
    assert effective_distance(trace, "L1.mlp").mean.isfinite().all()


@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_SOURCE])
def test_how_weight_is_split_between_duplicates_does_not_matter(name):
    measure = (PER_TOKEN | PER_SOURCE)[name]
    values = torch.randn(3, 1, 3, 8, dtype=torch.float64)
    membership = torch.eye(3)[[0, 1, 1, 2]]
    results = []
    for split in (0.0, 0.2, 0.5):
        weights = torch.tensor([0.1, split, 0.5 - split, 0.4], dtype=torch.float64)[:, None, None].expand(
            4, 1, 3
        )
        trace = planted(weights, values=values[[0, 1, 1, 2]], membership=membership, outputs=values,
                        names=("embedding", "a", "again a", "b"))  # fmt: skip
        results.append(measure(trace, SITE))
    once = planted(
        torch.tensor([0.1, 0.5, 0.4], dtype=torch.float64)[:, None, None].expand(3, 1, 3), outputs=values
    )
    for result in results:
        assert_close(result, measure(once, SITE))


@cache
def batch_and_singles(config):
    model = model_of(config, TOKENIZER.vocab_size)
    batches = (TEXTS, *([text] for text in TEXTS))
    return [record(model, texts, tokenizer=TOKENIZER, keep="values") for texts in batches]


@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_SOURCE])
@pytest.mark.parametrize(
    "config",
    [AttnRes(sublayers_per_block=2), MultiHead(num_heads=2), Delta(), Sigmoid(), Cumulative()],
    ids=repr,
)
def test_a_text_in_a_padded_batch_measures_as_it_does_alone(name, config):
    measure = (PER_TOKEN | PER_SOURCE)[name]
    batch, *singles = batch_and_singles(config)
    for row, alone in enumerate(singles):
        length = alone.tokens.shape[1]
        for site in ("L1.attention", "L2.mlp"):
            expected, actual = measure(alone, site)[..., 0, :], measure(batch, site)[..., row, :length]
            assert actual.isnan().equal(expected.isnan())
            assert_close(actual.nan_to_num(), expected.nan_to_num(), 1e-8)


def test_means_are_over_real_tokens_and_over_reads_that_have_a_choice():
    model = model_of(Cumulative(sublayers_per_block=2), TOKENIZER.vocab_size)
    trace = record(model, TEXTS, tokenizer=TOKENIZER)
    means = site_means(trace, normalised_entropy)
    assert "L0.attention" not in means
    assert "output" not in means
    alone = [record(model, [text], tokenizer=TOKENIZER) for text in TEXTS]
    tokens = torch.cat([normalised_entropy(one, "L1.mlp")[0, 1:] for one in alone])
    assert means["L1.mlp"] == pytest.approx(tokens.mean().item(), rel=1e-9)


def test_options_out_of_range_are_refused():
    trace = planted(uniform(3))
    with pytest.raises(ConfigError, match="last=0"):
        locality(trace, SITE, last=0)
    with pytest.raises(ConfigError, match="sublayers=0"):
        reach_back(trace, SITE, sublayers=0)
    with pytest.raises(ConfigError, match="by='mass'"):
        effective_distance.__wrapped__(trace, SITE, by="mass")
