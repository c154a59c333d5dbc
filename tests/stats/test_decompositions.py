"""Exact splits of states, scores and logits, for every rule."""

from dataclasses import replace

import pytest
import torch
from closeness import assert_close, distance
from layers.test_residual_rules import RULE_CONFIGS
from stats.planted import TOKENS, looked_at, model_of, parts_of, planted, uniform

from attention_residuals.errors import ConfigError
from attention_residuals.layers import RMSNorm
from attention_residuals.layers.residual import (
    AttnRes,
    Cumulative,
    Delta,
    InputQuery,
    MultiHead,
    Sigmoid,
    SlidingWindow,
    StandardResidual,
    ValueQuery,
)
from attention_residuals.models import Decoder, LanguageModel
from attention_residuals.stats import (
    contributions,
    key_split,
    l1_proximity,
    logit_attribution,
    mixing_matrix,
    queries,
    writer_contributions,
)
from attention_residuals.trace import record

every_rule = pytest.mark.parametrize("config", RULE_CONFIGS.values(), ids=RULE_CONFIGS.keys())
SPLIT = (
    AttnRes(),
    AttnRes(sublayers_per_block=2),
    AttnRes(sublayers_per_block=6),
    SlidingWindow(window=2),
    Delta(sublayers_per_block=2),
    ValueQuery(),
    Sigmoid(sublayers_per_block=3),
    MultiHead(num_heads=5, sublayers_per_block=2),
    MultiHead(num_heads=2, key_norm="head"),
    Cumulative(sublayers_per_block=2),
)


@every_rule
def test_contributions_of_sources_and_of_writers_sum_to_the_state_as_used(config):
    _, trace, looker = looked_at(config)
    for site, read in zip(trace, looker.reads, strict=True):
        state = parts_of(read).sum(0)
        assert_close(contributions(trace, site.name).sum(0), state)
        assert_close(writer_contributions(trace, site.name).sum(0), state)
        assert_close(site.state_norms, state.norm(dim=-1))


def test_a_writers_contribution_is_its_row_of_the_mixing_matrix_times_its_output():
    _, trace, _ = looked_at(AttnRes(sublayers_per_block=2))
    matrix = mixing_matrix(trace)
    for number, site in enumerate(trace):
        row = matrix.weights[number, : len(site.writers)]
        expected = row[..., None] * trace.writes[: len(site.writers)]
        assert_close(writer_contributions(trace, site.name), expected)


@pytest.mark.parametrize("config", SPLIT, ids=repr)
def test_scores_are_the_sum_of_what_each_writer_in_a_source_adds_to_them(config):
    model, trace, _ = looked_at(config)
    for site in trace:
        if site.site == "output" and isinstance(config, Cumulative):
            continue
        split = key_split(trace, site.name, model)
        bias = split.bias.view(-1, *[1] * (site.logits.ndim - 1))
        assert_close(split.by_writer.sum(1) + bias, site.logits)
        outside = (site.membership == 0)[..., None, None].expand(split.by_writer.shape[:4])
        assert split.by_writer[outside].eq(0).all()


def test_a_split_of_scores_is_the_change_when_a_writer_leaves_and_the_size_stays():
    model, trace, looker = looked_at(AttnRes(sublayers_per_block=2))
    read, reader = looker.reads[4], model.residual.readers["L2_attention"]
    split = key_split(trace, "L2.attention", model)
    block, writer = 1, 2
    output = looker.writes[writer].output
    assert read.membership[block, writer] == 1
    key = (read.sources[block] - output) * reader.key_gain * read.inverse_norms[block, ..., None]
    without = (key * reader.pseudo_query).sum(-1).detach()
    assert_close(read.logits[block].detach() - split.by_writer[block, writer], without)


@pytest.mark.parametrize("config", [StandardResidual(), InputQuery(), AttnRes()], ids=repr)
def test_scores_without_a_pseudo_query_or_writes_are_not_split(config):
    model = model_of(config)
    trace = record(model, TOKENS, keep="routing" if config == AttnRes() else "values")
    with pytest.raises(ConfigError, match="writes" if config == AttnRes() else "pseudo-query"):
        key_split(trace, "L1.mlp", model)


def test_the_output_read_of_cumulative_sources_has_no_scores_to_split():
    model, trace, _ = looked_at(Cumulative())
    with pytest.raises(ConfigError, match="the read at output of CumulativeRule"):
        key_split(trace, "output", model)


