"""What a trace holds beside weights, and how it is made of texts."""

from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from layers.test_residual_rules import RULE_CONFIGS, Looker
from stats.planted import TEXTS, TOKENIZER, TOKENS, looked_at, model_of, parts_of

from attention_residuals.errors import ConfigError, NonFiniteError, TapError
from attention_residuals.inference import prefill
from attention_residuals.layers.residual import (
    AttnRes,
    Cumulative,
    HyperConnections,
    MultiHead,
    StandardResidual,
)
from attention_residuals.layers.tap import Chain, Pass
from attention_residuals.trace import Recorder, Trace, joined, record, trace_bytes

every_rule = pytest.mark.parametrize("config", RULE_CONFIGS.values(), ids=RULE_CONFIGS.keys())


@every_rule
def test_lengths_and_projections_are_those_of_weights_times_values(config):
    _, trace, looker = looked_at(config)
    for site, read in zip(trace, looker.reads, strict=True):
        parts = parts_of(read)
        state = parts.sum(0)
        assert_close(site.contribution_norms, parts.norm(dim=-1))
        assert_close(site.state_norms, state.norm(dim=-1))
        along = torch.einsum("sbtd,btd->sbt", parts, state / state.square().sum(-1, keepdim=True))
        assert_close(site.projections, along)
        assert_close(site.projections.sum(0), torch.ones(2, 5).double())
        assert site.inverse_norms is None or torch.equal(site.inverse_norms, read.inverse_norms)
    assert_close(trace.writer_norms, torch.stack([write.output.norm(dim=-1) for write in looker.writes]))
    assert trace.writers == tuple(write.writer for write in looker.writes)


@every_rule
def test_values_and_writes_are_kept_on_request_only(config):
    _, trace, looker = looked_at(config)
    for site, read in zip(trace, looker.reads, strict=True):
        assert torch.equal(site.values, torch.stack(read.values))
    assert torch.equal(trace.writes, torch.stack([write.output for write in looker.writes]))
    plain = looked_at(config, keep="routing")[1]
    assert plain.writes is None
    assert all(site.values is None for site in plain)


def test_what_to_keep_is_one_of_two():
    with pytest.raises(ConfigError, match="keep='all'"):
        Recorder.__init__.__wrapped__(Recorder(), "all")


@every_rule
@pytest.mark.parametrize("keep", ["routing", "values"])
def test_the_size_of_a_trace_is_known_before_the_model_runs(config, keep):
    model = model_of(config)
    assert trace_bytes(model, 10, keep) == record(model, TOKENS, keep=keep).num_bytes


def test_a_trace_that_would_be_too_large_is_refused_with_its_size_and_another_way():
    model = model_of(AttnRes())
    size = record(model, TOKENS).num_bytes
    assert record(model, TOKENS, max_bytes=size).num_bytes == size

    model.forward = None  # it must not even start
    with pytest.raises(ConfigError, match=r"10 tokens, of which a trace takes 0 MiB(.|\n)*tap=Summary\(\)"):
        record(model, TOKENS, max_bytes=size - 1)


def test_texts_run_after_an_end_of_text_and_padded_on_the_right():
    model = model_of(AttnRes(), TOKENIZER.vocab_size)
    trace = record(model, TEXTS, tokenizer=TOKENIZER)
    for row, text in enumerate(TEXTS):
        ids = [TOKENIZER.end_of_text, *TOKENIZER.encode(text)]
        assert trace.tokens[row, : len(ids)].tolist() == ids
        assert trace.mask[row].tolist() == [True] * len(ids) + [False] * (trace.tokens.shape[1] - len(ids))
        assert trace.token_texts[row][: len(ids)] == tuple(TOKENIZER.tokens(ids))
        assert trace.real[row].sum() == len(ids) - 1
        single = record(model, [text], tokenizer=TOKENIZER)
        assert single.mask is None
        for one, other in zip(trace, single, strict=True):
            assert_close(one.weights[:, row, : len(ids)], other.weights[:, 0])
            assert_close(one.projections[:, row, : len(ids)], other.projections[:, 0])


