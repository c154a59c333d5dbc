import pytest
import torch
from closeness import assert_close

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import Decoder, presets
from attention_residuals.stats import (
    average_routing,
    embedding_share,
    normalised_entropy,
    output_magnitude,
    token_routing,
)
from attention_residuals.trace import record

TOKENS = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])


def model_of(residual, spread=1.0):
    model = Decoder(presets.scaled(4, vocab_size=40, residual=residual))
    for name, parameter in model.named_parameters():
        if name.endswith("pseudo_query"):
            parameter.data.normal_(std=spread)
    return model


def test_rows_are_sites_columns_are_sources_and_an_open_block_shares_its_column():
    routing = average_routing(record(model_of(AttnRes(sublayers_per_block=3)), TOKENS), "mlp")
    assert routing.sites == ("L0.mlp", "L1.mlp", "L2.mlp", "L3.mlp")
    assert routing.sources == ("embedding", "B1", "B2", "B3")
    assert routing.is_open.tolist() == [
        [False, True, False, False],
        [False, False, False, False],
        [False, False, True, False],
        [False, False, False, True],
    ]
    assert routing.weights.isnan().int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize("kind", ["attention", "mlp", "output"])
def test_average_rows_sum_to_one_and_are_means_over_real_tokens(kind):
    trace = record(model_of(AttnRes(sublayers_per_block=1)), TOKENS, mask=MASK)
    routing = average_routing(trace, kind)
    assert_close(routing.weights.nansum(1), torch.ones(len(routing.sites)))
    weights = trace[routing.sites[-1]].weights
    mean = (weights[:, 0].sum(1) + weights[:, 1, 2:].sum(1)) / 12
    assert_close(routing.weights[-1, : len(mean)], mean)


def test_routing_of_one_token_is_that_tokens_weights():
    trace = record(model_of(AttnRes(sublayers_per_block=1)), TOKENS)
    routing = token_routing(trace, "attention", row=1, token=3)
    assert torch.equal(routing.weights[2, :5], trace["L2.attention"].weights[:, 1, 3])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ConfigError, match="kind 'mpl'"):
        average_routing(record(model_of(StandardResidual()), TOKENS), "mpl")


def test_entropy_is_one_for_zero_queries_and_near_zero_for_a_dominant_source():
    uniform = record(model_of(AttnRes(sublayers_per_block=1), spread=0.0), TOKENS)
    sharp = record(model_of(AttnRes(sublayers_per_block=1), spread=50.0), TOKENS)
    assert_close(normalised_entropy(uniform, "output"), torch.ones(2, 7))
    assert normalised_entropy(sharp, "output").mean() < 0.1
    assert normalised_entropy(uniform, "L0.attention").isnan().all()


def test_embedding_share_is_the_embeddings_weight():
    trace = record(model_of(AttnRes(sublayers_per_block=3), spread=0.0), TOKENS)
    assert_close(embedding_share(trace, "output"), torch.full((2, 7), 0.25))
    assert embedding_share(record(model_of(StandardResidual()), TOKENS), "output").isnan().all()


@pytest.mark.parametrize(
    "residual", [StandardResidual(), AttnRes(sublayers_per_block=3)], ids=["standard", "block"]
)
def test_output_magnitude_is_the_rms_of_the_newest_source_after_each_layer(residual):
    model = model_of(residual)
    states = []

    class Keeper:
        def begin(self, run):
            pass

        def read(self, read):
            if not str(read.site).endswith("mlp"):
                states.append(read.sources[-1])
            return read

        def write(self, write):
            return write

    model(TOKENS, tap=Keeper())
    expected = [state.square().mean().sqrt().item() for state in states[1:]]
    assert output_magnitude(record(model, TOKENS)) == pytest.approx(expected, rel=1e-5)
