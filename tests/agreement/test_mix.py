"""The two halves of a read against the reference and against the formula written out."""

import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from attention_residuals.errors import BackendError, ShapeError
from attention_residuals.ops import BACKENDS, depth_attention, depth_logits, weighted_mix, weighted_sum

DTYPES = [torch.float64, torch.float32]
sizes = st.tuples(
    st.sampled_from([1, 3, 29]), st.sampled_from([(1,), (2, 3), (63,)]), st.sampled_from([4, 60])
)


def leaves(count, tokens, width, dtype=torch.float64):
    sources = [torch.randn(*tokens, width, dtype=torch.float64) * (1 + number) for number in range(count)]
    vectors = [torch.randn(width, dtype=torch.float64) for _ in range(3)]
    return [tensor.to(dtype).requires_grad_() for tensor in (*sources, *vectors)]


def check(ours, theirs, inputs):
    """Compares results and the gradients of a sum that sees every number differently."""
    gradients = []
    for outputs in (ours, theirs):
        total = sum(
            (output * torch.sin(torch.arange(output.numel()).view(output.shape))).sum() for output in outputs
        )
        gradients.append(torch.autograd.grad(total, inputs))
    for one, other in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        assert_close(one, other)


@given(sizes)
def test_both_halves_together_are_depth_attention(size):
    *sources, query, gain, output_gain = inputs = leaves(*size)
    scores = depth_logits(sources, query * gain, eps=0.1)
    mix = weighted_mix(scores.logits.softmax(0), sources, output_gain, 1e-3)
    read = BACKENDS["reference"].run(sources, query, gain, eps=0.1, output_gain=output_gain, output_eps=1e-3)
    check((mix, scores.logits), (read.mix, read.logits), inputs)
    assert_close(scores.inverse_norms, read.inverse_norms)


def written_out(sources, direction, heads, norm_per_head, weigh, output_gain):
    """Scores and mix from the formula, a group of channels at a time."""
    logits, mixes = [], []
    for channels in torch.arange(sources[0].shape[-1]).chunk(heads):
        normed = [source[..., channels] if norm_per_head else source for source in sources]
        inverse = [(part.square().mean(-1) + 0.1).rsqrt() for part in normed]
        scores = torch.stack([
            (source[..., channels] * direction[..., channels]).sum(-1) * scale
            for source, scale in zip(sources, inverse, strict=True)
        ])  # fmt: skip
        logits.append(scores)
        weights = weigh(scores)
        mixes.append(sum(w[..., None] * s[..., channels] for w, s in zip(weights, sources, strict=True)))
    mix = torch.cat(mixes, dim=-1)
    return torch.stack(logits, dim=-1), F.rms_norm(mix, output_gain.shape, output_gain, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm_per_head", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 12])
def test_heads_and_directions_of_each_token_follow_the_formula(heads, per_token, norm_per_head, dtype):
    *sources, query, _, output_gain = leaves(4, (2, 5), 12, dtype)
    direction = query
    if per_token:
        direction = torch.randn(2, 5, 12, dtype=dtype, requires_grad=True)
    scores = depth_logits(sources, direction, eps=0.1, num_heads=heads, norm_per_head=norm_per_head)
    mix = weighted_mix(scores.logits.sigmoid(), sources, output_gain, 1e-3)
    logits, expected = written_out(sources, direction, heads, norm_per_head, torch.sigmoid, output_gain)
    check((mix, scores.logits), (expected, logits), (*sources, direction, output_gain))
    assert scores.inverse_norms.shape == scores.logits.shape == (4, 2, 5, heads)


@given(sizes, st.sampled_from([None, 1, 2, 4]))
def test_a_weighted_mix_is_the_weighted_sum(size, heads):
    sources = leaves(*size)[: size[0]]
    shape = (size[0], *size[1], *([] if heads is None else [heads]))
    weights = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    check((weighted_mix(weights, sources),), (weighted_sum(weights, sources),), (weights, *sources))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["auto", "eager", "reference"])