def test_special_tokens_are_known_by_their_ids_wherever_they_stand():
    model = model_of(AttnRes(), TOKENIZER.vocab_size)
    tokens = torch.tensor([[5, 0, 7, 0], [5, 6, 7, 8]])
    trace = record(model, tokens, tokenizer=TOKENIZER)
    assert torch.equal(trace.special, tokens == 0)
    assert torch.equal(trace.real, tokens != 0)
    assert record(model, tokens).special is None
    assert record(model, tokens).real.all()


@pytest.mark.parametrize("row", [[5, 6, 0, 0], [0, 0, 5, 6], [0, 0, 0, 0]])
def test_rows_that_look_padded_need_a_mask(row):
    model = model_of(AttnRes(), TOKENIZER.vocab_size)
    tokens = torch.tensor([[5, 6, 7, 8], row])
    with pytest.raises(ConfigError, match="the first is row 1"):
        record(model, tokens, tokenizer=TOKENIZER)
    mask = tokens != 0
    mask[1, -1] |= not mask[1].any()
    assert torch.equal(record(model, tokens, tokenizer=TOKENIZER, mask=mask).mask, mask)
    record(model, tokens)  # without a tokenizer nothing tells padding from text
    record(model, tokens[1:], tokenizer=TOKENIZER)  # a row alone needs no padding


def test_texts_need_a_tokenizer_and_bring_their_own_mask():
    model = model_of(AttnRes(), TOKENIZER.vocab_size)
    mask = torch.ones(3, 4, dtype=torch.bool)
    for texts, options in (
        (TEXTS, {}),
        ("low", {"tokenizer": TOKENIZER}),
        ([], {"tokenizer": TOKENIZER}),
        (TEXTS, {"tokenizer": TOKENIZER, "mask": mask}),
    ):
        with pytest.raises(ConfigError, match="a list of texts and a tokenizer"):
            record(model, texts, **options)


def test_duplicate_sources_are_found_and_said_and_merged(tmp_path):
    trace = record(model_of(Cumulative(sublayers_per_block=2)), TOKENS)
    assert trace["L0.attention"].same_as == (0, 0)
    assert trace["L1.attention"].same_as == (0, 1, 1)
    assert trace["L1.mlp"].same_as == (0, 1, 2)
    assert any(
        caution.startswith("at 3 reads (L0.attention, L1.attention, L2.attention)")
        for caution in trace.cautions
    )
    merged = trace["L1.attention"].distinct()
    assert merged.source_names == ("embedding", "through B1")
    assert_close(merged.weights[1], trace["L1.attention"].weights[1:].sum(0))
    assert_close(merged.projections.sum(0), torch.ones(2, 5).double())
    assert_close(merged.contribution_norms[1], trace["L1.attention"].contribution_norms[1:].sum(0))
    trace.save(tmp_path)
    assert Trace.load(tmp_path) == trace
    plain = record(model_of(AttnRes()), TOKENS)
    assert all(site.distinct() is site for site in plain)
    assert plain.cautions == ()


def test_duplicates_with_weights_of_two_signs_cancel():
    class Signs(Looker):
        def read(self, read):
            weights = read.weights.clone()
            weights[:2] = torch.tensor([3.0, -1.0]).double()[:, None, None]
            return read._replace(weights=weights)

    model, recorder = model_of(HyperConnections(streams=2)), Recorder("values")
    with torch.no_grad():
        model(TOKENS, tap=Chain(Signs(), recorder))
    first = recorder.trace(model)["L0.attention"]
    assert first.same_as == (0, 0)
    merged = first.distinct()
    assert_close(merged.contribution_norms[0], 2 * first.values[0].norm(dim=-1))
    assert_close(merged.contribution_norms[0], first.state_norms)


