"""Reads in two phases against one read over all sources: values, gradients, threads and refusals."""

import subprocess
import sys
from dataclasses import dataclass

import numba
import pytest
import torch
from closeness import assert_close, distance
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.errors import BackendError, NonFiniteError, ShapeError
from attention_residuals.ops import (
    backends,
    cpu_two_phase,
    depth_attention,
    fused_two_phase,
    reference,
    threads,
)
from attention_residuals.ops.two_phase import merge, phase_1, phase_2, read_open_block

ALL = ("cpu", "eager", "reference")
PLAIN = ("eager", "reference")
NORM = {"output_eps": 1e-3}
every_backend = pytest.mark.parametrize("backend", ALL)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sources and the vectors of all sites; the live sources are None, one tensor or several."""

    blocks: list
    live: list
    queries: torch.Tensor
    gains: torch.Tensor
    output_gain: torch.Tensor

    def tensors(self):
        return [*self.blocks, *self.live, self.queries, self.gains, self.output_gain]

    def to(self, dtype):
        def convert(tensor):
            return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

        blocks, live = ([convert(source) for source in sources] for sources in (self.blocks, self.live))
        vectors = [convert(vector) for vector in (self.queries, self.gains, self.output_gain)]
        return Case(blocks=blocks, live=live, queries=vectors[0], gains=vectors[1], output_gain=vectors[2])


def case(num_blocks, num_live, num_queries, tokens, width, dtype=torch.float32, grad=False):
    def source():
        return torch.randn(*tokens, width, dtype=torch.float64).to(dtype).requires_grad_(grad)

    kind = torch.float32 if dtype == torch.bfloat16 else dtype
    vectors = [
        torch.randn(num_queries, width, dtype=torch.float64) / width**0.5,
        1 + torch.rand(num_queries, width, dtype=torch.float64),
        1 + torch.rand(width, dtype=torch.float64),
    ]
    queries, gains, output_gain = (vector.to(kind).requires_grad_(grad) for vector in vectors)
    return Case(
        blocks=[source() for _ in range(num_blocks)],
        live=[source() for _ in range(num_live)],
        queries=queries,
        gains=gains,
        output_gain=output_gain,
    )


def in_two_phases(given, backend, sites=None, with_norm=True, known=None):
    """Reads of the sites, [mix, logits, inverse norms] each."""
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend=backend, inverse_norms=known)
    live = given.live[0] if len(given.live) == 1 else given.live or None
    options = {"output_gain": given.output_gain, **NORM} if with_norm else {}
    return [
        read_open_block(
            found, site, live, given.queries[site], given.gains[site], eps=1e-6, backend=backend, **options
        )
        for site in sites or range(len(given.queries))
    ]


def in_one_phase(given, sites=None, with_norm=True):
    options = {"output_gain": given.output_gain, **NORM} if with_norm else {}
    return [
        reference.depth_attention(
            [*given.blocks, *given.live], given.queries[site], given.gains[site], eps=1e-6, **options
        )
        for site in sites or range(len(given.queries))
    ]


def flat(reads):
    return [tensor for read in reads for tensor in read]


def gradients(reads, inputs):
    """Gradients of a sum that sees every number of mixes and weights differently."""
    total = 0.0
    for number, read in enumerate(reads):
        for output in (read.mix, read.weights):
            total = (
                total + (output * torch.sin(torch.arange(output.numel()) + number).view(output.shape)).sum()
            )
    return torch.autograd.grad(total, inputs)


shapes = st.tuples(
    st.sampled_from([1, 2, 3, 8, 29, 40]),  # finished sources
    st.sampled_from([0, 1, 3]),  # live ones
    st.sampled_from([1, 2, 5, 24]),  # sites
    st.sampled_from([(1,), (2, 3), (63,), (0,)]),
    st.sampled_from([1, 60, 1000]),
)


@every_backend
@given(shapes, st.booleans())
def test_two_phases_read_what_one_reads(backend, shape, with_norm):
    given = case(*shape)
    sites = [0, len(given.queries) - 1]
    actual = in_two_phases(given, backend, sites, with_norm)
    truth = in_one_phase(given.to(torch.float64), sites, with_norm)
    usual = in_one_phase(given, sites, with_norm)
    for one, true, other in zip(flat(actual), flat(truth), flat(usual), strict=True):
        assert one.dtype == torch.float32
        # With one source and width 1 a logit may be nearly zero: as good as the reference is enough.
        assert distance(one, true) <= max(1e-5, 2 * distance(other, true))


@every_backend
@given(shapes)
def test_bfloat16_sources_are_read_as_well_as_by_the_reference(backend, shape):
    given = case(*shape, dtype=torch.bfloat16)
    sites = [0, len(given.queries) - 1]
    truth = in_one_phase(given.to(torch.float64), sites)
    usual = in_one_phase(given, sites)
    actual = in_two_phases(given, backend, sites)
    for one, other, true in zip(flat(actual), flat(usual), flat(truth), strict=True):
        assert one.dtype == other.dtype
        assert distance(one, true) <= 1.5 * distance(other, true) + 1e-5


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_width_of_a_large_model_agrees(backend, dtype):
    given = case(9, 1, 6, (3,), 7168, dtype)
    for one, other in zip(flat(in_two_phases(given, backend)), flat(in_one_phase(given)), strict=True):
        assert distance(one, other) <= (1e-5 if one.dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("backend", PLAIN)
@given(shapes, st.booleans())
def test_values_and_all_gradients_agree_in_float64(backend, shape, with_norm):
    given = case(*shape, dtype=torch.float64, grad=True)
    sites = [0, len(given.queries) - 1]
    inputs = given.tensors() if with_norm else given.tensors()[:-1]
    actual, expected = (
        in_two_phases(given, backend, sites, with_norm),
        in_one_phase(given, sites, with_norm),
    )
    ours, theirs = gradients(actual, inputs), gradients(expected, inputs)
    for one, other in zip((*flat(actual), *ours), (*flat(expected), *theirs), strict=True):
        # A gradient that is zero in truth (the query's, with one source) is rounding in both.
        assert distance(one, other) <= 1e-10 or (one - other).norm() <= 1e-11


def test_float32_gradients_are_as_close_to_the_truth_as_the_reference():
    given = case(9, 1, 4, (63,), 60, grad=True)
    exact = given.to(torch.float64)
    truth = gradients(in_one_phase(exact), exact.tensors())
    usual = gradients(in_one_phase(given), given.tensors())
    for one, other, true in zip(
        gradients(in_two_phases(given, "auto"), given.tensors()), usual, truth, strict=True
    ):
        assert distance(one, true) <= max(1e-5, 2 * distance(other, true))


@every_backend
def test_a_whole_model_of_blocks_in_two_phases_reads_what_it_reads_in_one(backend):
    size, width = 3, 12
    queries, gains = torch.randn(10, width), 1 + torch.rand(10, width)
    blocks, open_block, found, norms = [torch.randn(2, 5, width)], None, None, None
    for number in range(10):
        site = number % size
        if site == 0:
            left = slice(number, number + size)
            found = phase_1(
                blocks, queries[left], gains[left], eps=1e-6, inverse_norms=norms, backend=backend
            )
            norms = found.inverse_norms
        read = read_open_block(
            found, site, open_block, queries[number], gains[number], eps=1e-6, backend=backend
        )
        sources = blocks if open_block is None else [*blocks, open_block]
        expected = depth_attention(sources, queries[number], gains[number], eps=1e-6, backend="reference")
        for one, other in zip(read, expected, strict=True):
            assert_close(one, other)
        output = (read.mix * 3).sin()
        open_block = output if open_block is None else open_block + output
        if site == size - 1:
            blocks, open_block = [*blocks, open_block], None


@every_backend
@given(st.permutations(range(6)), st.integers(1, 6))
def test_any_cut_and_any_order_give_the_same_mix(backend, order, cut):
    given = case(6, 0, 2, (7,), 20)
    (expected,) = in_one_phase(given, [1])
    mixed = [given.blocks[number] for number in order]
    shuffled = Case(
        blocks=mixed[:cut],
        live=mixed[cut:],
        queries=given.queries,
        gains=given.gains,
        output_gain=given.output_gain,
    )
    (read,) = in_two_phases(shuffled, backend, [1])
    assert_close(read.mix, expected.mix)
    assert_close(read.logits, expected.logits[list(order)])


@every_backend
def test_known_inverse_norms_are_used_and_give_what_computed_ones_give(backend):
    given = case(5, 1, 4, (2, 3), 60)
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend=backend)
    for num_known in (1, 3, 5):
        known = found.inverse_norms[:num_known]
        again = phase_1(
            given.blocks, given.queries, given.gains, eps=1e-6, inverse_norms=known, backend=backend
        )
        assert all(torch.equal(one, other) for one, other in zip(again, found, strict=True))
        doubled = phase_1(
            given.blocks, given.queries, given.gains, eps=1e-6, inverse_norms=2 * known, backend=backend
        )
        assert_close(doubled.logits[:num_known], 2 * found.logits[:num_known])
        assert_close(doubled.logits[num_known:], found.logits[num_known:])


@pytest.mark.parametrize("backend", PLAIN)
def test_known_inverse_norms_carry_their_gradient(backend):
    given = case(3, 1, 2, (5,), 8, torch.float64, grad=True)
    first = phase_1(given.blocks[:2], given.queries, given.gains, eps=1e-6, backend=backend)
    reads = in_two_phases(given, backend, known=first.inverse_norms)
    expected = gradients(in_one_phase(given), given.tensors())
    for one, other in zip(gradients(reads, given.tensors()), expected, strict=True):
        assert_close(one, other)


@every_backend
def test_statistics_are_those_of_the_softmax_over_finished_sources(backend):
    given = case(7, 0, 3, (11,), 20)
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend=backend)
    assert torch.equal(found.maxima, found.logits.amax(0))
    weights = (found.logits - found.maxima).exp()
    assert_close(found.denominators, weights.sum(0))
    assert_close(found.outputs, torch.einsum("nqt,ntd->qtd", weights, torch.stack(given.blocks)))


def test_both_phases_and_the_merge_apart_are_the_read():
    given = case(4, 2, 3, (2, 5), 20)
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6)
    for live in (None, given.live[0], given.live):
        scores = None if live is None else phase_2(live, given.queries[2], given.gains[2], eps=1e-6)
        mix = merge(found, 2, live, scores, output_gain=given.output_gain, **NORM)
        read = read_open_block(
            found, 2, live, given.queries[2], given.gains[2], eps=1e-6, output_gain=given.output_gain, **NORM
        )
        assert_close(mix, read.mix)
        if scores is not None:
            assert_close(read.logits[4:], scores.logits)
            assert_close(read.inverse_norms[4:], scores.inverse_norms)


@every_backend
@pytest.mark.parametrize("largest", ["finished", "live"])
def test_logits_of_ten_thousand_give_the_one_source_without_overflow(backend, largest):
    width = 4
    directions = torch.eye(width)
    finished, live = [directions[None, 0], directions[None, 1]], directions[None, 2]
    # The key of a unit vector is 2 in its channel.
    query = torch.tensor([-5000.0, 5000.0 if largest == "finished" else 4000.0, 4900.0, 0.0])
    found = phase_1(finished, query[None], torch.ones(1, width), eps=0.0, backend=backend)
    read = read_open_block(found, 0, live, query, torch.ones(width), eps=0.0, backend=backend)
    assert read.logits[0].item() == -1e4
    assert torch.equal(read.mix, finished[1] if largest == "finished" else live)
    assert torch.equal(read.weights[:, 0], torch.tensor([0, 1, 0] if largest == "finished" else [0, 0, 1.0]))


@pytest.mark.parametrize("backend", PLAIN)
def test_gradients_stay_finite_where_the_weights_are_one_source(backend):
    given = case(3, 1, 1, (4,), 8, grad=True)
    strong = Case(
        blocks=given.blocks,
        live=given.live,
        queries=given.queries.detach() * 1e4,
        gains=given.gains,
        output_gain=given.output_gain,
    )
    inputs = [*given.blocks, *given.live, given.gains]
    ours = gradients(in_two_phases(strong, backend), inputs)
    theirs = gradients(in_one_phase(strong), inputs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.isfinite().all()
        assert distance(one, other) <= 1e-5 or (one - other).norm() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    given, before, results = case(9, 1, 5, (500,), 60, dtype), torch.get_num_threads(), []
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend="cpu")
            results.append([*found, *flat(in_two_phases(given, "cpu"))])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_one_token_wakes_no_thread_and_many_do(monkeypatch):
    before, used, run = torch.get_num_threads(), [], threads.run
    monkeypatch.setattr(threads, "run", lambda *arguments: (used.append(arguments[2]), run(*arguments)))
    try:
        torch.set_num_threads(2)
        in_two_phases(case(8, 1, 16, (1,), 1024), "cpu", [3])
        in_two_phases(case(8, 1, 2, (500,), 60), "cpu", [1])
    finally:
        torch.set_num_threads(before)
    assert used == [1, 1, 2, 2]


@every_backend
def test_strided_sources_and_a_cut_phase_1_agree(backend):
    base = torch.randn(6, 4, 20)
    blocks = [base.transpose(0, 1), base.flip(0).transpose(0, 1), torch.randn(20).expand(4, 6, 20)]
    queries, gains = torch.randn(20, 3).T, torch.rand(20, 3).T
    live = torch.randn(4, 12, 20)[:, ::2]
    found = phase_1(blocks, queries, gains, eps=1e-6, backend=backend)
    cut = found._replace(
        outputs=found.outputs[:, 1:3],
        maxima=found.maxima[:, 1:3],
        denominators=found.denominators[:, 1:3],
        logits=found.logits[:, :, 1:3],
        inverse_norms=found.inverse_norms[:, 1:3],
    )
    expected = depth_attention([*blocks, live], queries[1], gains[1], eps=1e-6, backend="reference")
    read = read_open_block(found, 1, live, queries[1], gains[1], eps=1e-6, backend=backend)
    part = read_open_block(cut, 1, live[1:3], queries[1], gains[1], eps=1e-6, backend=backend)
    for number, (whole, piece, other) in enumerate(zip(read, part, expected, strict=True)):
        assert_close(whole, other)
        assert_close(piece, other[1:3] if number == 0 else other[:, 1:3])


@pytest.mark.parametrize("backend", PLAIN)
def test_autocast_does_not_lower_the_precision(backend):
    given = case(5, 1, 2, (8,), 60)
    plain = flat(in_two_phases(given, backend))
    with torch.autocast("cpu", torch.bfloat16):
        cast = flat(in_two_phases(given, backend))
    assert all(torch.equal(one, other) for one, other in zip(plain, cast, strict=True))


def kernels_used(monkeypatch):
    used = []
    for name in ("phase_1", "read"):
        run = getattr(fused_two_phase, name)
        monkeypatch.setattr(
            fused_two_phase, name, lambda *given, name=name, run=run: (used.append(name), run(*given))[1]
        )
    return used


def test_auto_takes_the_kernels_but_where_a_gradient_is_asked_for(monkeypatch):
    used, given = kernels_used(monkeypatch), case(3, 1, 1, (4,), 8, grad=True)
    assert in_two_phases(given, "auto")[0].mix.requires_grad
    assert not used
    with torch.no_grad():
        in_two_phases(given, "auto")
    assert used == ["phase_1", "read"]
    found = phase_1([block.detach() for block in given.blocks], given.queries.detach(), given.gains.detach(),
                    eps=1e-6)  # fmt: skip
    assert used == ["phase_1", "read", "phase_1"]
    # One of the reader's own tensors is enough.
    read = read_open_block(found, 0, given.live[0].detach(), given.queries[0].detach(), given.gains[0].detach(),
                           eps=1e-6, output_gain=given.output_gain, output_eps=1e-3)  # fmt: skip
    assert read.mix.requires_grad
    assert used == ["phase_1", "read", "phase_1"]


def test_the_kernels_refuse_what_they_cannot_do_and_say_why(monkeypatch):
    given = case(3, 1, 1, (4,), 8, grad=True)
    with pytest.raises(BackendError, match="no backward pass"):
        in_two_phases(given, "cpu")
    with pytest.raises(BackendError, match=r"not torch\.float64"):
        in_two_phases(given.to(torch.float64), "cpu")
    with pytest.raises(BackendError, match="did you mean 'eager'"):
        in_two_phases(given, "egaer")
    with pytest.raises(BackendError, match="reads in two phases: cpu, eager, reference"):
        in_two_phases(given, "fla")
    monkeypatch.setitem(backends._INSTALLED, "numba", False)
    with torch.no_grad():
        with pytest.raises(BackendError, match="the package numba is not installed"):
            in_two_phases(given, "cpu")
        for one, other in zip(flat(in_two_phases(given, "auto")), flat(in_one_phase(given)), strict=True):
            assert_close(one, other)


@pytest.mark.parametrize("backend", ["auto", "cpu", "eager"])
def test_vmap_is_refused_with_what_to_do_and_the_reference_does_it(backend):
    given, lives = case(3, 1, 1, (4,), 8), torch.randn(5, 4, 8)
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6)

    def mix(live, name):
        again = phase_1([*given.blocks, live], given.queries, given.gains, eps=1e-6, backend=name)
        query, gain = given.queries[0], given.gains[0]
        return again.outputs, read_open_block(found, 0, live, query, gain, eps=1e-6, backend=name).mix

    with pytest.raises(BackendError, match="backend='reference'"):
        torch.vmap(mix, in_dims=(0, None))(lives, backend)
    with pytest.raises(BackendError, match="backend='reference'"):
        torch.vmap(lambda live: read_open_block(found, 0, live, given.queries[0], given.gains[0], eps=1e-6,
                                                backend=backend).mix)(lives)  # fmt: skip
    batched = torch.vmap(mix, in_dims=(0, None))(lives, "reference")
    for one, other in zip(batched, zip(*(mix(live, backend) for live in lives), strict=True), strict=True):
        assert_close(one, torch.stack(other))


@every_backend
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_source_that_is_not_finite_is_named(backend, bad):
    given = case(3, 2, 2, (2,), 4)
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend=backend)
    given.blocks[1][1, 2] = given.live[1][0, 3] = bad
    with pytest.raises(NonFiniteError, match=r"sources number \[1\] of 3"):
        phase_1(given.blocks, 0 * given.queries, given.gains, eps=1e-6, backend=backend)
    with pytest.raises(NonFiniteError, match=r"sources number \[[14]\] of [25]"):
        read_open_block(found, 0, given.live, given.queries[0], given.gains[0], eps=1e-6, backend=backend)


def unchecked(function):
    """The checks are the function's own: the shape checker of the tests must not come first."""
    return getattr(function, "__wrapped__", function)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blocks": []}, "zero sources"),
        ({"blocks": [torch.ones(2, 4), torch.ones(3, 4)]}, r"source 1 is torch.float32\[3, 4\]"),
        ({"blocks": [torch.ones(2, 4), torch.ones(2, 4).double()]}, "source 1 is torch.float64"),
        ({"queries": torch.ones(4)}, r"pseudo_queries of shape \[4\]"),
        ({"queries": torch.ones(0, 4), "gains": torch.ones(0, 4)}, r"pseudo_queries of shape \[0, 4\]"),
        ({"gains": torch.ones(2, 4)}, r"key_gains of \[2, 4\]"),
        ({"queries": torch.ones(3, 5), "gains": torch.ones(3, 5)}, r"pseudo_query of shape \(5,\)"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"eps": float("nan")}, "eps=nan"),
        ({"inverse_norms": torch.ones(3, 2)}, r"inverse_norms of shape \[3, 2\].*at most 2 rows"),
        ({"inverse_norms": torch.ones(1, 3)}, r"inverse_norms of shape \[1, 3\].*shape \[2\]"),
    ],
)
@every_backend
def test_a_phase_1_that_does_not_fit_is_refused(backend, changes, message):
    given = {
        "blocks": [torch.ones(2, 4)] * 2,
        "queries": torch.ones(3, 4),
        "gains": torch.ones(3, 4),
        "eps": 1e-6,
        **changes,
    }
    with pytest.raises(ShapeError, match=f"(?s){message}"):
        unchecked(phase_1)(
            given.pop("blocks"), given.pop("queries"), given.pop("gains"), backend=backend, **given
        )


