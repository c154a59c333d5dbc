"""The document that a page shows holds the numbers of the trace and of the statistics, and nothing else."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from page_content import Words, decoded, full_content, model_of, recorded, tokens_of

from attention_residuals import AttnRes, StandardResidual, page, record
from attention_residuals.errors import ConfigError, NonFiniteError, ShapeError
from attention_residuals.layers.residual import RULES
from attention_residuals.stats import (
    coherence,
    effective_distance,
    embedding_share,
    norm_shares,
    normalised_entropy,
    pair_distance,
    projection_shares,
    writer_weights,
)
from attention_residuals.trace import Drop, Recorder, Skip, divergence, intervene, source_identity, sweep


@pytest.fixture(scope="module")
def full():
    content = full_content()
    return content, page.payload(content)


@pytest.fixture(scope="module")
def single():
    trace = recorded(model_of(), tokens_of(9, rows=2)).trace
    return trace, page.payload(trace)["traces"][0]


def test_a_document_is_json_without_nan_and_comes_back_from_json(full):
    _, found = full
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["format"] == 1


def test_weights_and_shares_are_those_of_the_trace_bit_by_bit(single):
    trace, found = single
    arrays = {name: decoded(array) for name, array in found["arrays"].items()}
    for site, told in zip(trace, found["sites"], strict=True):
        rows = slice(told["first"], told["first"] + len(site.source_names))
        assert [one["name"] for one in told["sources"]] == list(site.source_names)
        assert [one["identity"] for one in told["sources"]] == list(map(source_identity, site.source_names))
        np.testing.assert_array_equal(arrays["weight"][rows], site.weights.numpy())
        np.testing.assert_array_equal(arrays["norm_share"][rows], norm_shares(trace, site.name).numpy())
        np.testing.assert_array_equal(
            arrays["projection_share"][rows], projection_shares(trace, site.name).numpy()
        )


def test_statistics_are_those_of_the_package(single):
    trace, found = single
    arrays = {name: decoded(array) for name, array in found["arrays"].items()}
    for number, site in enumerate(trace):
        own = {
            "entropy": normalised_entropy(trace, site.name),
            "distance": effective_distance(trace, site.name).mean.float(),
            "coherence": coherence(trace, site.name),
            "embedding_share": embedding_share(trace, site.name),
            "state_norm": site.state_norms,
        }
        for name, expected in own.items():
            np.testing.assert_array_equal(arrays[name][number], expected.numpy(), err_msg=name)
    np.testing.assert_array_equal(arrays["writer_norm"], trace.writer_norms.numpy())


@pytest.mark.parametrize("name", RULES)
def test_writer_weights_of_every_rule_are_those_of_the_package(name):
    trace = record(model_of(RULES[name]()), tokens_of(5))
    found = page.payload(trace)["traces"][0]
    weights = decoded(found["arrays"]["weight"])
    for site, rows in zip(trace, found["writer_rows"], strict=True):
        expected = writer_weights(site)
        expected = expected if expected.ndim == 3 else expected.mean(-1)
        assert rows[len(expected) :] == [-1] * (len(trace.writers) - len(expected))
        for row, weight in zip(rows, expected, strict=False):
            np.testing.assert_array_equal(weights[row], weight.float().numpy())


def test_writers_of_a_block_share_the_row_of_the_block(single):
    trace, found = single
    assert len(decoded(found["arrays"]["weight"])) == found["num_source_rows"]
    last = found["writer_rows"][-1]
    assert last[1] == last[2] != last[3]
    assert len(set(last)) == len(trace["output"].source_names)


def test_duplicate_sources_are_shown_as_one_and_the_page_says_so():
    trace = record(model_of(RULES["hc"]()), tokens_of(4))
    first = page.payload(trace)["traces"][0]["sites"][0]
    assert [source["name"] for source in first["sources"]] == ["stream 0"]
    assert first["merged"] == [["stream 1", "stream 0"], ["stream 2", "stream 0"], ["stream 3", "stream 0"]]


def test_groups_of_channels_are_averaged_and_the_page_says_so():
    trace = record(model_of(RULES["heads"](num_heads=4)), tokens_of(4))
    found = page.payload(trace)["traces"][0]
    np.testing.assert_array_equal(
        decoded(found["arrays"]["weight"])[1:3], trace["L0.mlp"].weights.mean(-1).numpy()
    )
    assert "mean over 4 groups" in found["cautions"][-1]


def test_padding_is_marked_and_its_numbers_are_missing_whatever_they_were():
    model, tokens = model_of(), tokens_of(6, rows=2)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, 4:] = False
    trace = record(model, tokens, mask=mask)
    broken = trace["L2.mlp"]
    weights = broken.weights.clone()
    weights[:, 1, 5] = torch.nan
    sites = tuple(replace(site, weights=weights) if site is broken else site for site in trace)
    found = page.payload(replace(trace, sites=sites))["traces"][0]
    numbers = decoded(found["arrays"]["weight"])
    assert np.isnan(numbers[:, 1, 4:]).all()
    assert np.isfinite(numbers[:, mask.numpy()]).all()
    assert found["tokens"]["mask"] == mask.int().tolist() == found["tokens"]["real"]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["weights", "contribution_norms", "state_norms"])
def test_a_number_that_is_not_finite_is_refused_with_its_site_and_token(tmp_path, what, number):
    trace = record(model_of(), tokens_of(6, rows=2))
    broken = trace["L2.mlp"]
    values = getattr(broken, what).clone()
    values[..., 1, 3] = number
    sites = tuple(replace(site, **{what: values}) if site is broken else site for site in trace)
    with pytest.raises(NonFiniteError, match=r"L2\.mlp.* at token 3 of text 1"):
        page.write(replace(trace, sites=sites), tmp_path / "a.html")
    assert not list(tmp_path.iterdir())


def test_what_a_writer_wrote_must_be_finite():
    trace = record(model_of(), tokens_of(6))
    norms = trace.writer_norms.clone()
    norms[3, 0, 2] = math.nan
    with pytest.raises(NonFiniteError, match=r"what L1\.attention wrote: nan at token 2 of text 0"):
        page.payload(replace(trace, writer_norms=norms))


def test_predictions_and_lens_hold_the_likeliest_tokens_with_their_texts(full):
    content, found = full
    (told,) = [one["predictions"] for one in found["traces"][:1]]
    probabilities = content.first.logits.softmax(-1).topk(5, dim=-1)
    np.testing.assert_array_equal(decoded(told["top_tokens"]), probabilities.indices.numpy())
    np.testing.assert_allclose(decoded(told["top_probabilities"]), probabilities.values.numpy(), rtol=1e-5)
    ids = set(probabilities.indices.flatten().tolist())
    assert {found["vocabulary"][str(number)] for number in ids} == set(Words().tokens(ids))
    lens = found["traces"][0]["lens"]
    np.testing.assert_array_equal(decoded(lens["top_tokens"]), content.first.lens.top_tokens.numpy())
    np.testing.assert_array_equal(decoded(lens["divergences"]), content.first.lens.divergences.numpy())
    assert np.isnan(decoded(lens["log_probabilities"])[:, :, -1]).all()
    own = content.first.logits.log_softmax(-1)[0, :-1].gather(-1, content.first.trace.tokens[0, 1:, None])
    np.testing.assert_allclose(
        decoded(told["log_probabilities"])[0, :-1], own.squeeze(-1).numpy(), rtol=1e-5, atol=1e-6
    )


def test_a_pair_holds_distances_from_the_first_pass_and_from_the_control(full):
    content, found = full
    first, second, control = (one.trace for one in content.recorded)
    for number, site in enumerate(first):
        for name, other in (("divergence", second), ("control", control)):
            np.testing.assert_array_equal(
                decoded(found["pair"][name])[number],
                pair_distance(first, other, site.name).divergence.numpy(),
            )
    moved = divergence(content.first.logits, content.second.logits).values
    np.testing.assert_array_equal(decoded(found["pair"]["prediction"]), moved.numpy())
    assert found["pair"]["aligned"]


@pytest.mark.parametrize(
    "second", [lambda: record(model_of(), tokens_of(7)), lambda: record(model_of(depth=2), tokens_of(6))]
)
def test_passes_that_do_not_align_are_compared_by_averages(second):
    found = page.payload(page.PageContent(first=record(model_of(), tokens_of(6)), second=second()))
    assert not found["pair"]["aligned"]
    assert found["pair"]["why"]
    assert found["pair"]["divergence"] is None


def test_predictions_of_other_vocabularies_are_not_compared(full):
    content, _ = full
    other = replace(content.second, logits=torch.nn.functional.pad(content.second.logits, (0, 9)))
    pair = page.payload(page.PageContent(first=content.first, second=other))["pair"]
    assert pair["aligned"]
    assert pair["prediction"] is None


def test_a_sweep_fills_cells_by_site_and_identity_and_other_edits_fill_lines(full):
    content, found = full
    for swept, told in zip(content.effects, found["effects"], strict=True):
        assert (told["divergence"], told["loss"]) == (swept.divergence, swept.loss)
        assert told["site"] == swept.edits[0]["sites"]
        assert told["source"] == source_identity(swept.edits[0]["sources"])
    model, tokens = model_of(), tokens_of(6)
    edits = [[Skip(layers=(1,))], [Drop(sites=("L1.mlp", "output"), sources="embedding")]]
    swept = sweep(model, tokens, edits, progress=False)
    told = page.payload(page.PageContent(first=record(model, tokens), effects=swept))["effects"]
    assert [(one["site"], one["source"]) for one in told] == [(None, None)] * 2
    assert told[1]["edits"] == ["Drop embedding at L1.mlp, output"]


def test_receipts_say_what_was_done_and_where(full):
    content, found = full
    (receipt,), (told,) = content.receipts, found["receipts"]
    assert told["edit"] == "Drop B1 at L2.*"
    assert told["places"] == list(receipt.places) == ["L2.attention", "L2.mlp"]
    assert (told["fired"], told["tokens"]) == (receipt.fired, receipt.tokens)
    assert told["largest_weight_change"] == receipt.largest_weight_change
    assert told["largest_state_change"] == receipt.largest_state_change


def test_content_that_makes_no_sense_is_refused():
    model, tokens = model_of(), tokens_of(6)
    trace = record(model, tokens)
    for wrong in ({}, {"second": trace}, {"first": trace, "control": trace}):
        with pytest.raises(ConfigError, match="first pass"):
            page.PageContent(**wrong)
    with pytest.raises(ShapeError, match="the same tokens"):
        page.Recorded(trace=trace, logits=model(tokens[:, :5]).detach())
    assert [one.name for one in page.PageContent(first=trace, second=trace).recorded] == ["A", "B"]


def test_a_trace_of_512_tokens_24_sites_and_9_sources_is_below_3_megabytes():
    model = model_of(AttnRes(sublayers_per_block=3), depth=12)
    found = page.payload(recorded(model, tokens_of(512)).trace)
    assert max(len(site["sources"]) for site in found["traces"][0]["sites"]) == 9
    assert len(found["traces"][0]["sites"]) == 25
    assert len(page.html(found)) < 3_000_000


def test_the_code_of_a_page_is_below_300_kilobytes():
    report = page.html(page.payload(page.PageContent(lead="Nothing.")), live=True)
    assert len(report.encode()) < 300_000


def test_a_standard_model_has_writer_weights_of_one():
    trace = record(model_of(StandardResidual()), tokens_of(4))
    found = page.payload(trace)["traces"][0]
    weights = decoded(found["arrays"]["weight"])
    assert {float(weights[row, 0, 0]) for row in found["writer_rows"][-1]} == {1.0}
    assert np.isnan(decoded(found["arrays"]["norm_share"])).all()


def test_the_edited_pass_without_its_mask_still_compares():
    model, tokens = model_of(), tokens_of(6)
    found = intervene(model, tokens, [Drop(sites="L1.mlp", sources="embedding")], tap=Recorder())
    pair = page.payload(page.PageContent(first=record(model, tokens), second=found.trace))["pair"]
    assert pair["aligned"]
    assert pair["prediction"] is None
