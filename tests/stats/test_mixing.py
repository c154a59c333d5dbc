"""The depth mixing matrix: what theory says of every rule."""

import pytest
import torch
from closeness import assert_close
from layers.test_residual_rules import RULE_CONFIGS, Looker

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import (
    AttnRes,
    MultiHead,
    SlidingWindow,
    StandardResidual,
    ValueQuery,
)
from attention_residuals.layers.tap import Chain
from attention_residuals.models import Decoder, presets
from attention_residuals.stats import mixing_matrix, semiseparable_order, writer_weights
from attention_residuals.trace import Recorder, Trace, record

NUM_LAYERS = 3
TOKENS = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(0))
every_rule = pytest.mark.parametrize("config", RULE_CONFIGS.values(), ids=RULE_CONFIGS.keys())


def model_of(config, width=30):
    shape = presets.scaled(NUM_LAYERS, vocab_size=40, residual=config)
    model = Decoder(type(shape)(**{**vars(shape), "width": width})).double()
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    return model


def traced(config):
    """A trace, every read of the pass that it is of, and every writer's output."""
    model, recorder, looker = model_of(config), Recorder(), Looker()
    with torch.no_grad():
        model(TOKENS, tap=Chain(looker, recorder))
    return recorder.trace(model), looker.reads, torch.stack([write.output for write in looker.writes])


def state_of(read):
    """The state that a read made, from its weights and values."""
    weights = read.weights if read.weights.ndim == 4 else read.weights[..., None]
    values = torch.stack(read.values).unflatten(-1, (weights.shape[-1], -1))
    return (weights[..., None] * values).sum(0).flatten(-2)


@every_rule
def test_the_state_at_every_read_is_the_matrix_times_the_outputs(config):
    trace, reads, outputs = traced(config)
    matrix = mixing_matrix(trace)
    for read in reads:
        row = matrix.weights[matrix.reads.index(str(read.site))].to(outputs.dtype)
        if row.ndim == 3:
            state = torch.einsum("wbt,wbtd->btd", row, outputs)
        elif matrix.parts[0].startswith("head"):
            groups = outputs.unflatten(-1, (len(matrix.parts), -1))
            state = torch.einsum("wbth,wbthk->bthk", row, groups).flatten(-2)
        else:
            part = matrix.parts.index(read.part) if read.part in matrix.parts else 0
            state = torch.einsum("wbt,wbtd->btd", row[..., part], outputs)
        assert_close(state, state_of(read))


@every_rule
def test_no_read_holds_what_is_written_later(config):
    weights = mixing_matrix(traced(config)[0]).weights
    later = torch.arange(weights.shape[1]) > torch.arange(weights.shape[0])[:, None]
    assert weights[later].eq(0).all()
    assert weights.shape[:4] == (2 * NUM_LAYERS + 1, 2 * NUM_LAYERS + 1, *TOKENS.shape)


def test_the_standard_residual_is_all_ones():
    weights = mixing_matrix(traced(StandardResidual())[0]).weights
    assert torch.equal(weights, torch.ones(7, 7).tril()[..., None, None].expand_as(weights).to(weights.dtype))


@every_rule
def test_weights_of_sources_sum_to_one_where_a_softmax_makes_them(config):
    trace = traced(config)[0]
    if trace.semantics["weights"].startswith("softmax"):
        for site in trace.sites:
            assert_close(site.weights.sum(0), torch.ones_like(site.weights[0]))


@pytest.mark.parametrize("name", [name for name in RULE_CONFIGS if name in ("full", "highway")])
def test_writer_rows_sum_to_one(name):
    rows = mixing_matrix(traced(RULE_CONFIGS[name])[0]).weights.sum(1)
    assert_close(rows, torch.ones_like(rows))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_writer_rows_of_blocks_sum_to_each_weight_times_the_number_of_writers(size):
    trace = traced(AttnRes(sublayers_per_block=size))[0]
    rows = mixing_matrix(trace).weights.sum(1)
    for number, site in enumerate(trace.sites):
        sizes = [1, *(min(size, number - start) for start in range(0, number, size))]
        expected = sum(count * weight for count, weight in zip(sizes, site.weights, strict=True))
        assert_close(rows[number], expected)


def orders(config):
    weights = mixing_matrix(traced(config)[0]).weights
    return [semiseparable_order(weights[:, :, row, token]) for row in range(2) for token in range(5)]