VECTOR = torch.ones(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"site": 3}, "site number 3.*0 to 2"),
        ({"site": -1}, "site number -1"),
        ({"live": torch.ones(3, 4)}, r"float32\[3, 4\].*float32\[2, 4\], as the finished"),
        ({"live": torch.ones(2, 4).bfloat16()}, "a live source that is torch.bfloat16"),
        ({"live": [torch.ones(2, 4), torch.ones(2, 5)]}, "source 1 is"),
        ({"query": torch.ones(5)}, "pseudo_query of shape"),
        ({"gain": torch.ones(5)}, "key_gain of shape"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"output_gain": torch.ones(5), "output_eps": 0.1}, "output_gain of shape"),
        ({"live": None, "output_gain": torch.ones(5), "output_eps": 0.1}, "output_gain of shape"),
        ({"output_gain": VECTOR}, "output_eps=None"),
        ({"live": None, "output_eps": 0.1}, "output_gain absent"),
        ({"output_gain": VECTOR, "output_eps": -1.0}, "output_eps=-1.0"),
    ],
)
@every_backend
def test_a_read_that_does_not_fit_is_refused(backend, changes, message):
    found = phase_1([torch.ones(2, 4)] * 2, torch.ones(3, 4), torch.ones(3, 4), eps=1e-6)
    given = {"site": 0, "live": torch.ones(2, 4), "query": VECTOR, "gain": VECTOR, "eps": 1e-6, **changes}
    with pytest.raises(ShapeError, match=f"(?s){message}"):
        unchecked(read_open_block)(
            found,
            given.pop("site"),
            given.pop("live"),
            given.pop("query"),
            given.pop("gain"),
            backend=backend,
            **given,
        )


