"""Sweeps: every edge once, each as if alone, resumable; estimates beside exact effects."""

import json

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from attention_residuals.errors import CheckpointError, ConfigError, EditError, ShapeError
from attention_residuals.layers.residual import AttnRes, HyperConnections, MultiHead, ValueQuery
from attention_residuals.models import Decoder, presets
from attention_residuals.stats.agreement import edge_agreement, edge_effects, rank_correlation
from attention_residuals.trace import Drop, Zero, intervene, record
from attention_residuals.trace import sweeps as sweeps_module
from attention_residuals.trace.estimates import edge_estimates
from attention_residuals.trace.sweeps import every_edge, every_pair, every_source, reads_of, sweep

TOKENS = torch.randint(40, (5, 9), generator=torch.Generator().manual_seed(0))
BLOCK = AttnRes(sublayers_per_block=2)


def model_of(residual=BLOCK, scale=0.3):
    torch.manual_seed(1)
    model = Decoder(presets.scaled(3, vocab_size=40, residual=residual))
    for parameter in model.residual.parameters():
        parameter.data += scale * torch.randn_like(parameter)
    for name, parameter in model.named_parameters():
        if name.endswith(("output.weight", "down.weight")):
            parameter.data *= 10  # so that sublayers write as much as they would once trained
    return model


def run(model, edits, **options):
    return sweep(model, TOKENS, edits, progress=False, **options)


@pytest.mark.parametrize("residual", [BLOCK, AttnRes(), ValueQuery()], ids=repr)
def test_every_edge_is_there_once(residual):
    model = model_of(residual)
    edges = [(edit.sites, edit.part, edit.sources) for [edit] in every_edge(model)]
    assert len(edges) == len(set(edges))
    trace = record(model, TOKENS)
    expected = [
        (site.site, site.part, source)
        for site in trace.sites
        for source in site.source_names
        if len(site.source_names) > 1
    ]
    assert edges == expected
    assert [read.sources for read in reads_of(model)] == [site.source_names for site in trace.sites]


def test_each_entry_is_what_its_edit_does_alone():
    model, edits = model_of(), [[Drop(sites="L2.mlp", sources="B1")], [Zero(sites="output", sources="B2")]]
    with torch.no_grad():
        clean = model(TOKENS).log_softmax(-1)
    for entry, alone in zip(run(model, edits, batch_size=2), edits, strict=True):
        edited = intervene(model, TOKENS, alone).logits.log_softmax(-1)
        kl = (clean.exp() * (clean - edited)).sum(-1).mean().item()
        assert entry.divergence == pytest.approx(kl, rel=1e-3, abs=1e-7)
        targets = TOKENS[:, 1:].flatten()
        losses = [F.nll_loss(logits[:, :-1].flatten(0, 1), targets).item() for logits in (edited, clean)]
        assert entry.loss == pytest.approx(losses[0] - losses[1], abs=1e-5)
        assert entry.edits[0]["type"] == type(alone[0]).__name__


def test_padding_counts_for_nothing():
    model, mask = model_of(), torch.ones_like(TOKENS, dtype=torch.bool)
    mask[3:, 6:] = False
    other = TOKENS.clone()
    other[3:, 6:] = 0
    edits = every_source(model)[:3]
    one = sweep(model, TOKENS, edits, mask=mask, progress=False, batch_size=5)
    two = sweep(model, other, edits, mask=mask, progress=False, batch_size=2)
    for entry, again in zip(one, two, strict=True):
        assert entry.divergence == pytest.approx(again.divergence, rel=1e-4)
        assert entry.loss == pytest.approx(again.loss, abs=1e-5)


def test_a_stopped_sweep_goes_on_and_ends_alike(tmp_path, monkeypatch):
    model = model_of()
    edits = every_edge(model)
    whole = run(model, edits)
    calls = [0]
    original = sweeps_module.intervene

    def dying(*args, **kwargs):
        calls[0] += 1
        if calls[0] == 8:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(sweeps_module, "intervene", dying)
    with pytest.raises(KeyboardInterrupt):
        run(model, edits, folder=tmp_path / "sweep")
    log = tmp_path / "sweep" / "effects.jsonl"
    done = len(log.read_text().splitlines())
    assert done == 7
    with log.open("a") as file:
        file.write('{"edits": [{"ty')  # as a kill may leave it
    assert run(model, edits, folder=tmp_path / "sweep") == whole
    assert calls[0] == 8 + len(edits) - done
    assert run(model, edits, folder=tmp_path / "sweep") == whole
    assert len([json.loads(line) for line in log.read_text().splitlines()]) == len(edits)


def test_a_folder_of_another_sweep_is_refused(tmp_path):
    model = model_of()
    edits = every_edge(model)[:2]
    run(model, edits, folder=tmp_path / "sweep")
    other = model_of()
    other.embedding.weight.data[0, 0] += 1
    for changed in (
        lambda: run(other, edits, folder=tmp_path / "sweep"),
        lambda: run(model, edits[:1], folder=tmp_path / "sweep"),
        lambda: sweep(model, TOKENS[:, :8], edits, folder=tmp_path / "sweep", progress=False),
    ):
        with pytest.raises(CheckpointError, match="which holds another sweep"):
            changed()
    with pytest.raises(ShapeError, match="at least two tokens"):
        sweep(model, TOKENS[:, :1], edits, progress=False)
    with pytest.raises(ConfigError, match=r"L9\.mlp"):
        run(model, [[Drop(sites="L9.mlp", sources="B1")]])


