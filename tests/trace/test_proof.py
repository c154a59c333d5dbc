"""A model that tells a tap the truth is proved, and each way not to is refused by name."""

import pytest
import torch
from layers.test_residual_rules import RULE_CONFIGS
from models.hf.small_models import PRE_NORM, made, trained
from torch import nn

from attention_residuals.errors import TapError
from attention_residuals.layers import OUTPUT
from attention_residuals.layers.residual import AttnRes
from attention_residuals.layers.tap import Pass
from attention_residuals.models import Decoder, presets
from attention_residuals.models.hf import ConvertedModel, convert
from attention_residuals.trace.proof import prove

TOKENS = torch.randint(40, (2, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", RULE_CONFIGS.values(), ids=RULE_CONFIGS.keys())
def test_our_decoder_is_proved_with_every_rule(config):
    shape = presets.scaled(3, vocab_size=40, residual=config)
    model = Decoder(type(shape)(**{**vars(shape), "width": 30}))
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    prove(model, TOKENS)
    prove(model.double(), TOKENS)


@pytest.mark.parametrize("family", ["llama", "gpt2", "kimi-linear"])
def test_converted_models_are_proved(family):
    prove(ConvertedModel(trained(convert(made(PRE_NORM[family]), AttnRes(sublayers_per_block=3)))), TOKENS)


class Own(nn.Module):
    """Somebody's model around our rule, with a place for each mistake."""

    def __init__(self, **mistakes):
        super().__init__()
        self.mistakes = mistakes
        self.embedding = nn.Embedding(40, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norms = nn.ModuleList(nn.RMSNorm(16, eps=1e-6) for _ in range(5))
        self.residual = AttnRes(sublayers_per_block=2).build(num_layers=2, width=16)
        for parameter in self.residual.parameters():
            parameter.data += torch.randn_like(parameter)

    def forward(self, tokens, *, tap=None):
        if tap is not None and not self.mistakes.get("silent"):
            tap.begin(Pass(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None))
        state = self.residual.open(
            self.embedding(tokens), None if self.mistakes.get("hides_embedding") else tap
        )
        for site, layer, norm in zip(self.residual.sites(), self.layers, self.norms, strict=False):
            own = None if self.mistakes.get("hides_read") == str(site) else tap
            (read,), state = self.residual.read(state, site, norm, own)
            output = layer(read)
            noise = self.mistakes.get("noise", 0.0) * (tap is not None)
            state = self.residual.write(state, site, output + noise, tap)
        (read,), _ = self.residual.read(state, OUTPUT, self.norms[-1], tap)
        return read


def test_a_model_of_ones_own_is_proved():
    prove(Own(), TOKENS)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Own(silent=True), "no begin"),
        (lambda: Own(hides_embedding=True), "holds embedding, which has not been written"),
        (lambda: Own(hides_read="L1.attention"), "of which L1.mlp is not what comes next"),
        (lambda: Own(noise=1e-3), "another result when a tap looks on"),
        (lambda: nn.Linear(2, 2), "Linear"),
    ],
)
def test_a_model_that_misleads_is_refused(model, message):
    with pytest.raises(TapError, match=message):
        getattr(prove, "__wrapped__", prove)(model(), TOKENS)


def test_membership_in_another_order_is_refused(monkeypatch):
    model = Own()
    true = type(model.residual).value_membership
    monkeypatch.setattr(
        type(model.residual),
        "value_membership",
        lambda self, site, sources: true(self, site, sources).flip(0),
    )
    with pytest.raises(TapError, match="from the sum of its writers"):
        prove(model, TOKENS)


def test_weights_that_are_not_used_are_refused(monkeypatch):
    model = Own()
    monkeypatch.setattr(
        type(model.residual), "weights_of", lambda self, logits: (logits * 0.5).softmax(0), raising=True
    )
    with pytest.raises(TapError, match="when each read is made again"):
        prove(model, TOKENS)
