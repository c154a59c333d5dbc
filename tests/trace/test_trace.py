import json
import shutil
from pathlib import Path

import pytest
import torch
from closeness import assert_close
from torch.nn import functional as F

from attention_residuals.errors import CheckpointError, ConfigError, TapError
from attention_residuals.inference import Engine
from attention_residuals.layers.residual import (
    AttnRes,
    Cumulative,
    HyperConnections,
    Inkling2,
    MultiHead,
    StandardResidual,
    ValueQuery,
)
from attention_residuals.models import Decoder, presets
from attention_residuals.stats import mixing_matrix
from attention_residuals.trace import (
    GradientRecorder,
    Recorder,
    Trace,
    joined,
    record,
    record_generation,
    routing_table,
)

TOKENS = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])


class Words:
    def tokens(self, ids):
        return [f"w{number}" for number in ids]


def model_of(residual):
    model = Decoder(presets.scaled(4, vocab_size=40, residual=residual))
    for name, parameter in model.named_parameters():
        if name.endswith("pseudo_query"):
            parameter.data.normal_()
    return model


CONFIGS = {
    "standard": StandardResidual(),
    "full": AttnRes(sublayers_per_block=1),
    "block": AttnRes(sublayers_per_block=3),
    "heads": MultiHead(num_heads=2),
    "inkling2": Inkling2(sublayers_per_block=4),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request):
    return model_of(request.param)


def equal(one: Trace, other: Trace) -> bool:
    def same(a, b):
        return a is b is None or (torch.equal(a, b) and a.dtype == b.dtype)

    tensors = [(one.tokens, other.tokens), (one.positions, other.positions), (one.mask, other.mask)]
    for a, b in zip(one.sites, other.sites, strict=True):
        assert (a.site, a.part, a.source_names, a.writers) == (b.site, b.part, b.source_names, b.writers)
        tensors += [(a.weights, b.weights), (a.logits, b.logits), (a.source_norms, b.source_norms)]
        tensors += [(a.membership, b.membership)]
    texts = (one.token_texts, one.width, one.rule, one.semantics, one.about)
    return all(same(a, b) for a, b in tensors) and texts == (
        other.token_texts,
        other.width,
        other.rule,
        other.semantics,
        other.about,
    )


def test_recording_changes_no_bit_of_the_logits(model):
    recorder = Recorder()
    assert torch.equal(model(TOKENS, mask=MASK), model(TOKENS, mask=MASK, tap=recorder))
    trace = recorder.trace(model)
    assert len({site.site for site in trace.sites}) == 9
    assert len({site.name for site in trace.sites}) == len(trace.sites)