BOUNDS = {
    "standard": 1,
    "highway": 1,
    "hyper-connections": 4,
    "hyper-connections of 2": 2,
    "mHC": 4,
    "mHC of 3": 3,
    "block of 2": 4,
    "odd block": 3,
    "one block": 2,
}


@pytest.mark.parametrize("name", [name for name in BOUNDS if name in RULE_CONFIGS])
def test_semiseparable_order_is_within_its_bound(name):
    assert max(orders(RULE_CONFIGS[name])) <= BOUNDS[name]


def test_full_attention_residuals_have_a_higher_order_than_any_recurrence_of_few_streams():
    assert min(orders(AttnRes(sublayers_per_block=1))) >= 3


def test_semiseparable_order_counts_rank_and_not_size():
    generator = torch.Generator().manual_seed(0)
    for order in (1, 2, 3):
        keys, queries = torch.rand(2, 8, order, generator=generator).unbind(0)
        assert semiseparable_order((queries @ keys.T).tril()) == order
    with pytest.raises(ConfigError, match=r"\[2, 3\]"):
        semiseparable_order(torch.ones(2, 3))


def test_the_last_axis_is_there_only_for_heads_and_parts():
    full, heads, values = (
        mixing_matrix(record(model_of(config), TOKENS))
        for config in (AttnRes(), MultiHead(num_heads=5), ValueQuery())
    )
    assert full.parts == ()
    assert full.weights.ndim == 4
    assert heads.parts == tuple(f"head {number}" for number in range(5))
    assert values.parts == ("in", "v")
    mlp = values.weights[values.reads.index("L1.mlp")]
    assert torch.equal(mlp[..., 0], mlp[..., 1])
    attention = values.weights[values.reads.index("L1.attention")]
    assert not torch.equal(attention[..., 0], attention[..., 1])


def test_the_average_leaves_padding_and_what_is_not_written_out():
    mask = torch.tensor([[True] * 5, [False] * 3 + [True] * 2])
    trace = record(model_of(ValueQuery()), TOKENS, mask=mask)
    matrix = mixing_matrix(trace)
    average = matrix.average(trace, part="v")
    row = matrix.weights[4, :, :, :, 1]
    assert_close(average.weights[4, :5], ((row[:, 0].sum(1) + row[:, 1, 3:].sum(1)) / 7)[:5])
    assert average.weights[4, 5:].isnan().all()
    assert_close(
        matrix.average(trace).weights[4, :5],
        (average.weights + matrix.average(trace, part="in").weights)[4, :5] / 2,
    )
    with pytest.raises(ConfigError, match="part 'q'"):
        matrix.average(trace, part="q")


def test_a_writer_out_of_the_window_has_weight_zero():
    trace = record(model_of(SlidingWindow(window=1)), TOKENS)
    weights = mixing_matrix(trace).weights
    assert weights[4, 1:4].eq(0).all()
    assert_close(weights[4, 0] + weights[4, 4], torch.ones_like(weights[4, 0]))


def test_a_changed_read_is_in_the_matrix_as_it_was_used(tmp_path):
    class Halver(Looker):
        def read(self, read):
            return read._replace(weights=read.weights / 2) if str(read.site) == "L1.mlp" else read

    model, recorder = model_of(AttnRes()), Recorder()
    with torch.no_grad():
        model(TOKENS, tap=Chain(Halver(), recorder))
    trace = recorder.trace(model)
    trace.save(tmp_path)
    sums = mixing_matrix(Trace.load(tmp_path)).weights.sum(1)
    assert_close(sums[3], torch.full_like(sums[3], 0.5))
    assert_close(writer_weights(trace["L1.mlp"]).sum(0), sums[3])


@every_rule
def test_values_of_nobody_knows_whom_are_not_a_number_and_not_a_wrong_one(config):
    class Doubler(Looker):
        def read(self, read):
            if str(read.site) != "L1.mlp":
                return read
            return read._replace(values=(2 * read.values[0], *read.values[1:]))

    model, recorder = model_of(config), Recorder()
    with torch.no_grad():
        model(TOKENS, tap=Chain(Doubler(), recorder))
    weights = mixing_matrix(recorder.trace(model)).weights
    assert weights[3, 0].isnan().all()
    assert weights[:3].isfinite().all()


def test_the_matrix_is_exact_under_autocast():
    trace = traced(AttnRes())[0]
    expected = mixing_matrix(trace).weights
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mixing_matrix(trace).weights, expected)