def test_phase_2_and_merge_refuse_what_does_not_fit():
    found = phase_1([torch.ones(2, 4)] * 2, torch.ones(1, 4), torch.ones(1, 4), eps=1e-6)
    scores = phase_2(torch.ones(2, 4), VECTOR, VECTOR, eps=1e-6)
    with pytest.raises(ShapeError, match=r"2 live source\(s\), and the scores of 1"):
        merge(found, 0, [torch.ones(2, 4)] * 2, scores)
    with pytest.raises(ShapeError, match=r"0 live source\(s\), and the scores of 1"):
        merge(found, 0, None, scores)
    with pytest.raises(ShapeError, match="output_eps=None"):
        merge(found, 0, torch.ones(2, 4), scores, output_gain=VECTOR)
    with pytest.raises(ShapeError, match="zero sources"):
        phase_2([], VECTOR, VECTOR, eps=1e-6)
    with pytest.raises(ShapeError, match="eps=-1"):
        phase_2(torch.ones(2, 4), VECTOR, VECTOR, eps=-1.0)


def test_a_change_in_the_shared_kernels_compiles_these_anew_and_the_cache_gives_the_same_bits(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpu_two_phase, "kernel", cpu_two_phase.kernel.__wrapped__)
    given = case(3, 1, 2, (4,), 20)
    found = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend="cpu")
    assert len(list(tmp_path.rglob("*.nbc"))) == 1
    loaded = phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend="cpu")
    assert len(list(tmp_path.rglob("*.nbc"))) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, loaded, strict=True))
    monkeypatch.setattr(cpu_two_phase.inspect, "getsource", lambda module: "changed")
    phase_1(given.blocks, given.queries, given.gains, eps=1e-6, backend="cpu")
    assert len(list(tmp_path.rglob("*.nbc"))) == 2