def test_recording_changes_no_bit_of_the_gradients(model):
    gradients = []
    for tap in (None, Recorder(), GradientRecorder()):
        model.zero_grad()
        F.cross_entropy(model(TOKENS, tap=tap).flatten(0, 1), TOKENS.flatten()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for other in gradients[1:]:
        assert all(torch.equal(one, two) for one, two in zip(gradients[0], other, strict=True))


def test_a_trace_comes_back_from_disk_with_the_same_bits(model, tmp_path):
    for mask in (None, MASK):
        trace = record(model, TOKENS, mask=mask)
        folder = tmp_path / str(mask is None)
        trace.save(folder)
        assert equal(Trace.load(folder), trace)


def test_a_site_is_found_by_name_and_an_unknown_one_gets_the_nearest(model):
    trace = record(model, TOKENS)
    assert trace["L2.mlp"].site == "L2.mlp"
    with pytest.raises(ConfigError, match=r"did you mean 'L2\.mlp'"):
        trace["L2.mpl"]


def test_a_read_of_several_is_found_by_its_part():
    trace = record(model_of(ValueQuery()), TOKENS)
    assert trace["L2.attention.v"].part == "v"
    assert trace["L2.attention"].part == "in"
    assert "L2.attention.v" in repr(trace)


def test_a_trace_says_what_to_bear_in_mind_with_its_rule(tmp_path):
    expected = {
        AttnRes(sublayers_per_block=3): (),
        StandardResidual(): (),
        Cumulative(): ("sources are cumulative", "a learned bias", "the output has no weights"),
        Inkling2(): ("values are normalised",),
    }
    for number, (config, beginnings) in enumerate(expected.items()):
        record(model_of(config), TOKENS).save(tmp_path / str(number))
        trace = Trace.load(tmp_path / str(number))
        assert len(trace.cautions) == len(beginnings)
        for caution, beginning in zip(trace.cautions, beginnings, strict=True):
            assert caution.startswith(beginning)
            assert f"caution: {caution}" in repr(trace)


def test_weights_of_groups_of_channels_are_averaged_for_a_table():
    site = record(model_of(MultiHead(num_heads=2)), TOKENS)["L1.mlp"]
    assert site.weights.shape == (4, 2, 7, 2)
    assert_close(site.token_weights, (site.weights[..., 0] + site.weights[..., 1]) / 2)


def test_recorded_weights_are_those_of_the_reference_on_the_recorded_logits():
    trace = record(model_of(AttnRes(sublayers_per_block=3)), TOKENS)
    for site in trace.sites:
        assert_close(site.weights, site.logits.softmax(0))
        assert_close(site.weights.sum(0), torch.ones(2, 7))


def test_source_norms_are_lengths_of_the_sources():
    model = model_of(AttnRes(sublayers_per_block=3))
    trace = record(model, TOKENS)
    assert_close(trace["L0.mlp"].source_norms[0], model.embedding(TOKENS).norm(dim=-1))


def test_the_table_names_every_site_and_its_sources():
    trace = record(model_of(AttnRes(sublayers_per_block=3)), TOKENS, mask=MASK)
    lines = repr(trace).splitlines()
    assert lines[0] == "depth routing, AttnRes, 9 sites, 2 x 7 tokens: mean of 12 tokens"
    assert [line.split()[0] for line in lines[1:]] == [site.site for site in trace.sites]
    mean = trace["output"].weights[:, MASK].mean(1)
    assert lines[-1].split() == ["output", "embedding", f"{mean[0]:.2f}", "B1", f"{mean[1]:.2f}", "B2",
                                 f"{mean[2]:.2f}", "B3.open@L3.mlp", f"{mean[3]:.2f}"]  # fmt: skip


def test_the_table_of_one_token_shows_its_largest_weights():
    trace = record(model_of(AttnRes(sublayers_per_block=1)), TOKENS)
    line = routing_table(trace, token=(1, 4), num_sources=2).splitlines()[-1]
    top = trace["output"].weights[:, 1, 4].topk(2).indices.sort().values
    assert all(trace["output"].source_names[index] in line for index in top)
    assert line.endswith("(7 more)")


def test_token_texts_come_from_the_tokenizer():
    recorder, model = Recorder(), model_of(StandardResidual())
    model(TOKENS, tap=recorder)
    trace = recorder.trace.__wrapped__(recorder, model, tokenizer=Words())
    assert trace.token_texts[1][0] == f"w{TOKENS[1, 0]}"


def test_a_recorder_is_for_one_pass(model):
    recorder = Recorder()
    with pytest.raises(TapError, match="no forward pass"):
        recorder.trace(model)
    model(TOKENS, tap=recorder)
    with pytest.raises(TapError, match="a second forward pass"):
        model(TOKENS, tap=recorder)


def test_gradient_magnitudes_are_those_of_autograd():
    model, recorder = model_of(StandardResidual()), GradientRecorder()
    loss = model(TOKENS, tap=recorder).square().mean()
    with pytest.raises(TapError, match="no gradient at embedding"):
        recorder.magnitudes()
    loss.backward()
    magnitudes = recorder.magnitudes()
    assert len(magnitudes) == 9

    stream = model.embedding(TOKENS).detach().requires_grad_()
    handle = model.embedding.register_forward_hook(lambda module, args, output: stream)
    (gradient,) = torch.autograd.grad(model(TOKENS).square().mean(), stream)
    handle.remove()
    assert magnitudes["embedding"] == pytest.approx(gradient.square().mean().sqrt().item(), rel=1e-5)


def test_a_trace_is_not_overwritten(model, tmp_path):
    record(model, TOKENS).save(tmp_path)
    with pytest.raises(CheckpointError, match="holds a trace"):
        record(model, TOKENS).save(tmp_path)


def test_a_damaged_or_newer_trace_is_refused(model, tmp_path):
    record(model, TOKENS).save(tmp_path)
    tensors = tmp_path / "trace.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-3])
    with pytest.raises(CheckpointError, match="another checksum"):
        Trace.load(tmp_path)
    tensors.unlink()
    with pytest.raises(CheckpointError, match="no file"):
        Trace.load(tmp_path)
    tensors.write_bytes(whole)
    description = json.loads((tmp_path / "trace.json").read_text())
    (tmp_path / "trace.json").write_text(json.dumps({**description, "format": 3}))
    with pytest.raises(CheckpointError, match="update attention-residuals"):
        Trace.load(tmp_path)
    (tmp_path / "trace.json").write_text(json.dumps({**description, "format": 1}))
    with pytest.raises(CheckpointError, match="record the trace again"):
        Trace.load(tmp_path)
    del description["rule"]
    (tmp_path / "trace.json").write_text(json.dumps(description))
    with pytest.raises(CheckpointError, match="'rule'"):
        Trace.load(tmp_path)


@pytest.mark.parametrize("place", [0.3, 0.6, 0.9])
def test_a_trace_with_a_flipped_bit_is_refused(tmp_path, place):
    record(model_of(StandardResidual()), TOKENS).save(tmp_path)
    path = tmp_path / "trace.safetensors"
    raw = bytearray(path.read_bytes())
    raw[int(len(raw) * place)] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="another checksum"):
        Trace.load(tmp_path)


