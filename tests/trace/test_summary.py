"""Streaming summaries: the numbers of full traces, in memory that does not grow."""

import gc
import math

import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st
from layers.test_residual_rules import RULE_CONFIGS, Looker
from stats.planted import TEXTS, TOKENIZER, TOKENS, model_of, one_hot, planted, uniform

from attention_residuals.errors import ConfigError, NonFiniteError, TapError
from attention_residuals.layers.residual import AttnRes, Cumulative, MultiHead
from attention_residuals.layers.tap import Chain
from attention_residuals.stats import coherence, normalised_entropy
from attention_residuals.trace import Summary, record

every_rule = pytest.mark.parametrize("config", RULE_CONFIGS.values(), ids=RULE_CONFIGS.keys())
MASK = torch.tensor([[True] * 5, [False] * 2 + [True] * 3])


def streamed(model, batches, summary=None):
    summary = Summary() if summary is None else summary
    with torch.no_grad():
        for tokens, mask in batches:
            model(tokens, mask=mask, tap=summary)
    return summary


@every_rule
def test_a_stream_has_the_statistics_of_the_full_traces(config):
    model = model_of(config)
    batches = [(TOKENS, MASK), (TOKENS.flip(1), None), (TOKENS[:1, :3], None)]
    summary = streamed(model, batches)
    traces = [record(model, tokens, mask=mask) for tokens, mask in batches]
    assert summary.num_tokens == 8 + 10 + 3

    def over_all(number):
        columns = [number(trace)[..., trace.real].double() for trace in traces]
        return torch.cat(columns, dim=-1)

    assert [site.name for site in summary] == [site.name for site in traces[0]]
    for site in summary:
        weights = over_all(lambda trace, site=site: trace[site.name].distinct().token_weights)
        shares = weights.abs() / weights.abs().sum(0)
        assert site.num_tokens == weights.shape[1] == 21
        assert_close(site.weights, weights.mean(1))
        assert (site.variances - weights.var(1, correction=0)).abs().max() < 1e-14
        assert_close(site.shares, shares.mean(1))
        assert (site.share_variances - shares.var(1, correction=0)).abs().max() < 1e-14
        assert_close(site.norm_shares, over_all(lambda t, s=site: t[s.name].distinct().norm_shares).mean(1))
        assert_close(site.projections, over_all(lambda t, s=site: t[s.name].distinct().projections).mean(1))
        assert site.histogram.sum(1).tolist() == [21] * len(site.source_names)
        if len(site.source_names) > 1:
            entropies = over_all(lambda trace, site=site: normalised_entropy(trace, site.name))
            assert site.normalised_entropy == pytest.approx(entropies.mean().item(), rel=1e-12)
        else:
            assert math.isnan(site.entropy)
            assert math.isnan(site.normalised_entropy)


def test_histograms_are_those_of_torch():
    model = model_of(AttnRes())
    summary, trace = streamed(model, [(TOKENS, None)]), record(model, TOKENS)
    for site in trace:
        for source, counts in zip(site.weights, summary[site.name].histogram, strict=True):
            assert torch.equal(counts, source.flatten().histc(20, 0, 1).long())


