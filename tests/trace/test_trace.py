from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from torch.nn import functional as F

from attention_residuals.errors import ConfigError, TapError
from attention_residuals.inference import Engine, prefill
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
        assert Trace.load(folder) == trace


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
        Cumulative(): ("sources are cumulative", "a learned bias", "the output has no weights", "at 4 reads"),
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
    first, second, third = (passes := recorded_passes(model))
    other = record(model_of(AttnRes(sublayers_per_block=3)), TOKENS)
    for traces in (
        [],
        [trace, record(model, TOKENS[:1])],
        [trace, other],
        [record(model, TOKENS, mask=MASK)],
        [trace, trace],
        [first, third],
        [second, first],
        [first, replace(second, positions=second.positions + torch.tensor([[0], [1]]))],
        [first, replace(second, width=second.width + 1)],
    ):
        with pytest.raises(TapError):
            joined(traces)
    assert torch.equal(joined(passes).tokens, TOKENS)
    assert torch.equal(joined(passes[1:]).positions, trace.positions[:, 3:])


def recorded_passes(model):
    recorders = []

    def tap():
        recorders.append(Recorder())
        return recorders[-1]

    prefill(model, TOKENS, chunk=3, tap=tap)
    return [recorder.trace(model) for recorder in recorders]
