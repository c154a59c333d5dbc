"""Every backend against the reference: values and all gradients."""

import pytest
import torch
from closeness import assert_close, distance

from attention_residuals.errors import BackendError
from attention_residuals.ops import BACKENDS, depth_attention, eager, reference, share_gradients

NUM_SOURCES = (1, 3, 29, 40, 129)
TOKENS = (0, 1, 63)
WIDTHS = (60, 1000)
faster = pytest.mark.parametrize("backend", ["cpu", "eager"])
folded = pytest.mark.parametrize("with_output_norm", [False, True])
biased = pytest.mark.parametrize("with_bias", [False, True])


def leaves(num_sources, tokens, width, dtype=torch.float32, magnitude=1.0):
    sources = [
        (magnitude * torch.randn(tokens, width, dtype=torch.float64)).to(dtype) for _ in range(num_sources)
    ]
    vectors = [torch.randn(width, dtype=torch.float64) / width**0.5 for _ in range(2)]
    vectors.append(1 + torch.rand(width, dtype=torch.float64))
    dtype = torch.float32 if dtype == torch.bfloat16 else dtype
    return [tensor.requires_grad_() for tensor in [*sources, *(vector.to(dtype) for vector in vectors)]]


def bias_of(num_sources, tokens):
    """Random, with one source taken away where there are others."""
    bias = torch.randn(num_sources, tokens)
    if num_sources > 1:
        bias[num_sources // 2] = -torch.inf
    return bias


def values_and_gradients(backend, inputs, with_output_norm, dtype=None, bias=None):
    inputs = [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in inputs]
    *sources, query, gain, output_gain = inputs
    options = {"output_gain": output_gain, "output_eps": 1e-6} if with_output_norm else {}
    if bias is not None:
        bias = options["logit_bias"] = bias.to(
            torch.promote_types(query.dtype, torch.float32)
        ).requires_grad_()
    read = BACKENDS[backend].run(sources, query, gain, eps=1e-6, **options)
    generator = torch.Generator().manual_seed(1)
    by_mix = torch.randn(read.mix.shape, generator=generator, dtype=torch.float64)
    by_weights = torch.randn(read.weights.shape, generator=generator, dtype=torch.float64)
    loss = (read.mix * by_mix).sum() + (read.weights * by_weights).sum()
    wanted = inputs if with_output_norm else inputs[:-1]
    gradients = torch.autograd.grad(loss, wanted if bias is None else [*wanted, bias])
    # Where a bias of -inf took a source away, the logit is -inf in all paths.
    return [read.mix, read.logits.nan_to_num(neginf=0.0), read.inverse_norms, *gradients]


@folded
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("num_sources", NUM_SOURCES)
def test_eager_values_and_all_gradients_agree_in_float64(with_output_norm, width, tokens, num_sources):
    inputs = leaves(num_sources, tokens, width, torch.float64)
    expected = values_and_gradients("reference", inputs, with_output_norm)
    actual = values_and_gradients("eager", inputs, with_output_norm)
    for one, other in zip(actual, expected, strict=True):
        # A gradient that is zero in truth (the query's, with one source) is rounding in both.
        assert distance(one, other) <= 1e-10 or (one - other).norm() <= 1e-11


@folded
@biased
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("num_sources", NUM_SOURCES)
def test_kernels_are_as_close_to_the_truth_as_the_reference(
    with_output_norm, with_bias, dtype, width, tokens, num_sources
):
    inputs = leaves(num_sources, tokens, width, dtype)
    bias = bias_of(num_sources, tokens) if with_bias else None
    truth = values_and_gradients("reference", inputs, with_output_norm, torch.float64, bias)
    usual = values_and_gradients("reference", inputs, with_output_norm, bias=bias)
    actual = values_and_gradients("cpu", inputs, with_output_norm, bias=bias)
    for one, other, true in zip(actual, usual, truth, strict=True):
        bound = max(1e-5, 2 * distance(other, true))
        # A gradient that is zero in truth (the query's, with one source) is rounding in all paths.
        assert distance(one, true) <= bound or (one.double() - true).norm() <= 1e-5


@faster
@folded
@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 1.0, 1e6, 1e15])
def test_float32_is_as_close_to_the_truth_as_the_reference(backend, with_output_norm, magnitude):
    inputs = leaves(9, 63, 60, magnitude=magnitude)
    truth = values_and_gradients("reference", inputs, with_output_norm, torch.float64)
    standard = values_and_gradients("reference", inputs, with_output_norm)
    actual = values_and_gradients(backend, inputs, with_output_norm)
    for one, usual, true in zip(actual, standard, truth, strict=True):
        assert distance(one, true) <= max(1e-5, 2 * distance(usual, true))


@faster
@folded
def test_bfloat16_is_as_close_to_the_truth_as_the_reference(backend, with_output_norm):
    inputs = leaves(9, 63, 60, torch.bfloat16)
    truth = values_and_gradients("reference", inputs, with_output_norm, torch.float64)
    standard = values_and_gradients("reference", inputs, with_output_norm)
    actual = values_and_gradients(backend, inputs, with_output_norm)
    for one, usual, true in zip(actual, standard, truth, strict=True):
        assert distance(one, true) <= 1.5 * distance(usual, true) + 1e-5


@folded
def test_gradients_are_those_of_finite_differences(with_output_norm):
    *sources, query, gain, output_gain = leaves(3, 2, 5, torch.float64)

    def function(*inputs):
        options = {"output_gain": inputs[-1], "output_eps": 1e-2} if with_output_norm else {}
        read = eager.depth_attention(inputs[:3], inputs[3], inputs[4], eps=1e-2, **options)
        return read.mix, read.logits

    assert torch.autograd.gradcheck(function, (*sources, query, gain, output_gain))