def test_the_tensors_of_another_trace_are_refused(tmp_path):
    model = model_of(StandardResidual())
    for name, tokens in (("one", TOKENS), ("other", TOKENS.flip(1))):
        record(model, tokens).save(tmp_path / name)
    shutil.copy(tmp_path / "other" / "trace.safetensors", tmp_path / "one" / "trace.safetensors")
    with pytest.raises(CheckpointError, match="another checksum"):
        Trace.load(tmp_path / "one")


class Killed(BaseException):
    """Ends the process, as a kill would."""


@pytest.mark.parametrize("writes", [1, 2])
def test_a_trace_is_whole_or_not_there_and_can_be_saved_again(monkeypatch, tmp_path, writes):
    trace, replace, calls = record(model_of(StandardResidual()), TOKENS), Path.replace, []

    def dies(path, target):
        calls.append(target)
        if len(calls) == writes:
            raise Killed
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", dies)
        with pytest.raises(Killed):
            trace.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"no file .*trace\.json"):
        Trace.load(tmp_path)
    trace.save(tmp_path)
    assert equal(Trace.load(tmp_path), trace)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.json", "trace.safetensors"]


GARBLED = {
    "sites": [None, 3, {"site": 1}, [3], [{"site": "L0.mlp"}], [{"site": "a", "part": "in", "sources": "abc"}],
              [{"site": "a", "part": "in", "sources": [1]}], [{"site": 1, "part": "in", "sources": ["a"]}],
              [{"site": "a", "part": "in", "sources": ["a", "b", "c"]}]],
    "token_texts": [None, "abc", [3], [["a"], ["b"]], [[1] * 7] * 2, [["a"] * 7]],
    "width": ["8", None, True],
    "rule": [None, "AttnRes", []],
    "about": [None, 3],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GARBLED for value in GARBLED[name]])
def test_a_description_of_wrong_types_is_refused(tmp_path, name, value):
    record(model_of(StandardResidual()), TOKENS).save(tmp_path)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(CheckpointError, match=r"trace\.json"):
        Trace.load(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="while writing"):
        record(model, TOKENS).save(tmp_path / "file" / "trace")


@pytest.mark.parametrize("config", [*CONFIGS.values(), HyperConnections()], ids=repr)
def test_a_recorded_generation_is_the_trace_of_one_pass_over_its_text(config):
    model = model_of(config).double().requires_grad_(False)
    pieces, trace = record_generation(Engine(model, chunk=2), [5, 6, 7, 8, 9], max_new_tokens=4)
    full = record(model, trace.tokens)
    assert trace.tokens[0].tolist() == [5, 6, 7, 8, 9, *(piece.token for piece in pieces[:-1])]
    assert torch.equal(trace.positions, full.positions)
    for one, other in zip(trace.sites, full.sites, strict=True):
        assert_close(one.weights, other.weights)
        assert_close(one.membership, other.membership)
        assert one.logits is None or one.logits.shape == other.logits.shape
    assert mixing_matrix(trace).weights.shape == mixing_matrix(full).weights.shape


def test_traces_that_do_not_go_on_with_one_another_are_not_joined():
    model = model_of(StandardResidual())
    trace = record(model, TOKENS)
    other = record(model_of(AttnRes(sublayers_per_block=3)), TOKENS)
    for traces in (
        [],
        [trace, record(model, TOKENS[:1])],
        [trace, other],
        [record(model, TOKENS, mask=MASK)],
    ):
        with pytest.raises(TapError):
            joined(traces)
    twice = joined([trace, trace])
    assert twice.tokens.shape == (2, 14)