def test_without_a_folder_for_its_cache_numba_compiles_anew_and_that_is_said(monkeypatch):
    def cfunc(signature, cache=False):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return whole(signature)

    whole, said = cpu_two_phase.cfunc, []
    monkeypatch.setattr(cpu_two_phase, "cfunc", cfunc)
    monkeypatch.setattr(cpu_two_phase, "_say_uncached", said.append)
    monkeypatch.setattr(cpu_two_phase, "kernel", cpu_two_phase.kernel.__wrapped__)
    given = case(3, 0, 2, (4,), 20)
    assert_close(in_two_phases(given, "cpu")[0].mix, in_one_phase(given)[0].mix)
    assert set(said) == {"cannot cache function: no locator available"}


def test_large_outputs_are_advised_huge_pages_within_their_memory(monkeypatch):
    advised = []
    monkeypatch.setattr(fused_two_phase, "_madvise", lambda: lambda *given: advised.append(given))
    monkeypatch.setattr(fused_two_phase, "_FRESH", 2**16)
    monkeypatch.setattr(fused_two_phase.mmap, "MADV_HUGEPAGE", 14, raising=False)
    small, large = torch.empty(100), torch.empty(2**15 + 5)
    assert fused_two_phase._with_huge_pages(small) is small
    assert fused_two_phase._with_huge_pages(large) is large
    ((start, size, _),) = advised
    page = fused_two_phase.mmap.PAGESIZE
    assert start % page == size % page == 0
    assert large.data_ptr() <= start < start + size <= large.data_ptr() + large.nbytes
    monkeypatch.delattr(fused_two_phase.mmap, "MADV_HUGEPAGE")
    assert fused_two_phase._with_huge_pages(large) is large
    assert len(advised) == 1


