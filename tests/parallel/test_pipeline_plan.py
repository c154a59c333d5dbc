"""What stages receive, hold, send and free, and in which order ranks work; no processes."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.errors import ConfigError
from attention_residuals.parallel.plan import Piece, StageLayout, even_layers, plan
from attention_residuals.parallel.schedules import (
    SCHEDULES,
    bubble,
    most_held,
    most_in_flight,
    orders,
    schedule_named,
)

TRANSPORTS = ("naive", "paper", "cached")


def one_block_a_stage(num_ranks, stages_per_rank):
    return StageLayout(
        sublayers=(2,) * (num_ranks * stages_per_rank), num_ranks=num_ranks, sublayers_per_block=2
    )


@st.composite
def options(draw):
    """Drawn apart from the layout, since run-time checks of hints use random numbers."""
    num_ranks = draw(st.integers(1, 4))
    num_stages = num_ranks * draw(st.integers(1, 3))
    return {
        "sublayers": tuple(draw(st.lists(st.integers(1, 5), min_size=num_stages, max_size=num_stages))),
        "num_ranks": num_ranks,
        "placement": draw(st.sampled_from(["loop", "v"])),
        "sublayers_per_block": draw(st.sampled_from([None, 1, 2, 3, 4, 7, 100])),
    }


@pytest.mark.parametrize(
    ("num_ranks", "stages_per_rank", "counts"),
    [(4, 2, (28, 22, 18)), (8, 2, (120, 92, 84)), (8, 4, (496, 220, 196)), (4, 1, (6, 6, 6))],
)
def test_counts_of_blocks_are_those_of_the_closed_formulas(num_ranks, stages_per_rank, counts):
    p, v, c = num_ranks, stages_per_rank, num_ranks * stages_per_rank
    assert counts == (c * (c - 1) // 2, p * (p - 1) // 2 + (v - 1) * p * p, p * (p - 1) * (2 * v - 1) // 2)
    plans = [plan(one_block_a_stage(p, v), transport) for transport in TRANSPORTS]
    assert tuple(found.num_sent - found.num_embeddings_sent for found in plans) == counts
    assert [found.num_embeddings_sent for found in plans] == [c - 1, p - 1, p - 1]


def test_tensors_of_the_toy_fall_from_35_to_21_and_from_77_to_33():
    assert [plan(one_block_a_stage(4, 2), kind).num_sent for kind in ("naive", "cached")] == [35, 21]
    assert [plan(one_block_a_stage(4, 3), kind).num_sent for kind in ("naive", "cached")] == [77, 33]


def test_blocks_over_two_stages_are_cached_as_in_the_papers_figure():
    """Figure 3: P = 4, V = 2, each block spans two stages."""
    layout = StageLayout(sublayers=(2,) * 8, num_ranks=4, sublayers_per_block=4)
    blocks = {Piece(0, 1): 0, Piece(1, 5): 1, Piece(5, 9): 2, Piece(9, 13): 3, Piece(13, 17): 4}
    found = plan(layout, "paper")
    held = [[blocks[piece] for piece in stage.holds] for stage in found.stages[4:]]
    assert held == [[0], [0], [0, 1], [0, 1]]
    new = [[blocks[piece] for piece in stage.receives if piece in blocks] for stage in found.stages[4:]]
    assert new == [[1, 2], [1, 2], [2, 3], [2, 3]]
    ours = [[blocks[p] for p in stage.receives if p in blocks] for stage in plan(layout).stages[4:]]
    assert ours == [[1, 2], [2], [2, 3], [3]]  # ranks 1 and 3 have made block 1 and block 2 themselves


def test_the_standard_stream_is_one_tensor_a_hop_in_every_transport():
    for placement, hops in (("loop", 7), ("v", 6)):
        layout = StageLayout(
            sublayers=(2, 4, 2, 2, 2, 2, 4, 2), num_ranks=4, placement=placement, sublayers_per_block=None
        )
        assert [plan(layout, transport).num_sent for transport in TRANSPORTS] == [hops] * 3


def test_the_turn_of_a_v_sends_nothing_between_ranks():
    found = plan(StageLayout(sublayers=(2,) * 4, num_ranks=2, placement="v", sublayers_per_block=4))
    assert [stage.rank for stage in found.stages] == [0, 1, 1, 0]
    assert found.stages[1].sends == found.stages[2].receives == ()
    assert found.stages[2].holds == found.stages[2].inputs == found.stages[1].outputs
    assert found.num_sent_by(0) == (2, 2)
    assert found.num_sent_by(1) == (2, 2)


@given(options(), st.sampled_from(TRANSPORTS))
def test_what_a_stage_reads_it_received_or_holds(options, transport):
    layout = StageLayout(**options)
    found = plan(layout, transport)
    for stage in found.stages:
        assert sorted((*stage.receives, *stage.holds)) == sorted(stage.inputs)
        assert set(stage.sends) <= {*stage.inputs, *stage.outputs}
        kept = {p for other in found.stages_of(stage.rank) if other.stage < stage.stage for p in other.keeps}
        assert set(stage.holds) <= kept
        assert set(stage.keeps) <= {*stage.inputs, *stage.outputs}
    for stage, following in itertools.pairwise(found.stages):
        assert stage.sends == following.receives
        assert stage.outputs == following.inputs


@given(options())
def test_nothing_is_sent_to_a_rank_twice_or_to_the_rank_that_made_it(options):
    layout = StageLayout(**options)
    found = plan(layout)
    for rank in range(layout.num_ranks):
        stages = found.stages_of(rank)
        arrived = [piece for stage in stages for piece in stage.receives]
        made = [piece for stage in stages for piece in stage.outputs if piece not in stage.inputs]
        assert len({*arrived, *made}) == len(arrived) + len(made)
        assert found.num_alive_on(rank) == len(arrived) + len(made)


@given(options(), st.sampled_from(TRANSPORTS))
def test_everything_held_is_freed_once(options, transport):
    layout = StageLayout(**options)
    found = plan(layout, transport)
    for rank in range(layout.num_ranks):
        stages = found.stages_of(rank)
        kept = [piece for stage in stages for piece in stage.keeps]
        freed = [piece for stage in stages for piece in stage.frees]
        assert len(set(kept)) == len(kept)
        assert sorted(kept) == sorted(freed)
        for stage in stages:  # freed where it is held for the last time
            assert not set(stage.frees) & {
                p for later in stages if later.stage > stage.stage for p in later.holds
            }


@given(options())
def test_naive_sends_at_least_what_the_paper_sends_and_the_paper_at_least_what_we_send(options):
    layout = StageLayout(**options)
    naive, paper, cached = (plan(layout, transport) for transport in TRANSPORTS)
    assert naive.num_sent >= paper.num_sent >= cached.num_sent
    for found in (naive, paper, cached):
        sent = [found.num_sent_by(rank) for rank in range(layout.num_ranks)]
        assert sum(forward for forward, _ in sent) == sum(backward for _, backward in sent) == found.num_sent


@given(options())
def test_a_state_is_what_the_sublayers_before_it_wrote_each_once(options):
    layout = StageLayout(**options)
    for written in range(sum(layout.sublayers) + 1):
        state = layout.state_after(written)
        assert [piece.first for piece in state[1:]] == [piece.end for piece in state[:-1]]
        assert (state[0].first, state[-1].end) == (0, written + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sublayers": (2, 0, 2, 2)}, "at least one sublayer"),
        ({"sublayers": (2, 2, 2)}, "3 stages on 2 ranks"),
        ({"sublayers": ()}, "0 stages on 2 ranks"),
        ({"num_ranks": 0}, "at least one rank"),
        ({"sublayers_per_block": 0}, "None is the standard"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(change, message):
    good = {"sublayers": (2, 2, 2, 2), "num_ranks": 2, "sublayers_per_block": 4}
    with pytest.raises(ConfigError, match=message):
        StageLayout(**{**good, **change})


def test_layers_are_spread_evenly_and_fewer_than_stages_are_refused():
    for num_layers in range(4, 20):
        spread = even_layers(num_layers, 4)
        assert sum(spread) == num_layers
        assert max(spread) - min(spread) <= 1
    with pytest.raises(ConfigError, match="3 layers for 4 stages"):
        even_layers(3, 4)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 16)])
def test_an_order_does_every_action_once_and_never_waits_for_itself(name, num_ranks, num_microbatches):
    stages_per_rank = SCHEDULES[name].stages_per_rank or 2
    order = orders(
        name, num_ranks=num_ranks, stages_per_rank=stages_per_rank, num_microbatches=num_microbatches
    )
    done = [(a.stage, a.microbatch, kind) for actions in order for a in actions for kind in parts(a.kind)]
    pairs = num_ranks * stages_per_rank * num_microbatches
    assert len(set(done)) == len(done) == 3 * pairs
    closed = (num_ranks - 1) / (stages_per_rank * num_microbatches + num_ranks - 1)
    share = bubble(order)
    if SCHEDULES[name].splits_backward:
        assert share < closed
    else:
        assert share == pytest.approx(closed)
    assert all(1 <= most_in_flight(actions) <= stages_per_rank * num_microbatches for actions in order)


def parts(kind):
    return {"F": "F", "B": "IW"}.get(kind, kind)


def test_the_store_is_fullest_when_most_microbatches_are_in_flight():
    found = plan(one_block_a_stage(2, 2))  # rank 0 keeps the embedding and block 1 for stage 2
    assert [len(stage.keeps) for stage in found.stages] == [2, 3, 0, 0]
    (first, second) = orders("LoopedBFS", num_ranks=2, stages_per_rank=2, num_microbatches=4)
    assert (most_held(found, first), most_held(found, second)) == (8, 12)
    assert most_held(plan(one_block_a_stage(2, 2), "naive"), first) == 0
    single = plan(one_block_a_stage(4, 1))
    order = orders("1F1B", num_ranks=4, stages_per_rank=1, num_microbatches=8)
    assert [most_held(single, actions) for actions in order] == [0] * 4
    assert [most_in_flight(actions) for actions in order] == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("name", "num_ranks", "stages_per_rank", "num_microbatches", "message"),
    [
        ("1F1B", 2, 2, 8, "2 stages on each rank for 1F1B"),
        ("1F1B", 4, 1, 3, "4 or more"),
        ("ZBVZeroBubble", 2, 3, 8, "3 stages on each rank"),
        ("DualPipeV", 2, 2, 3, "4 or more"),
        ("Interleaved1F1B", 2, 2, 7, "a multiple of 2"),
        ("GPipe", 2, 1, 0, "num_microbatches=0"),
        ("1F2B", 2, 1, 4, "did you mean '1F1B'"),
    ],
)
def test_what_a_schedule_does_not_admit_is_refused(
    name, num_ranks, stages_per_rank, num_microbatches, message
):
    with pytest.raises(ConfigError, match=message):
        orders(name, num_ranks=num_ranks, stages_per_rank=stages_per_rank, num_microbatches=num_microbatches)


def test_every_schedule_is_there_by_its_name():
    assert all(schedule_named(name).torch_class.__name__ == f"Schedule{name}" for name in SCHEDULES)