@every_rule
def test_attributions_sum_to_the_models_logits(config):
    model, trace, _ = looked_at(config)
    with torch.no_grad():
        logits = model(TOKENS)
    for targets in (TOKENS.roll(-1, 1), torch.full_like(TOKENS, 7)):
        attribution = logit_attribution(trace, model, targets)
        assert attribution.shape == (7, 2, 5)
        assert_close(attribution.sum(0), logits.gather(-1, targets[..., None])[..., 0])


def test_attributions_use_the_shared_size_and_the_tied_head_or_its_own():
    for tied in (True, False):
        config = replace(model_of(AttnRes(sublayers_per_block=2)).config, tied=tied)
        model = Decoder(config).double()
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) / 5
        trace = record(model, TOKENS, keep="values")
        targets = TOKENS.roll(-1, 1)
        attribution = logit_attribution(trace, model, targets)
        with torch.no_grad():
            assert_close(attribution.sum(0), model(TOKENS).gather(-1, targets[..., None])[..., 0])
            # Norms of their own would not sum to the logit.
            parts = writer_contributions(trace, "output")
            own = RMSNorm(30, model.norm.eps).double()
            own.gain.data = model.norm.gain.data
            head = model.embedding.weight if model.head is None else model.head.weight
            wrong = torch.stack([(own(part) * head[targets]).sum(-1) for part in parts]).sum(0)
        assert distance(wrong, attribution.sum(0)) > 0.1


def test_what_cannot_be_attributed_is_refused():
    model, trace, _ = looked_at(AttnRes())
    with pytest.raises(ConfigError, match=r"targets of shape \[2, 4\]"):
        logit_attribution(trace, model, TOKENS[:, :4])
    with pytest.raises(ConfigError, match="a trace without writes"):
        logit_attribution(record(model, TOKENS), model, TOKENS)
    with pytest.raises(ConfigError, match="a trace without values"):
        contributions(record(model, TOKENS), "output")


def test_models_with_other_heads_are_not_attributed():
    class Other(LanguageModel):
        forward = unembed = None

    trace = looked_at(AttnRes())[1]
    with pytest.raises(ConfigError, match="a Other"):
        logit_attribution(trace, Other(), TOKENS)


def test_l1_proximity_is_1_for_what_makes_the_state_and_0_for_what_goes_against_it():
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(1, 3, 8, generator=generator, dtype=torch.float64)
    values = torch.stack([2 * vector, -0.5 * vector, torch.zeros_like(vector)])
    trace = planted(torch.ones(3, 1, 3).double(), values=values)
    assert_close(
        l1_proximity(trace, "output"), torch.tensor([1.0, 0.0, 0.0]).double()[:, None, None].expand(3, 1, 3)
    )
    halves = planted(uniform(2), values=torch.stack([vector, vector + 1e-9]))
    assert_close(l1_proximity(halves, "output"), torch.full((2, 1, 3), 0.5).double(), 1e-6)
    assert l1_proximity(planted(uniform(1)), "output").isnan().all()


def test_queries_are_compared_times_their_gains():
    model = model_of(ValueQuery())
    found = queries(model)
    assert found.names == (
        "L0.mlp", "L1.attention", "L1.attention.v", "L1.mlp", "L2.attention", "L2.attention.v", "L2.mlp", "output",
    )  # fmt: skip
    one = model.residual.readers["L1_attention_v"]
    other = model.residual.readers["output"]
    directions = [(reader.pseudo_query * reader.key_gain).detach() for reader in (one, other)]
    assert_close(found.norms[2], directions[0].norm())
    assert_close(found.cosines[2, 7], torch.cosine_similarity(*directions, dim=0))
    assert_close(found.cosines.diagonal(), torch.ones(8).double())


def test_opposite_and_equal_queries_have_the_cosines_of_the_ends_and_zero_ones_none():
    model = Decoder(model_of(AttnRes()).config)
    readers = model.residual.readers
    readers["L0_mlp"].pseudo_query.data[0] = 2.0
    readers["L1_mlp"].pseudo_query.data[0] = -3.0
    readers["output"].pseudo_query.data[0] = 1.0
    found = queries(model)
    row = found.cosines[found.names.index("L0.mlp")]
    assert row[found.names.index("L1.mlp")] == -1.0
    assert row[found.names.index("output")] == 1.0
    assert row[found.names.index("L1.attention")].isnan()
    assert found.norms[found.names.index("L1.attention")] == 0.0


@pytest.mark.parametrize("config", [StandardResidual(), InputQuery(), Cumulative()], ids=repr)
def test_only_rules_with_pseudo_queries_have_queries(config):
    if isinstance(config, Cumulative):
        assert "output" not in queries(model_of(config)).names
        return
    with pytest.raises(ConfigError, match="a learned pseudo-query"):
        queries(model_of(config))
