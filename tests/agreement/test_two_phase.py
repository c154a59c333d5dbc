"""Reads in two phases against one read over all sources: values and gradients."""

import pytest
import torch
from agreement.phase_cases import (
    NORM,
    PLAIN,
    Case,
    case,
    every_backend,
    flat,
    gradients,
    in_one_phase,
    in_two_phases,
    shapes,
)
from closeness import assert_close, distance
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.ops import (
    depth_attention,
)
from attention_residuals.ops.two_phase import merge, phase_1, phase_2, read_open_block


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
    assert read.logits[0].item() == pytest.approx(-1e4, rel=1e-6)  # the last bit is the processor's
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