def test_identical_sources_that_are_other_tensors_are_duplicates_and_zeros_with_groups_too():
    class Copies(Looker):
        def read(self, read):
            if str(read.site) != "L1.mlp":
                return read
            zeros = torch.zeros_like(read.values[0])
            return read._replace(values=(zeros, read.values[1], zeros.clone(), read.values[3]))

    for config in (AttnRes(), MultiHead(num_heads=2)):
        model, recorder = model_of(config), Recorder("values")
        with torch.no_grad():
            model(TOKENS, tap=Chain(Copies(), recorder))
        site = recorder.trace(model)["L1.mlp"]
        assert site.same_as == (0, 1, 0, 3)
        merged = site.distinct()
        assert merged.contribution_norms[0].eq(0).all()
        assert merged.values.shape[0] == merged.inverse_norms.shape[0] == 3
        assert merged.logits is None


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_activations_that_are_no_numbers_name_their_writer_or_site(number):
    model = model_of(AttnRes())
    model.layers[1].mlp.down.weight.data[0] = number
    with pytest.raises(NonFiniteError, match=r"what L1\.mlp wrote, at 10 of 10 tokens"):
        record(model, TOKENS)
    model = model_of(AttnRes())
    model.residual.readers["L2_mlp"].pseudo_query.data[0] = number
    with pytest.raises(NonFiniteError) as caught:
        record(model, TOKENS)
    assert caught.value.__notes__ == ["the next read would have been at L2.mlp (in)"]

    class Breaks(Looker):
        def read(self, read):
            return read._replace(weights=read.weights * number) if str(read.site) == "L1.attention" else read

    recorder = Recorder()
    with pytest.raises(NonFiniteError, match=r"the read at L1\.attention"):
        model_of(AttnRes())(TOKENS, tap=Chain(Breaks(), recorder))


def test_what_padding_holds_is_nobodys_business():
    class Breaks(Looker):
        def write(self, write):
            output = write.output.clone()
            output[0, 0] = torch.nan
            return write._replace(output=output) if write.writer == "L2.mlp" else write

    mask = torch.tensor([[False] + [True] * 4, [True] * 5])
    model, recorder = model_of(StandardResidual()), Recorder()
    with torch.no_grad():
        model(TOKENS, mask=mask, tap=Chain(Breaks(), recorder))
    trace = recorder.trace(model)
    assert trace["output"].state_norms[0, 0].isnan()
    assert trace == trace
    assert "mean of 9 tokens" in repr(trace)


def test_a_recorder_that_missed_writes_says_so():
    model, recorder = model_of(AttnRes()), Recorder()
    recorder.write = lambda write: write
    with torch.no_grad():
        model(TOKENS, tap=recorder)
    with pytest.raises(TapError, match="what embedding wrote"):
        recorder.trace(model)


def test_a_mask_of_a_cached_pass_is_that_of_the_pass():
    recorder, mask = Recorder(), torch.tensor([[False, True, True, True]])
    recorder.begin(Pass(TOKENS[:1, :2], torch.tensor([[2, 3]]), mask))
    assert recorder._real.tolist() == [[True, True]]


@pytest.mark.parametrize(
    "config", [Cumulative(sublayers_per_block=2), HyperConnections(), MultiHead(num_heads=2)]
)
def test_joined_traces_hold_all_that_one_of_the_whole_text_does(config):
    model, recorders = model_of(config, TOKENIZER.vocab_size), []

    def tap():
        recorders.append(Recorder("values"))
        return recorders[-1]

    prefill(model, TOKENS, chunk=2, tap=tap)
    whole = record(model, TOKENS, keep="values", tokenizer=TOKENIZER)
    parts = joined([recorder.trace(model, tokenizer=TOKENIZER) for recorder in recorders])
    assert torch.equal(parts.special, whole.special)
    assert_close(parts.writes, whole.writes)
    assert_close(parts.writer_norms, whole.writer_norms)
    for one, other in zip(parts, whole, strict=True):
        assert one.same_as == other.same_as
        assert one.tensors().keys() == other.tensors().keys()
        for name, tensor in one.tensors().items():
            assert_close(tensor, other.tensors()[name])


def test_sources_that_are_the_same_in_one_part_only_are_not_the_same():
    model = model_of(Cumulative(sublayers_per_block=2))
    first, second = (
        replace(record(model, TOKENS[:, :2]), positions=torch.tensor([[n, n + 1]] * 2)) for n in (0, 2)
    )
    site = second["L1.attention"]
    apart = replace(second, sites=tuple(replace(s, same_as=(0, 1, 2)) if s is site else s for s in second))
    assert joined([first, second])["L1.attention"].same_as == (0, 1, 1)
    assert joined([first, apart])["L1.attention"].same_as == (0, 1, 2)