@pytest.mark.skipif(not hasattr(fused_two_phase.mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_the_system_takes_the_advice():
    tensor = torch.empty(fused_two_phase._FRESH // 4)
    page = fused_two_phase.mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    assert fused_two_phase._madvise()(start, page, fused_two_phase.mmap.MADV_HUGEPAGE) in (0, -1)
    given = case(2, 0, 8, (1100,), 1000)
    assert_close(in_two_phases(given, "cpu", [7])[0].mix, in_one_phase(given, [7])[0].mix)


def test_tensors_that_are_watched_go_the_eager_way(monkeypatch):
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    used, given = kernels_used(monkeypatch), case(3, 1, 1, (4,), 8)
    with Watch():
        read = in_two_phases(given, "auto")[0]
        with pytest.raises(BackendError, match="plain tensors, outside of compiled graphs"):
            in_two_phases(given, "cpu")
    assert not used
    assert_close(read.mix, in_one_phase(given)[0].mix)


@pytest.mark.slow
def test_a_compiled_graph_holds_both_phases_and_agrees():
    code = """
import torch
from attention_residuals.ops.two_phase import phase_1, read_open_block
blocks, queries, gains = torch.randn(3, 4, 16).unbind(0), torch.randn(2, 16), torch.ones(2, 16)
def mix(live):
    found = phase_1(blocks, queries, gains, eps=1e-6)
    return read_open_block(found, 1, live, queries[1], gains[1], eps=1e-6).mix
live = torch.randn(4, 16)
print((torch.compile(mix, fullgraph=True)(live) - mix(live)).abs().max().item())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) <= 1e-5
