"""Four lenses, each held to what it says it is."""

import pytest
import torch
from closeness import assert_close
from models.hf.small_models import PRE_NORM, made, trained
from torch.nn import functional as F

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import (
    AttnRes,
    HyperConnections,
    Inkling2,
    MultiHead,
    StandardResidual,
)
from attention_residuals.models import Decoder, presets
from attention_residuals.models.hf import ConvertedModel, convert
from attention_residuals.trace import record
from attention_residuals.trace.lenses import SourceLens, lens

TOKENS = torch.randint(60, (2, 7), generator=torch.Generator().manual_seed(1))


def model_of(residual=None, **shape):
    model = Decoder(presets.scaled(4, vocab_size=60, residual=residual or AttnRes(sublayers_per_block=3)))
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    return model.double()


@pytest.mark.parametrize(
    "residual",
    [
        AttnRes(),
        AttnRes(sublayers_per_block=3),
        StandardResidual(),
        MultiHead(num_heads=4),
        HyperConnections(),
    ],
    ids=repr,
)
def test_at_the_output_the_lens_on_the_state_is_the_model(residual):
    model = model_of(residual)
    reading = lens(model, TOKENS)
    logits = model(TOKENS).log_softmax(-1)
    assert len(reading.sites) == 9
    assert torch.equal(reading.top_tokens[-1], logits.topk(5).indices)
    assert reading.divergences[-1].max() < 1e-6
    expected = -F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="none")
    assert_close(reading.log_probabilities[-1][:, :-1].flatten(), expected.float(), 1e-5)
    assert reading.log_probabilities[..., -1].isnan().all()
    assert reading.divergences[0].mean() > 1e-3


@pytest.mark.parametrize("family", PRE_NORM)
def test_a_converted_model_unembeds_as_it_does_itself(family):
    model = ConvertedModel(trained(convert(made(PRE_NORM[family]), AttnRes(sublayers_per_block=3))))
    assert lens(model, TOKENS).divergences[-1].max() < 1e-6


@torch.no_grad()
def test_each_target_is_the_vector_that_it_names():
    model = model_of()
    trace = record(model, TOKENS, keep="values")
    site = trace["L2.mlp"]  # reads the embedding, B1 and the open block
    assert site.source_names == ("embedding", "B1", "B2.open@L2.attention")
    reader = model.residual.readers["output"]
    keys = F.rms_norm(site.values, (site.values.shape[-1],), reader.key_gain, 1e-6)
    truncated = ((keys * reader.pseudo_query).sum(-1).softmax(0)[..., None] * site.values).sum(0)
    for target, vector in (
        ("state", (site.weights[..., None] * site.values).sum(0)),
        ("open block", site.values[2]),
        (SourceLens(source="B1"), site.values[1]),
        (SourceLens(source="B2"), site.values[2]),
        ("truncated output", truncated),
    ):
        reading = lens(model, TOKENS, target, num_top=60)
        place = reading.sites.index("L2.mlp")
        expected = model.unembed(vector).float().softmax(-1)
        found = torch.zeros_like(expected).scatter(
            -1, reading.top_tokens[place], reading.top_probabilities[place]
        )
        assert_close(found, expected)


def test_sites_without_the_target_are_left_out():
    model = model_of()
    later = ("L2.attention", "L2.mlp", "L3.attention", "L3.mlp", "output")
    assert lens(model, TOKENS, SourceLens(source="B2")).sites == later
    assert "L0.attention" not in lens(model, TOKENS, "open block").sites
    assert "L1.mlp" not in lens(model, TOKENS, "open block").sites  # B1 is full, and nothing is open
    assert lens(model, TOKENS, "truncated output").sites[0] == "L0.attention"
    assert lens(model_of(Inkling2()), TOKENS).sites.count("L1.attention") == 1


def test_padding_changes_no_real_token():
    model, mask = model_of(), torch.ones_like(TOKENS, dtype=torch.bool)
    mask[1, 5:] = False
    padded, alone = lens(model, TOKENS, mask=mask), lens(model, TOKENS[1:, :5])
    assert_close(padded.divergences[:, 1:, :5], alone.divergences, 1e-5)


def test_what_is_no_target_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'state'"):
        lens(model_of(), TOKENS, "stat")
    with pytest.raises(ConfigError, match="did you mean 'B2'"):
        lens(model_of(), TOKENS, SourceLens(source="B22"))
    with pytest.raises(ConfigError, match="the truncated output of StandardRule"):
        lens(model_of(StandardResidual()), TOKENS, "truncated output")
