import importlib.metadata
import importlib.util
import sys
import types

import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.errors import BackendError, NonFiniteError, ShapeError
from attention_residuals.ops import BACKENDS, DepthRead, depth_attention, weighted_sum

backends = pytest.mark.parametrize("backend", ["eager", "reference"])  # in float64, where laws are sharp
every_backend = pytest.mark.parametrize("backend", ["cpu", "eager", "reference"])
sizes = st.tuples(st.integers(1, 7), st.integers(0, 5), st.integers(1, 9))


def random_read(shape, backend, seed=0, **options) -> tuple[DepthRead, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    num_sources, tokens, width = shape
    sources = [
        torch.randn(tokens, width, generator=generator, dtype=torch.float64) for _ in range(num_sources)
    ]
    query, gain = torch.randn(2, width, generator=generator, dtype=torch.float64)
    return depth_attention(sources, query, gain, eps=0.0, backend=backend, **options), sources


@backends
def test_scores_of_the_worked_example_give_its_weights(backend):
    # Width 4, query 2 on the first axis: logit = 2 * v_0 / rms(v), here v_0 / rms(v) = logit / 2.
    logits = torch.tensor([1.0, -0.5, 0.2, 2.0], dtype=torch.float64)
    sources = [
        torch.tensor([[logit / 2, (4 - (logit / 2) ** 2) ** 0.5, 0.0, 0.0]], dtype=torch.float64)
        for logit in logits.tolist()
    ]
    query = torch.tensor([2.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    read = depth_attention(sources, query, torch.ones(4).double(), eps=0.0, backend=backend)
    published = torch.tensor([0.228, 0.051, 0.102, 0.619], dtype=torch.float64)
    assert_close(read.logits[:, 0], logits)
    assert (read.weights[:, 0] - published).abs().max() < 5e-4
    assert (read.mix[0, 0] - (published * logits / 2).sum()).abs() < 2e-3


@backends
@given(sizes)
def test_zero_query_gives_mean_of_sources(backend, shape):
    num_sources, tokens, width = shape
    sources = torch.randn(num_sources, tokens, width, dtype=torch.float64)
    read = depth_attention(
        sources, torch.zeros(width).double(), torch.randn(width).double(), eps=1e-6, backend=backend
    )
    assert_close(read.mix, sources.mean(0))


@backends
@given(sizes, st.integers(0, 99))
def test_weights_are_a_distribution_over_sources(backend, shape, seed):
    read, _ = random_read(shape, backend, seed)
    assert (read.weights >= 0).all()
    assert_close(read.weights.sum(0), torch.ones(shape[1]).double())


@backends
@given(sizes, st.integers(0, 99))
def test_mix_is_the_weighted_sum_of_raw_sources(backend, shape, seed):
    read, sources = random_read(shape, backend, seed)
    assert_close(read.mix, weighted_sum(read.weights, sources))


@backends
@given(sizes, st.integers(0, 99), st.randoms(use_true_random=False))
def test_permuting_sources_permutes_weights_and_leaves_the_mix(backend, shape, seed, random):
    read, sources = random_read(shape, backend, seed)
    order = list(range(len(sources)))
    random.shuffle(order)
    query, gain = torch.randn(2, shape[2], dtype=torch.float64)
    read = depth_attention(sources, query, gain, eps=1e-3, backend=backend)
    permuted = depth_attention([sources[i] for i in order], query, gain, eps=1e-3, backend=backend)
    assert_close(permuted.weights, read.weights[order])
    assert_close(permuted.mix, read.mix)


@backends
@given(st.floats(1e-3, 1e3), st.integers(0, 4))
def test_scaling_a_source_leaves_its_logit(backend, factor, number):
    _, sources = random_read((5, 3, 8), backend)
    query, gain = torch.randn(2, 8, dtype=torch.float64)
    before = depth_attention(sources, query, gain, eps=0.0, backend=backend)
    sources[number] = sources[number] * factor
    after = depth_attention(sources, query, gain, eps=0.0, backend=backend)
    assert_close(after.logits, before.logits)


@backends
def test_output_gain_normalises_the_mix(backend):
    read, _ = random_read((4, 3, 8), backend)
    gain = torch.randn(8, dtype=torch.float64)
    normed, _ = random_read((4, 3, 8), backend, output_gain=gain, output_eps=0.1)
    expected = torch.nn.functional.rms_norm(read.mix, (8,), gain, 0.1)
    assert_close(normed.mix, expected)
    assert_close(normed.weights, read.weights)


@every_backend
def test_one_source_is_returned_as_it_is(backend):
    source = torch.randn(2, 3, 8)
    read = depth_attention([source], torch.randn(8), torch.randn(8), eps=1e-6, backend=backend)
    assert torch.equal(read.mix, source)
    assert torch.equal(read.weights, torch.ones(1, 2, 3))


@every_backend
def test_a_dominant_logit_takes_all_weight_without_overflow(backend):
    sources = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    read = depth_attention(sources, torch.tensor([1e4, 0.0]), torch.ones(2), eps=1e-6, backend=backend)
    assert torch.equal(read.mix, sources[0])


@every_backend
def test_a_stacked_tensor_and_a_sequence_give_the_same_bits(backend):
    sources = torch.randn(3, 4, 8)
    query, gain = torch.randn(2, 8)
    stacked = depth_attention(sources, query, gain, eps=1e-6, backend=backend)
    listed = depth_attention(list(sources), query, gain, eps=1e-6, backend=backend)
    assert all(torch.equal(one, other) for one, other in zip(stacked, listed, strict=True))


@pytest.mark.parametrize("backend", ["auto", "eager", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_mix_has_the_dtype_of_the_sources_and_scores_are_float32_or_better(backend, dtype):
    read = depth_attention(
        torch.randn(3, 2, 8).to(dtype), torch.randn(8), torch.ones(8), eps=1e-6, backend=backend
    )
    assert read.mix.dtype == dtype
    assert (
        read.logits.dtype
        == read.weights.dtype
        == (torch.float64 if dtype == torch.float64 else torch.float32)
    )


@every_backend
def test_bfloat16_sources_are_scored_in_float32(backend):
    sources = torch.randn(5, 64, 32).bfloat16()
    query, gain = 3 * torch.randn(32), torch.ones(32)
    exact = depth_attention(sources.double(), query.double(), gain.double(), eps=1e-6)
    read = depth_attention(sources, query, gain, eps=1e-6, backend=backend)
    assert_close(read.weights, exact.weights.float())
    # One rounding to bfloat16, nothing more.
    assert torch.equal(read.mix, exact.mix.float().bfloat16()) or (
        (read.mix.double() - exact.mix).norm() <= 1.01 * (exact.mix.bfloat16().double() - exact.mix).norm()
    )


@every_backend
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_source_that_is_not_finite_is_named(backend, bad):
    sources = [torch.randn(2, 4) for _ in range(3)]
    sources[1][1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"sources number \[1\] of 3"):
        depth_attention(sources, torch.zeros(4), torch.ones(4), eps=1e-6, backend=backend)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("size", "eps"), [(0.0, 0.0), (0.0, 1e-50), (1e-23, 0.0)])
def test_a_source_without_a_norm_is_named_and_never_read_from_old_memory(backend, size, eps, dtype):
    sources = [torch.randn(2, 4).to(dtype) for _ in range(3)]
    sources[1][1] = size
    for requires_grad in (False, True):
        query = torch.rand(4).requires_grad_(requires_grad)
        with pytest.raises(NonFiniteError, match=r"sources number \[1\] of 3"):
            depth_attention(sources, query, torch.ones(4), eps=eps, backend=backend)


@every_backend
def test_a_mix_of_zero_without_an_eps_is_not_a_number_forward_and_backward_at_its_token_alone(backend):
    values = torch.randn(3, 4)
    sources = [values.clone().requires_grad_(), torch.cat([-values[:1], values[1:]]).requires_grad_()]
    query, gain = torch.zeros(4, requires_grad=True), torch.rand(4)
    options = {"eps": 1e-3, "output_gain": gain, "output_eps": 0.0}
    results = []
    for name in (backend, "reference"):
        mix = depth_attention(sources, query, torch.ones(4), backend=name, **options).mix
        results.append([mix, *torch.autograd.grad(mix.square().sum(), [*sources, query])])
    for tensor in results[0][:3]:
        assert tensor[0].isnan().all()
    assert results[0][3].isnan().all()
    for one, other in zip(results[0][:3], results[1][:3], strict=True):
        assert_close(one[1:], other[1:])


VECTOR = torch.ones(4)


@every_backend
@pytest.mark.parametrize(
    ("sources", "vectors", "message"),
    [
        ([], {}, "zero sources"),
        ([torch.ones(2, 4), torch.ones(3, 4)], {}, r"source 1 is torch.float32\[3, 4\]"),
        ([torch.ones(2, 4), torch.ones(2, 4).double()], {}, "source 1 is torch.float64"),
        ([torch.ones(2, 4).int()], {}, "torch.int32"),
        ([torch.tensor(1.0)], {}, "source 0 of shape"),
        ([torch.ones(2, 4)], {"pseudo_query": torch.ones(5)}, "pseudo_query of shape"),
        ([torch.ones(2, 4)], {"key_gain": torch.ones(1, 4)}, "key_gain of shape"),
        ([torch.ones(2, 4)], {"output_gain": torch.ones(3), "output_eps": 0.1}, "output_gain of shape"),
        ([torch.ones(2, 4)], {"output_gain": VECTOR}, "output_eps=None"),
        ([torch.ones(2, 4)], {"output_eps": 0.1}, "output_gain absent"),
        ([torch.ones(2, 4)], {"logit_bias": torch.ones(2)}, r"logit_bias of shape \(2,\)"),
        ([torch.ones(2, 4)], {"eps": -1.0}, "eps=-1.0"),
        ([torch.ones(2, 4)], {"eps": float("nan")}, "eps=nan"),
        ([torch.ones(2, 4)], {"output_gain": VECTOR, "output_eps": -1.0}, "output_eps=-1.0"),
    ],
)
def test_sources_that_do_not_fit_are_refused_with_their_shapes(backend, sources, vectors, message):
    vectors = {"pseudo_query": VECTOR, "key_gain": VECTOR, "eps": 1e-6, **vectors}
    function = BACKENDS[backend].run
    # The checks are the function's own: the shape checker of the tests must not come first.
    function = getattr(function, "__wrapped__", function)
    with pytest.raises(ShapeError, match=message) as caught:
        function(sources, vectors.pop("pseudo_query"), vectors.pop("key_gain"), **vectors)
    assert "expected: " in str(caught.value)
    assert "do: " in str(caught.value)


def test_an_unknown_backend_is_refused_with_the_nearest_name():
    with pytest.raises(BackendError, match="did you mean 'eager'"):
        depth_attention([torch.ones(2, 4)], VECTOR, VECTOR, eps=1e-6, backend="egaer")


@every_backend
def test_a_bias_shifts_the_logits_and_minus_infinity_takes_a_source_away(backend):
    sources, query, gain = torch.randn(4, 3, 8), torch.randn(8), torch.ones(8)
    bias = torch.randn(4, 3)
    plain = depth_attention(sources, query, gain, eps=1e-6, backend=backend)
    biased = depth_attention(sources, query, gain, eps=1e-6, logit_bias=bias, backend=backend)
    assert_close(biased.logits, plain.logits + bias)
    bias[2] = -torch.inf
    without = depth_attention(sources, query, gain, eps=1e-6, logit_bias=bias, backend=backend)
    kept = [0, 1, 3]
    alone = depth_attention(sources[kept], query, gain, eps=1e-6, logit_bias=bias[kept], backend=backend)
    assert without.weights[2].eq(0).all()
    assert_close(without.mix, alone.mix)


@every_backend
def test_a_token_without_any_source_is_an_error(backend):
    bias = torch.zeros(2, 3)
    bias[:, 1] = -torch.inf
    with pytest.raises(NonFiniteError, match=r"every source of 1 token\(s\)"):
        depth_attention(
            torch.randn(2, 3, 8), torch.randn(8), torch.ones(8), eps=1e-6, logit_bias=bias, backend=backend
        )


@every_backend
def test_a_source_that_is_not_finite_is_named_behind_a_bias_too(backend):
    sources = torch.randn(3, 2, 4)
    sources[1, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"sources number \[1\] of 3"):
        depth_attention(sources, VECTOR, VECTOR, eps=1e-6, logit_bias=torch.zeros(3, 2), backend=backend)


@every_backend
def test_the_mix_may_be_changed_in_place(backend):
    sources = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    mix = depth_attention(sources, VECTOR, VECTOR, eps=1e-6, backend=backend).mix
    torch.nn.functional.relu_(mix).sum().backward()
    assert sources[0].grad is not None


@backends
def test_the_eps_of_the_key_norm_counts(backend):
    source = torch.full((1, 4), 2.0).double()
    query, gain = torch.full((4,), 3.0).double(), torch.ones(4).double()
    logit = depth_attention([source], query, gain, eps=5.0, backend=backend).logits.item()
    assert logit == pytest.approx(4 * 2 * 3 / (4 + 5) ** 0.5)


def test_shapes_without_memory_are_enough_on_the_meta_device():
    vector = torch.ones(4, device="meta")
    assert depth_attention([torch.ones(2, 4, device="meta")], vector, vector, eps=1e-6).mix.shape == (2, 4)


def test_fla_is_called_as_it_wants_and_agrees_with_the_reference(monkeypatch):
    """FLA's fused op needs a GPU and takes the arguments of its own torch reference, which stands in here."""
    located = importlib.metadata.distribution("fla-core").locate_file("fla/ops/attnres/naive.py")
    spec = importlib.util.spec_from_file_location("naive_of_fla", located)
    naive = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(naive)
    modules = {name: types.ModuleType(name) for name in ("fla", "fla.ops", "fla.ops.attnres")}
    modules["fla.ops.attnres"].fused_attnres = naive.naive_attnres
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    given = [tensor.requires_grad_() for tensor in (*torch.randn(4, 3, 8), *torch.randn(3, 8))]
    *sources, query, gain, output_gain = given
    for extra in (
        {},
        {"output_gain": output_gain, "output_eps": 1e-3},
        {"output_gain": output_gain, "output_eps": 1e-2},
    ):
        inputs = given if extra else given[:-1]
        results = []
        for name in ("fla", "reference"):
            read = BACKENDS[name].run(sources, query, gain, eps=1e-3, **extra)
            loss = read.mix.square().sum() + read.weights.square().sum()
            results.append([*read, *torch.autograd.grad(loss, inputs)])
        for one, other in zip(*results, strict=True):
            assert_close(one, other)
