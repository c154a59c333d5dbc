"""A read in inference keeps its mix alone: the same bits, the same refusals, as the whole read."""

import threading

import pytest
import torch
from torch import nn

from attention_residuals.errors import BackendError, NonFiniteError, ShapeError
from attention_residuals.layers.norm import RMSNorm
from attention_residuals.layers.residual import AttnRes, AttnResRule
from attention_residuals.layers.residual.interface import rehearse
from attention_residuals.layers.tap import OUTPUT, Onlooker
from attention_residuals.ops import depth_attention, depth_mix, traffic
from attention_residuals.ops.fused import mix_alone


def problem(num_sources=5, rows=(2, 3), width=60, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sources = [torch.randn(*rows, width, generator=draw).to(dtype) for _ in range(num_sources)]
    query, gain, output_gain = (torch.randn(width, generator=draw) for _ in range(3))
    return sources, query, gain, {"eps": 1e-6, "output_gain": output_gain, "output_eps": 1e-5}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("num_sources", "rows", "width"), [(1, (1, 1), 1000), (9, (8, 1), 64), (29, (63,), 60)]
)
def test_the_mix_alone_has_the_bits_of_the_whole_reads(dtype, num_sources, rows, width):
    sources, query, gain, norm = problem(num_sources, rows, width, dtype)
    with torch.no_grad():
        for given in (norm, {"eps": 1e-6}):
            whole = depth_attention(sources, query, gain, **given)
            alone = depth_mix(sources, query, gain, **given)
            assert torch.equal(alone, whole.mix)
            assert alone.dtype == dtype


def test_kernels_work_on_the_cpu_whatever_the_default_device_is():
    sources, query, gain, norm = problem(rows=(1, 3))
    with torch.no_grad():
        mix = depth_mix(sources, query, gain, **norm)
        with torch.device("meta"):
            assert torch.equal(depth_mix(sources, query, gain, **norm), mix)
            assert torch.equal(depth_attention(sources, query, gain, **norm).mix, mix)


def test_the_mix_alone_of_sources_out_of_order_is_in_order():
    sources, query, gain, norm = problem()
    turned = [source.transpose(0, 1).contiguous().transpose(0, 1) for source in sources]
    with torch.no_grad():
        mix = depth_mix(turned, query, gain, **norm)
        assert mix.is_contiguous()
        assert torch.equal(mix, depth_mix(sources, query, gain, **norm))


def test_the_mix_alone_refuses_what_the_whole_read_refuses():
    sources, query, gain, norm = problem()
    bad = [*sources[:2], torch.full_like(sources[0], torch.nan)]
    with torch.no_grad():
        with pytest.raises(NonFiniteError, match=r"sources number \[2\]"):
            depth_mix(bad, query, gain, **norm)
        with pytest.raises(ShapeError, match="source 1"):
            mix_alone([sources[0], sources[1][:1]], query, gain, **norm)
        with pytest.raises(ShapeError, match="pseudo_query"):
            mix_alone(sources, query[:5], gain, **norm)
        with pytest.raises(ShapeError, match="zero sources"):
            depth_mix([], query, gain, **norm)
        with pytest.raises(BackendError, match="eagr"):
            depth_mix(sources, query, gain, **norm, backend="eagr")


def test_the_mix_alone_carries_gradients_where_they_are_asked_for():
    sources, query, gain, norm = problem()
    query.requires_grad_()
    (there,) = torch.autograd.grad(depth_mix(sources, query, gain, **norm).square().sum(), query)
    (expected,) = torch.autograd.grad(depth_attention(sources, query, gain, **norm).mix.square().sum(), query)
    assert torch.equal(there, expected)
    assert there.any()


def test_the_mix_alone_is_counted_as_the_whole_read_is():
    sources, query, gain, norm = problem()
    with torch.no_grad():
        with traffic.counting() as whole:
            depth_attention(sources, query, gain, **norm)
        with traffic.counting() as alone:
            depth_mix(sources, query, gain, **norm)
    assert (alone.read, alone.written) == (whole.read, whole.written) != (0, 0)


def test_threads_that_read_at_once_do_not_share_working_memory():
    problems = [problem(num_sources=number + 1, rows=(1, 1), width=4096, seed=number) for number in range(4)]
    with torch.no_grad():
        expected = [depth_mix(*given[:3], **given[3]) for given in problems]
    wrong = []

    def read_often(given, want):
        with torch.no_grad():
            wrong.extend(1 for _ in range(200) if not torch.equal(depth_mix(*given[:3], **given[3]), want))

    threads = [
        threading.Thread(target=read_often, args=pair) for pair in zip(problems, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("make_norm", [RMSNorm, nn.LayerNorm])
def test_a_site_reads_the_same_bits_with_a_tap_and_without(make_norm):
    rule, norm = AttnRes(sublayers_per_block=2).build(num_layers=3, width=16), make_norm(16)
    for parameter in rule.parameters():
        nn.init.normal_(parameter)
    _, state = rehearse(rule, torch.randn(1, 2, 16))
    with torch.no_grad():
        (alone,), _ = rule.read(state, OUTPUT, norm)
        (seen,), _ = rule.read(state, OUTPUT, norm, Onlooker())
    assert torch.equal(alone, seen)


class Halved(AttnResRule):
    def attend(self, values, site, part, output_gain, output_eps):
        result = super().attend(values, site, part, output_gain, output_eps)
        return result._replace(mix=result.mix / 2)


def test_a_rule_that_attends_in_its_own_way_does_so_in_inference():
    config = AttnRes(sublayers_per_block=2)
    plain, halved = AttnResRule(config, 2, 8), Halved(config, 2, 8)
    _, state = rehearse(plain, torch.randn(1, 2, 8))
    with torch.no_grad():
        (whole,), _ = plain.read(state, OUTPUT, RMSNorm(8))
        (half,), _ = halved.read(state, OUTPUT, RMSNorm(8))
    assert torch.equal(half, whole / 2)
