"""Residual rules as the command line lists and names them."""

import pytest

from attention_residuals.cli import main, names
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import (
    RULES,
    AttnRes,
    Highway,
    MultiHead,
    StandardResidual,
    StaticMixing,
)


def test_every_rule_is_listed_with_formula_cost_and_cautions(capsys):
    assert main(["rules"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if not line.startswith(" ")] == list(RULES)
    assert all(config.formula in text for config in RULES.values())
    inkling2 = text[text.index("\ninkling2") :]
    assert "parameters: 384 at an attention site, 128 at an MLP site, 128 at the output" in inkling2
    assert "attention sites read 3 times (q, k, v)" in inkling2
    cumulative = text[text.index("\ncumulative") :]
    assert "caution: sources are cumulative" in cumulative
    full = text[text.index("\nattnres") :].split("\n\n")[0]
    assert "state: 17 vectors a token before the output, which reads 17" in full


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("standard", StandardResidual()),
        ("full", AttnRes()),
        ("block:3", AttnRes(sublayers_per_block=3)),
        ("attnres:sublayers_per_block=3,key_eps=1e-5", AttnRes(sublayers_per_block=3, key_eps=1e-5)),
        ("heads:num_heads=8,key_norm=head", MultiHead(num_heads=8, key_norm="head")),
        ("static:normalised=False", StaticMixing(normalised=False)),
        (
            "static:normalised=false, sublayers_per_block=2",
            StaticMixing(normalised=False, sublayers_per_block=2),
        ),
        ("highway:carry_bias=None", Highway()),
    ],
)
def test_a_rule_is_named_with_its_options(words, config):
    assert names.residual_of(words, AttnRes(sublayers_per_block=2)) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sigmoyd", "did you mean 'sigmoid'"),
        ("window:windw=3", "did you mean 'window'"),
        ("window:window=lots", "SlidingWindow.window='lots'"),
        ("window:window=0", "window=0"),
        ("window:window=3,window=5", "each option of the rule once"),
        ("delta:type=AttnRes", "each option of the rule once"),
        ("block:many", "residual 'block:many'"),
    ],
)
def test_a_rule_or_option_that_is_none_is_told(words, message):
    with pytest.raises(ConfigError, match=message):
        names.residual_of(words, AttnRes(sublayers_per_block=2))