def test_without_a_key_norm_the_keys_are_the_sources(backend, dtype):
    *sources, query, gain, output_gain = inputs = leaves(5, (2, 3), 60, dtype)
    read = depth_attention(
        sources, query, gain, eps=None, output_gain=output_gain, output_eps=1e-3, backend=backend
    )
    logits = torch.stack([(source * gain * query).sum(-1) for source in sources])
    mix = (logits.softmax(0)[..., None] * torch.stack(sources)).sum(0)
    check((read.mix, read.logits), (F.rms_norm(mix, gain.shape, output_gain, 1e-3), logits), inputs)
    assert torch.equal(read.inverse_norms, torch.ones_like(read.inverse_norms))


def test_sources_in_bfloat16_are_scored_and_mixed_in_float32():
    *sources, query, gain, _ = leaves(5, (63,), 60, torch.bfloat16)
    exact = [source.detach().float() for source in sources]
    scores = depth_logits(sources, query * gain, eps=0.1)
    assert scores.logits.dtype == torch.float32
    assert_close(scores.logits, depth_logits(exact, query.float() * gain.float(), eps=0.1).logits, 1e-2)
    mix = weighted_mix(scores.logits.softmax(0), sources)
    assert torch.equal(mix, weighted_mix(scores.logits.softmax(0), exact).bfloat16())


def test_halves_keep_only_sources_and_scalars_for_backward():
    *sources, query, gain, output_gain = leaves(4, (2, 5), 12)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        logits = depth_logits(sources, query * gain, eps=0.1).logits
        weighted_mix(logits.sigmoid(), sources, output_gain, 1e-3)
    wide = {tensor.data_ptr() for tensor in kept if tensor.numel() >= sources[0].numel()}
    assert wide == {source.data_ptr() for source in sources}
    assert logits.numel() < sources[0].numel()


def test_a_source_without_gradient_gets_none():
    one, other, query, _, _ = leaves(2, (3,), 4)
    scores = depth_logits([one.detach(), other], query, eps=0.1).logits
    weighted_mix(scores, [one.detach(), other]).sum().backward()
    assert one.grad is None
    assert other.grad is not None


@pytest.mark.parametrize("half", ["logits", "mix"])
def test_second_derivatives_are_refused(half):
    one, other, query, _, _ = leaves(2, (3,), 4)
    result = depth_logits([one, other], query, eps=0.1).logits if half == "logits" else weighted_mix(
        torch.ones(2, 3, dtype=torch.float64), [one, other]
    )  # fmt: skip
    with pytest.raises(BackendError, match="create_graph"):
        torch.autograd.grad(result.square().sum(), [one], create_graph=True)


def unchecked(function):
    """The function without the shape checker of the tests, which would come first."""
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s, q: depth_logits([], q, eps=0.0), "zero sources"),
        (lambda s, q: depth_logits(s, q, eps=-1.0), "eps=-1.0"),
        (lambda s, q: depth_logits(s, q, eps=0.0, num_heads=5), r"num_heads=5.*\[1, 2, 3, 4, 6, 12\]"),
        (lambda s, q: unchecked(depth_logits)(s, q[:3], eps=0.0), r"direction of shape \[3\]"),
        (lambda s, q: weighted_mix(torch.ones(3, 2, 5), s), r"weights of shape \[3, 2, 5\]"),
        (lambda s, q: weighted_mix(torch.ones(4, 2, 5, 7), s), r"weights of shape \[4, 2, 5, 7\]"),
        (lambda s, q: weighted_mix(torch.ones(4, 2, 5), s, q), "output_gain given, output_eps=None"),
        (lambda s, q: weighted_mix(torch.ones(1, 1), []), "zero sources"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(call, message):
    *sources, query, _, _ = leaves(4, (2, 5), 12, torch.float32)
    with pytest.raises(ShapeError, match=f"(?s){message}"):
        call(sources, query)