def test_an_edit_that_changes_nothing_has_no_effect():
    """A source of zeros, zeroed again; an edit that finds no token is an error all the same."""
    model = model_of()
    for parameter in (model.layers[1].attention.output.weight, model.layers[1].mlp.down.weight):
        parameter.data.zero_()
    found = run(model, [[Zero(sites="output", sources="B2")], [Zero(sites="output", sources="B1")]])
    assert (found[0].divergence, found[0].loss) == (0.0, 0.0)
    assert found[1].divergence > 1e-6
    with pytest.raises(EditError, match="never fired"):
        run(model, [[Zero(sites="output", sources="B1", positions=(99,))]])


def test_sources_and_pairs_are_dropped_together():
    model = model_of()
    by_source = {edits[0].sources: edits[0].sites for edits in every_source(model)}
    assert by_source["embedding"][0] == "L0.mlp"
    assert by_source["B3"] == ("L2.mlp", "output")
    pairs = [edits[0].sources for edits in every_pair(model, "L2.mlp")]
    assert len(pairs) == 6
    assert ("embedding", "B1") in pairs
    together = run(model, every_pair(model, "L2.mlp"))
    assert min(entry.divergence for entry in together) > 0
    assert every_pair(model, "L0.mlp") == []


@pytest.mark.parametrize("residual", [BLOCK, AttnRes()], ids=repr)
def test_estimates_are_the_effects_where_those_are_small(residual):
    model = model_of(residual, scale=0.05).double()
    estimates = {
        (one.site, one.part, one.source): one.loss.sum().item() for one in edge_estimates(model, TOKENS)
    }
    with torch.no_grad():
        clean = model(TOKENS)
    assert estimates.keys() == {(e.sites, e.part, e.sources) for [e] in every_edge(model)}

    def loss(logits):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum").item()

    exact = {}
    for [edit] in every_edge(model):
        edited = intervene(model, TOKENS, [edit]).logits
        exact[edit.sites, edit.part, edit.sources] = loss(edited) - loss(clean)
    found = rank_correlation([estimates[edge] for edge in exact], list(exact.values()), num_resamples=50)
    assert found.correlation > 0.7


@pytest.mark.parametrize("residual", [BLOCK, AttnRes(), MultiHead(num_heads=2)], ids=repr)
def test_an_estimate_is_a_derivative(residual):
    model = model_of(residual).double()
    source = record(model, TOKENS)["L2.mlp"].source_names[1]
    estimate = next(
        one for one in edge_estimates(model, TOKENS) if (one.site, one.source) == ("L2.mlp", source)
    )

    class Nudge:
        def begin(self, run):
            pass

        def write(self, write):
            return write

        def read(self, read):
            if str(read.site) != "L2.mlp":
                return read
            number = read.source_names.index(source)
            left = 1 - read.weights[number]
            change = read.weights * (read.weights[number] / left)
            change[number] = -read.weights[number]
            return read._replace(weights=read.weights + 1e-6 * change)

    def loss(tap=None):
        with torch.no_grad():
            logits = model(TOKENS, tap=tap)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum").item()

    assert estimate.loss.sum().item() == pytest.approx((loss(Nudge()) - loss()) / 1e-6, rel=1e-3)


def test_weights_that_are_no_shares_have_no_estimate():
    with pytest.raises(EditError, match="weights that sum to"):
        edge_estimates(model_of(HyperConnections()), TOKENS)


def test_the_agreement_of_a_planted_edge():
    """The query of one site is set by hand to read one source; dropping it has the largest effect."""
    model = model_of(scale=0.0)
    reader = model.residual.readers["L2_mlp"]
    with torch.no_grad():
        values = record(model, TOKENS, keep="values")["L2.mlp"].values
        reader.pseudo_query.copy_(8 * F.normalize(values[1].mean((0, 1)), dim=0))
    swept = run(model, every_edge(model))
    at_site = {
        entry.edits[0]["sources"]: entry.divergence for entry in swept if entry.edits[0]["sites"] == "L2.mlp"
    }
    weights = record(model, TOKENS)["L2.mlp"].weights.mean((1, 2))
    assert weights.argmax() == 1
    assert max(at_site, key=at_site.get) == "B1"
    effects = edge_effects(swept)
    row = effects.sites.index("L2.mlp")
    assert effects.weights[row, effects.sources.index("B1")].item() == pytest.approx(at_site["B1"])
    assert effects.weights.isnan().any()
    report = edge_agreement(record(model, TOKENS), swept, num_resamples=200)
    assert report.keys() == {"weight", "norm share", "projection share"}
    assert all(
        found.num_edges == len(swept) and found.low <= found.correlation <= found.high
        for found in report.values()
    )
    with pytest.raises(ConfigError, match="each drop one source"):
        edge_effects(run(model, [[Zero(sites="output", sources="B1")]]))


def test_rank_correlation_is_spearmans():
    rng = np.random.default_rng(0)
    one, other = rng.normal(size=40), rng.normal(size=40)
    ranks = [np.argsort(np.argsort(numbers)) for numbers in (one, other)]
    assert rank_correlation(one, other, num_resamples=10).correlation == pytest.approx(
        np.corrcoef(*ranks)[0, 1]
    )
    tied = rank_correlation([1.0, 1.0, 2.0, 3.0], [5.0, 5.0, 6.0, 7.0], num_resamples=10)
    assert tied.correlation == pytest.approx(1.0)
    assert np.isnan(rank_correlation([1.0] * 5, range(5), num_resamples=10).correlation)
    wide, narrow = (rank_correlation(one[:count], one[:count] + other[:count]) for count in (8, 40))
    assert wide.high - wide.low > narrow.high - narrow.low
    with pytest.raises(ShapeError, match="4 edges or more"):
        rank_correlation([1.0, 2.0], [1.0, 2.0])