def test_weights_outside_of_0_and_1_are_counted_at_the_ends():
    weights = torch.tensor([-3.0, 2.0, 0.999, 0.05]).double().view(4, 1, 1)
    counts = Summary().add(planted(weights))["output"].histogram
    assert counts.argmax(1).tolist() == [0, 19, 19, 1]
    assert counts.sum() == 4


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(2, 5), st.integers(0, 99))
def test_how_tokens_are_cut_into_batches_does_not_matter(lengths, count, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(count, 1, sum(lengths), generator=generator, dtype=torch.float64)
    weights = logits.softmax(0)
    outputs = torch.randn(count, 1, sum(lengths), 8, generator=generator, dtype=torch.float64)
    whole, cut = Summary().add(planted(weights, outputs=outputs)), Summary()
    for part, output in zip(weights.split(lengths, 2), outputs.split(lengths, 2), strict=True):
        cut.add(planted(part, outputs=output))
    one, other = whole["output"], cut["output"]
    for name in ("weights", "shares", "norm_shares", "projections"):
        assert_close(getattr(one, name), getattr(other, name))
    for name in ("variances", "share_variances"):
        assert (getattr(one, name) - getattr(other, name)).abs().max() < 1e-14
    assert torch.equal(one.histogram, other.histogram)
    assert one.entropy == pytest.approx(other.entropy, rel=1e-10)


def test_a_small_variance_beside_a_large_mean_is_not_lost():
    tokens = 10_000
    weights = 1e4 + 1e-3 * torch.randn(1, 1, tokens, generator=torch.Generator().manual_seed(0)).double()
    outputs, summary = torch.ones(1, 1, 100, 8).double(), Summary()
    for part in weights.split(100, 2):
        summary.add(planted(part, outputs=outputs))
    assert summary["output"].variances.item() == pytest.approx(weights.var(correction=0).item(), rel=1e-6)


def test_padding_changes_nothing_and_special_tokens_are_left_out():
    model = model_of(AttnRes(), TOKENIZER.vocab_size)
    padded = Summary(tokenizer=TOKENIZER).add(record(model, TEXTS, tokenizer=TOKENIZER))
    single = Summary(tokenizer=TOKENIZER)
    for text in TEXTS:
        ids = torch.tensor([[TOKENIZER.end_of_text, *TOKENIZER.encode(text)]])
        streamed(model, [(ids, None)], single)
    assert padded.num_tokens == single.num_tokens == sum(len(TOKENIZER.encode(text)) for text in TEXTS)
    for one, other in zip(padded, single, strict=True):
        assert_close(one.weights, other.weights)
        assert_close(one.variances, other.variances, 1e-9)


def test_looking_changes_no_bit():
    model = model_of(MultiHead(num_heads=2))
    assert torch.equal(model(TOKENS, tap=Summary()), model(TOKENS))


def test_memory_does_not_grow_with_the_number_of_tokens():
    model, summary = model_of(AttnRes(), dtype=torch.float32), Summary()

    def count():
        gc.collect()
        return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))

    tokens = torch.randint(40, (4, 64))
    streamed(model, [(tokens, None)], summary)
    size, tensors = summary.num_bytes, count()
    streamed(model, [(tokens.roll(n), None) for n in range(20)], summary)
    assert summary.num_tokens == 21 * 256
    assert summary.num_bytes == size < 20_000
    assert count() == tensors


def test_duplicates_are_one_and_others_than_before_are_refused():
    model = model_of(Cumulative(sublayers_per_block=2))
    summary = streamed(model, [(TOKENS, None)])
    assert summary["L1.attention"].source_names == ("embedding", "through B1")
    assert math.isnan(summary["L0.attention"].entropy)

    class Copies(Looker):
        def read(self, read):
            if str(read.site) != "L1.mlp":
                return read
            return read._replace(values=(read.values[1], *read.values[1:]))

    with torch.no_grad(), pytest.raises(TapError, match=r"2 distinct sources at L1\.mlp"):
        model(TOKENS, tap=Chain(Copies(), summary))
    with pytest.raises(TapError, match="make a Summary for each model"):
        streamed(model_of(AttnRes()), [(TOKENS, None)], summary)


def test_a_batch_of_padding_adds_nothing():
    summary = Summary().add(planted(uniform(3), mask=torch.zeros(1, 3, dtype=torch.bool)))
    assert summary.num_tokens == summary["output"].num_tokens == 0
    assert summary["output"].weights.isnan().all()
    assert summary["output"].variances.isnan().all()
    summary.add(planted(one_hot(1, 3)))
    assert summary["output"].weights.tolist() == [0.0, 1.0, 0.0]
    assert summary["output"].entropy == 0.0


def test_reads_are_found_by_name_listed_and_shown():
    shape = model_of(AttnRes())
    summary = streamed(shape, [(TOKENS, None)])
    assert len(summary) == 7
    assert "L1.mlp" in summary
    assert "L1.mpl" not in summary
    with pytest.raises(ConfigError, match=r"did you mean 'L1\.mlp'"):
        summary["L1.mpl"]
    site = summary["L0.mlp"]
    lines = repr(summary).splitlines()
    assert lines[0] == "depth routing, 7 sites, mean of 10 tokens (standard deviation)"
    shown = f"embedding {site.weights[0]:.2f} ({site.variances[0].sqrt():.2f})"
    assert lines[2].startswith("L0.mlp ")
    assert shown in lines[2]
    many = Summary().add(planted(uniform(12)))
    assert repr(many).endswith("(3 more)")


def test_a_read_outside_of_a_pass_and_activations_that_are_no_numbers_are_refused():
    model, summary = model_of(AttnRes()), Summary()
    looker = Looker()
    model(TOKENS, tap=looker)
    with pytest.raises(TapError, match=r"a read at L0\.attention outside of a pass"):
        summary.read(looker.reads[0])
    model.layers[0].attention.output.weight.data[0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"what L0\.attention wrote"):
        model(TOKENS, tap=summary)


def test_coherence_and_summary_agree_on_lengths():
    model = model_of(AttnRes())
    trace = record(model, TOKENS)
    assert coherence(trace, "output").le(1 + 1e-12).all()