@faster
def test_strided_expanded_and_repeated_sources_agree(backend):
    base = torch.randn(4, 6, 10, requires_grad=True)
    row = torch.randn(10, requires_grad=True)
    query, gain = torch.randn(2, 10)
    results = []
    for name in (backend, "reference"):
        strided, expanded = base.transpose(0, 1)[::2], row.expand(3, 4, 10)
        read = BACKENDS[name].run([strided, expanded, strided], query, gain, eps=1e-6)
        results.append([read.mix, *torch.autograd.grad(read.mix.square().sum(), (base, row))])
    for one, other in zip(*results, strict=True):
        assert_close(one, other)


@faster
def test_only_what_asks_for_a_gradient_gets_one(backend):
    *sources, query, gain, _ = leaves(3, 2, 5)
    frozen = [sources[0].detach(), sources[1], sources[2].detach()]
    BACKENDS[backend].run(frozen, query.detach(), gain, eps=1e-6).mix.sum().backward()
    assert sources[1].grad is not None
    assert gain.grad is not None
    assert sources[0].grad is None
    assert query.grad is None


@faster
def test_the_logits_alone_can_be_differentiated(backend):
    *sources, query, gain, _ = leaves(3, 2, 5)
    gradients = [
        torch.autograd.grad(
            BACKENDS[name].run(sources, query, gain, eps=1e-6).logits.square().sum(), [*sources, query]
        )
        for name in (backend, "reference")
    ]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other)


@faster
@folded
def test_autocast_does_not_lower_the_precision(backend, with_output_norm):
    inputs = leaves(5, 8, 60)
    plain = values_and_gradients(backend, inputs, with_output_norm)
    with torch.autocast("cpu", torch.bfloat16):
        cast = values_and_gradients(backend, inputs, with_output_norm)
    assert all(torch.equal(one, other) for one, other in zip(plain, cast, strict=True))


@faster
def test_nothing_but_sources_vectors_and_scalars_is_kept_for_backward(backend):
    *sources, query, gain, output_gain = leaves(7, 63, 60)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        BACKENDS[backend].run(sources, query, gain, eps=1e-6, output_gain=output_gain, output_eps=1e-6)
    given = {tensor.data_ptr() for tensor in (*sources, query, gain, output_gain)}
    made = {tensor.data_ptr(): tensor.numel() for tensor in kept if tensor.data_ptr() not in given}
    # Logits and inverse norms [7, 63] and the output's inverse norm [63]; the mix would be [63, 60].
    assert sorted(made.values()) == [63, 441, 441]


@faster
def test_a_second_derivative_is_refused_with_what_to_do(backend):
    *sources, query, gain, _ = leaves(2, 2, 5)
    mix = BACKENDS[backend].run(sources, query, gain, eps=1e-6).mix
    with pytest.raises(BackendError, match="backend='reference' for second derivatives"):
        torch.autograd.grad(mix.square().sum(), query, create_graph=True)


def test_the_reference_has_second_derivatives():
    *sources, query, gain, _ = leaves(2, 2, 5, torch.float64)

    def function(*inputs):
        return depth_attention(inputs[:2], inputs[2], inputs[3], eps=1e-2, backend="reference").mix

    assert torch.autograd.gradgradcheck(function, (*sources, query, gain))


@faster
def test_vmap_is_refused_with_what_to_do_and_the_reference_does_it(backend):
    sources, queries, gain = torch.randn(2, 3, 5), torch.randn(4, 5), torch.ones(5)

    def read(query, name):
        return depth_attention(sources, query, gain, eps=1e-6, backend=name).mix

    with pytest.raises(BackendError, match="backend='reference'"):
        torch.vmap(read, in_dims=(0, None))(queries, backend)
    mixes = torch.vmap(read, in_dims=(0, None))(queries, "reference")
    assert_close(mixes, torch.stack([read(query, "reference") for query in queries]))


@faster
@folded
def test_backward_twice_through_a_kept_graph_gives_the_same(backend, with_output_norm):
    *sources, query, gain, output_gain = leaves(5, 20, 60)
    options = {"output_gain": output_gain, "output_eps": 1e-6} if with_output_norm else {}
    mix = (
        BACKENDS[backend]
        .run([share_gradients(source) for source in sources], query, gain, eps=1e-6, **options)
        .mix
    )
    first = torch.autograd.grad(mix.square().sum(), [*sources, query], retain_graph=True)
    second = torch.autograd.grad(mix.square().sum(), [*sources, query], retain_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_reference_agrees_with_the_formula_written_out_for_one_token():
    sources, query, gain = torch.randn(4, 1, 6).double(), torch.randn(6).double(), torch.randn(6).double()
    read = reference.depth_attention(sources, query, gain, eps=0.25)
    scores = []
    for source in sources[:, 0]:
        root = (sum(float(x) ** 2 for x in source) / 6 + 0.25) ** 0.5
        scores.append(
            sum(float(x) / root * float(g) * float(q) for x, g, q in zip(source, gain, query, strict=True))
        )
    scores = torch.tensor(scores, dtype=torch.float64)
    exponentials = scores.exp()
    weights = exponentials / exponentials.sum()
    assert_close(read.logits[:, 0], scores)
    assert_close(read.weights[:, 0], weights)
    assert_close(read.mix[0], sum(w * s for w, s in zip(weights, sources[:, 0], strict=True)))
