"""How traces compare, and how they show themselves: in a notebook, as a data frame, as a data set."""

import importlib
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from closeness import assert_close
from stats.planted import TEXTS, TOKENIZER, TOKENS, model_of

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import (
    AttnRes,
    Cumulative,
    MultiHead,
    StandardResidual,
)
from attention_residuals.models import Decoder, presets
from attention_residuals.trace import SiteTrace, record
from attention_residuals.trace.site import same


def test_traces_compare_by_their_numbers():
    model = model_of(AttnRes())
    one, other = record(model, TOKENS), record(model, TOKENS)
    assert one == other
    assert one["L1.mlp"] == other["L1.mlp"]
    assert one != "trace"
    assert one["L1.mlp"] != "L1.mlp"
    changed = replace(one["L1.mlp"], weights=one["L1.mlp"].weights + 1e-9)
    assert changed != one["L1.mlp"]
    assert replace(one, sites=(*one.sites[:3], changed, *one.sites[4:])) != one
    assert replace(one, width=1) != one
    assert replace(one, mask=torch.ones(2, 5, dtype=torch.bool)) != one
    assert record(model, TOKENS.flip(0)) != one
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


def test_tensors_are_the_same_with_their_dtype_shape_and_nan():
    numbers = torch.tensor([1.0, torch.nan])
    assert same(numbers, numbers.clone())
    assert not same(numbers, numbers.double())
    assert not same(numbers, numbers[:1])
    assert not same(numbers, torch.tensor([torch.nan, 1.0]))
    assert not same(numbers, None)
    assert same(None, None)
    assert not same(1, True)


def test_a_trace_has_a_length_and_gives_its_reads_in_order():
    trace = record(model_of(AttnRes()), TOKENS)
    assert len(trace) == 7
    assert [site.name for site in trace] == [site.name for site in trace.sites]
    assert "L1.mlp" in trace
    assert "L9.mlp" not in trace
    assert all(isinstance(site, SiteTrace) for site in trace)


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        assert not attrs

    def handle_data(self, data):
        self.text.append(data)


def test_in_a_notebook_texts_are_data_and_never_markup():
    model = model_of(Cumulative(sublayers_per_block=2), TOKENIZER.vocab_size)
    trace = record(model, TEXTS, tokenizer=TOKENIZER)
    hostile = replace(
        trace,
        token_texts=tuple(("<script>", *row[1:]) for row in trace.token_texts),
        sites=tuple(
            replace(site, source_names=("<img onerror=x>", *site.source_names[1:])) for site in trace
        ),
        rule={"type": "<iframe>"},
    )
    for shown in (trace, hostile):
        cells = Cells()
        cells.feed(shown._repr_html_())
        assert set(cells.tags) == {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td", "code"}
        assert cells.tags.count("tr") == len(trace) + 1
        text = " ".join("".join(cells.text).split())
        assert "caution: sources are cumulative" in text
    assert "<img onerror=x>" in text
    assert "<script>" in text


def test_a_table_leaves_out_small_weights_and_says_how_many():
    shape = presets.scaled(6, vocab_size=40, residual=AttnRes())
    trace = record(Decoder(shape), TOKENS)
    assert "(4 more)" in trace._repr_html_()
    assert "(4 more)" in repr(trace)


@pytest.mark.parametrize(
    "config", [AttnRes(sublayers_per_block=2), MultiHead(num_heads=2), StandardResidual()]
)
def test_a_data_frame_has_a_line_for_each_site_source_and_token(config):
    pytest.importorskip("pandas")
    model = model_of(config, TOKENIZER.vocab_size)
    trace = record(model, TEXTS, tokenizer=TOKENIZER)
    table = trace.to_pandas()
    assert len(table) == sum(len(site.source_names) for site in trace) * trace.tokens.numel()
    assert list(table.columns) == ["site", "part", "source", "row", "position", "token_id", "token", "real",
                                   "weight", "logit", "norm_share", "projection_share"]  # fmt: skip
    site = trace["output"]
    source = len(site.source_names) - 1
    lines = table[(table.site == "output") & (table.source == site.source_names[source])]
    batch, length = trace.tokens.shape
    assert lines.row.tolist() == [row for row in range(batch) for _ in range(length)]
    assert lines.position.tolist() == list(range(length)) * batch
    assert lines.weight.tolist() == pytest.approx(site.token_weights[source].flatten().tolist())
    line = lines.to_dict("records")[length + 2]
    assert line["token_id"] == trace.tokens[1, 2]
    assert line["token"] == trace.token_texts[1][2]
    assert line["real"] == trace.real[1, 2]
    assert line["weight"] == pytest.approx(site.token_weights[source, 1, 2].item())
    assert line["projection_share"] == pytest.approx(site.projections[source, 1, 2].item())
    share = site.contribution_norms[source, 1, 2] / site.contribution_norms[:, 1, 2].sum()
    assert line["norm_share"] == pytest.approx(share.item())
    if site.logits is None:
        assert np.isnan(line["logit"])
    else:
        logits = site.logits if site.logits.ndim == 3 else site.logits.mean(-1)
        assert line["logit"] == pytest.approx(logits[source, 1, 2].item())
    assert record(model, trace.tokens).to_pandas().token.eq("").all()


def test_a_dataset_has_axes_read_source_row_and_token():
    model = model_of(AttnRes(sublayers_per_block=2), TOKENIZER.vocab_size)
    trace = record(model, TEXTS, tokenizer=TOKENIZER)
    told = trace.to_xarray()
    assert told.weight.dims == ("read", "source", "row", "token")
    assert list(told.source.values) == ["embedding", "B1", "B2", "B3"]
    assert list(told.read.values) == [site.name for site in trace]
    weights = torch.from_numpy(told.weight.sel(read="L1.mlp").values)
    assert_close(weights[:3], trace["L1.mlp"].weights)
    assert weights[3].isnan().all()
    assert told.text.values[0, 1] == trace.token_texts[0][1]
    assert "text" not in record(model, trace.tokens).to_xarray().coords


@pytest.mark.parametrize(("package", "method"), [("pandas", "to_pandas"), ("xarray", "to_xarray")])
def test_a_missing_package_is_named_with_what_to_do(monkeypatch, package, method):
    def missing(name):
        raise ModuleNotFoundError(name)

    trace = record(model_of(AttnRes()), TOKENS)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        getattr(trace, method)()
