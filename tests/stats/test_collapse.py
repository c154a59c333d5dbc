"""Routing that chooses nothing is found, and watched in training."""

import warnings
from dataclasses import replace

import pytest
import torch
from stats.planted import TOKENS, model_of, planted

from attention_residuals.data import TextFiles, prepare
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes, Cumulative, StandardResidual
from attention_residuals.models import Decoder, presets
from attention_residuals.stats import (
    CollapseMonitor,
    RoutingWarning,
    collapsed,
)
from attention_residuals.trace import Summary
from attention_residuals.train import TrainConfig, train


def zero_queries():
    return Decoder(replace(presets.scaled(3, vocab_size=40, residual=AttnRes()), width=32))


def one_source():
    model = zero_queries()
    for reader in model.residual.readers.values():
        reader.pseudo_query.data.copy_(1e6 * model.embedding.weight[7])
    return model


def looked_at_by(model, tokens):
    summary = Summary()
    with torch.no_grad():
        model(tokens, tap=summary)
    return summary


def test_collapse_to_one_source_and_uniform_routing_are_found_and_others_are_not():
    tokens = torch.full((1, 4), 7)
    found = collapsed(looked_at_by(one_source(), tokens))
    assert [collapse.site for collapse in found] == [
        "L0.mlp",
        "L1.attention",
        "L1.mlp",
        "L2.attention",
        "L2.mlp",
        "output",
    ]
    assert all((collapse.kind, collapse.source) == ("one source", "embedding") for collapse in found)
    assert str(found[0]) == "L0.mlp reads embedding alone (mean share 1.000)"
    found = collapsed(looked_at_by(zero_queries(), TOKENS))
    assert len(found) == 6
    assert all(collapse.kind == "uniform" for collapse in found)
    routed = looked_at_by(model_of(AttnRes()), TOKENS)
    assert all(site.normalised_entropy < 0.999 for site in routed if len(site.source_names) > 1)
    assert collapsed(routed) == ()
    assert collapsed(looked_at_by(model_of(StandardResidual()), TOKENS)) == ()
    assert collapsed(Summary()) == ()


def test_thresholds_decide_what_counts():
    weights = torch.tensor([0.9, 0.1], dtype=torch.float64)[:, None, None].expand(2, 1, 9)
    summary = Summary().add(planted(weights))
    assert collapsed(summary) == ()
    assert collapsed(summary, share=0.89)[0].share == pytest.approx(0.9)
    assert collapsed(summary, entropy=0.4)[0].kind == "uniform"


def test_the_split_between_duplicates_is_no_choice():
    model = model_of(Cumulative(sublayers_per_block=6))
    for reader in list(model.residual.readers.values())[:-1]:
        reader.pseudo_query.data.zero_()
        reader.recency_bias.data.zero_()
    sites = [collapse.site for collapse in collapsed(looked_at_by(model, TOKENS))]
    assert sites == ["L0.mlp", "L1.attention", "L1.mlp", "L2.attention", "L2.mlp"]


def test_the_monitor_warns_of_collapse_at_once_and_of_uniform_routing_later():
    monitor = CollapseMonitor(torch.full((1, 4), 7), every=10, uniform_from=50)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(1, 61):
            monitor(step, zero_queries())
        assert [str(warning.message).split(":")[0] for warning in caught] == ["step 50", "step 60"]
        assert all(warning.category is RoutingWarning for warning in caught)
        monitor(10, one_source())
        assert "step 10: L0.mlp reads embedding alone" in str(caught[-1].message)
        monitor(60, model_of(AttnRes()))
        assert len(caught) == 3
    with pytest.raises(ConfigError, match="every=0"):
        CollapseMonitor(TOKENS, every=0)


def test_the_monitor_watches_a_training_and_changes_no_bit_of_it(tmp_path):
    (tmp_path / "tale.txt").write_text("\n".join(f"Once {n} ducks swam." for n in range(99)))
    source = TextFiles(path=str(tmp_path / "tale.txt"), separator="\n")
    corpus = prepare(source, tmp_path / "corpus", vocab_size=260, valid_fraction=0.2)
    config = TrainConfig(
        model=presets.scaled(2, vocab_size=260, residual=AttnRes()),
        num_steps=2,
        batch_size=2,
        sequence_length=16,
    )
    plain = train(config, corpus, tmp_path / "plain", progress=False)
    monitor = CollapseMonitor(torch.randint(260, (2, 8)), every=1, uniform_from=2)
    with pytest.warns(RoutingWarning, match=r"step 2: L\d\.\w+ reads all sources alike"):
        watched = train(config, corpus, tmp_path / "watched", progress=False, monitor=monitor)
    assert plain.loss == watched.loss
