"""The presets of Kimi Linear have the paper's sizes, and the counts of their costs follow from the shapes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import presets
from attention_residuals.models.costs import costs

LARGE = presets.kimi_linear("kimi-linear-48b")
TABLE_2 = {
    "kimi-linear-194m": (194, 12, 12, 896, 400),
    "kimi-linear-241m": (241, 13, 13, 960, 432),
    "kimi-linear-296m": (296, 14, 14, 1024, 464),
    "kimi-linear-436m": (436, 16, 16, 1168, 528),
    "kimi-linear-528m": (528, 17, 17, 1264, 560),
}
"""Active parameters in millions without embeddings, layers, heads, width, width of an expert."""


def by_hand(config):
    """Total and active parameters, from the equations of the layers; the router's biases are in both."""
    f = config.original
    d, heads, k, latent = (
        f["hidden_size"],
        f["num_attention_heads"],
        f["linear_head_dim"],
        f["kv_lora_rank"],
    )
    shared, inner = f["qk_rope_head_dim"], heads * k
    # q, k, v, output; two gates of low rank; the rate; three convolutions; A, dt, the gain of the output.
    kda = 4 * d * inner + 2 * (d * k + k * inner) + d * heads + 3 * inner * 4 + heads + inner + k
    mla = d * heads * (k + shared) + d * (latent + shared) + latent + latent * 2 * inner + inner * d
    expert = 3 * d * f["moe_intermediate_size"]
    router, dense = (d + 1) * f["num_local_experts"], 3 * d * f["intermediate_size"]
    rule = 2 * d * (2 * config.num_layers + 1) if isinstance(config.residual, AttnRes) else 0
    common = 2 * f["vocab_size"] * d + (2 * config.num_layers + 1) * d + rule
    common += sum(mla if kind == "full_attention" else kda for kind in f["layer_types"])
    common += sum(
        dense if kind == "dense" else router + expert * f["n_shared_experts"] for kind in f["mlp_layer_types"]
    )
    sparse = f["mlp_layer_types"].count("sparse") * expert
    return common + sparse * f["num_local_experts"], common + sparse * f["num_experts_per_tok"]


def test_the_large_run_has_the_published_sizes():
    """49.1 B with and 48.4 B without the tables of embedding and head; 3.5 B and 2.7 B work on one token."""
    found = costs(LARGE)
    assert (found.total, found.active) == by_hand(LARGE)
    assert [round(count / 1e9, 1) for count in (found.total, found.total - found.embeddings)] == [49.1, 48.4]
    assert [round(count / 1e9, 1) for count in (found.active, found.active - found.embeddings)] == [3.5, 2.7]


def test_the_large_run_has_54_sublayers_in_9_blocks_of_6_and_the_embedding():
    rule = LARGE.residual.build(num_layers=LARGE.num_layers, width=4)
    assert (LARGE.num_layers, LARGE.residual) == (27, AttnRes(sublayers_per_block=6))
    assert rule.num_sources(rule.sites()[-1]) == 10
    full = [n for n, kind in enumerate(LARGE.original["layer_types"]) if kind == "full_attention"]
    assert full == [3, 7, 11, 15, 19, 23, 26]
    assert LARGE.original["mlp_layer_types"] == ["dense"] + ["sparse"] * 26
    assert (LARGE.original["num_local_experts"], LARGE.original["num_experts_per_tok"]) == (256, 8)


def test_what_attention_residuals_cost_the_large_run():
    found = costs(LARGE)
    assert found.residual == 55 * 2 * 2304
    # Sources of the 55 reads: 1 to 9 finished blocks with the embedding, 5 of 6 times with the open block.
    assert found.reads == 6 * 2304 * (sum(6 * n + 5 for n in range(1, 10)) + 10)
    assert found.reads / found.operations < 0.001
    standard = costs(presets.kimi_linear("kimi-linear-48b", residual=StandardResidual()))
    assert standard.total == found.total - found.residual
    assert (standard.residual, standard.reads, standard.vectors) == (0, 0, pytest.approx(3, abs=0.02))


def test_traffic_of_the_depth_reads_of_the_large_run():
    found, blocks = costs(LARGE), range(1, 10)
    # One phase: a read takes each source and writes its mix; a write reads two and writes one, but for the
    # first of a block, which moves nothing.
    reads = sum(6 * n + 5 for n in blocks) + 10
    assert found.vectors == pytest.approx((reads + 55 + 3 * (54 - 9)) / 54)
    # Two: phase 1 takes n finished blocks once and writes 6 parts; a read takes its part, 5 of 6 times the
    # open block, and writes its mix. The output's takes 10, writes a part, takes it and writes the mix.
    parts = sum(n + 6 + 6 + 5 + 6 + 3 * 5 for n in blocks) + 10 + 3
    assert found.vectors_in_two_phases == pytest.approx(parts / 54)
    # The paper's N / S + 5 counts neither parts written nor that the first blocks have fewer before them.
    assert 9 / 6 + 5 < found.vectors_in_two_phases < 9 / 6 + 5 + 1


def test_operations_of_the_large_run_follow_from_its_active_matrices_and_the_context():
    found, longer = costs(LARGE), costs(LARGE, context=1000)
    matrices = found.active - found.embeddings // 2
    assert found.operations == pytest.approx(2 * matrices + 20 * 7 * 32 * 128**2, rel=1e-3)
    assert longer.operations - found.operations == 1000 * 7 * 2 * 32 * (192 + 128)


def test_cache_of_the_large_run_is_that_of_seven_layers():
    found = costs(LARGE)
    assert found.cache == 7 * (512 + 64) * 2
    assert found.state == 20 * (32 * 128 * 128 * 4 + 3 * 32 * 128 * 4 * 2)


@pytest.mark.parametrize("name", TABLE_2)
def test_scaling_runs_have_the_shapes_of_table_2_and_about_their_active_parameters(name):
    config = presets.kimi_linear(name)
    millions, layers, heads, width, expert = TABLE_2[name]
    shape = config.original
    assert (config.num_layers, shape["num_attention_heads"], config.width) == (layers, heads, width)
    assert (shape["moe_intermediate_size"], config.max_tokens) == (expert, 8192)
    found = costs(config)
    assert (found.total, found.active) == by_hand(config)
    assert (found.active - found.embeddings) / 1e6 == pytest.approx(millions, rel=0.03)
    assert shape["layer_types"].count("full_attention") in (-(-layers // 4), layers // 4)
    assert 7 <= -(-2 * layers // config.residual.sublayers_per_block) <= 9


def test_the_tiny_one_has_two_and_a_half_million_parameters():
    config = presets.kimi_linear("kimi-linear-tiny", vocab_size=4096)
    assert costs(config).total == by_hand(config)[0]
    assert 2.5e6 < costs(config).total < 2.7e6


@settings(max_examples=20, deadline=None)
@given(layers=st.integers(1, 60))
def test_every_shape_ends_in_full_attention_and_has_three_linear_layers_for_each_at_most(layers):
    shape = presets.KimiLinearShape(
        num_layers=layers, width=8, num_heads=1, dense_width=8, expert_width=8, sublayers_per_block=2
    )
    kinds = "".join("F" if kind == "full_attention" else "l" for kind in shape.layer_types)
    assert len(kinds) == layers
    assert kinds.endswith("F")
    assert "llll" not in kinds


def test_unknown_presets_and_other_models_are_refused():
    with pytest.raises(ConfigError, match="kimi-linear-48b"):
        presets.kimi_linear("kimi-linear-48")
    with pytest.raises(ConfigError, match="context=-1"):
        costs(presets.kimi_linear("kimi-linear-tiny"), context=-1)
