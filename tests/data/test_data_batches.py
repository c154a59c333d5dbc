"""The order of the data is a function of the seed and the step; evaluation sees every token once."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.data import Batches, sequential
from attention_residuals.errors import ConfigError, DataError

small = st.integers(1, 7)
seeds = st.integers(0, 2**70)


def make(num_tokens=50, sequence_length=4, batch_size=3, seed=0):
    return Batches(
        np.arange(1, num_tokens + 1), sequence_length=sequence_length, batch_size=batch_size, seed=seed
    )


def starts(batches, steps):
    return [int(row[0]) for step in steps for row in batches.at(step).tokens_BT]


@given(seed=seeds, steps=st.lists(st.integers(0, 10**12), min_size=1, max_size=6), batch_size=small)
def test_a_batch_depends_on_seed_and_step_only(seed, steps, batch_size):
    used = make(seed=seed, batch_size=batch_size)
    for step in [*steps, *reversed(steps)]:
        fresh = make(seed=seed, batch_size=batch_size).at(step)
        assert all(torch.equal(a, b) for a, b in zip(used.at(step), fresh, strict=True))


@given(num_tokens=st.integers(8, 60), sequence_length=small, seed=seeds, epoch=st.integers(0, 3))
def test_each_epoch_visits_every_window_exactly_once(num_tokens, sequence_length, seed, epoch):
    batches = make(num_tokens, sequence_length, 1, seed)
    n = batches.num_windows
    assert n == (num_tokens - 1) // sequence_length
    visited = starts(batches, range(epoch * n, (epoch + 1) * n))
    assert sorted(visited) == [1 + window * sequence_length for window in range(n)]


@given(within=st.integers(0, 30), seed=seeds, epoch=st.integers(0, 3))
def test_windows_that_are_shuffled_within_a_distance_stay_near_their_place(within, seed, epoch):
    batches = Batches(np.arange(101), sequence_length=4, batch_size=25, seed=seed, shuffled_within=within)
    order = (batches.at(epoch).tokens_BT[:, 0] // 4).numpy()
    assert sorted(order) == list(range(25))
    assert max(abs(order - np.arange(25))) < max(1, within)


def test_shuffling_within_a_distance_shuffles_and_further_than_all_windows_is_anywhere():
    def order(within):
        batches = Batches(np.arange(2001), sequence_length=2, batch_size=1000, seed=3, shuffled_within=within)
        return (batches.at(0).tokens_BT[:, 0] // 2).numpy()

    assert np.abs(order(20) - np.arange(1000)).mean() > 4
    assert np.abs(order(10**6) - np.arange(1000)).mean() == pytest.approx(1000 / 3, rel=0.1)


@given(a=small, b=small, seed=seeds)
def test_order_of_windows_does_not_depend_on_the_batch_size(a, b, seed):
    first, second = make(batch_size=a, seed=seed), make(batch_size=b, seed=seed)
    assert starts(first, range(b * 4)) == starts(second, range(a * 4))


@given(sequence_length=small, batch_size=st.integers(1, 40), step=st.integers(0, 99))
def test_targets_are_the_next_tokens(sequence_length, batch_size, step):
    batch = make(sequence_length=sequence_length, batch_size=batch_size).at(step)
    for tensor in batch:
        assert tensor.shape == (batch_size, sequence_length)
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    assert torch.equal(batch.targets_BT, batch.tokens_BT + 1)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [
        tuple(starts(make(1001, 10, 100, seed), [epoch])) for seed in (0, 1, 7, 2**32) for epoch in (0, 1, 7)
    ]
    assert len(set(orders)) == len(orders)
    assert all(len(set(order)) == 100 for order in orders)
    assert tuple(sorted(orders[0])) not in orders


def test_a_batch_may_straddle_epochs():
    batches = make(num_tokens=21, sequence_length=4, batch_size=3)
    assert batches.num_windows == 5
    visited = starts(batches, range(5))
    for epoch in range(3):
        assert len(set(visited[epoch * 5 : epoch * 5 + 5])) == 5


def test_order_stays_as_it_was_for_runs_that_were_started_before():
    windows = [(start - 1) // 4 for start in starts(make(41, 4, 10, seed=3), [0, 1])]
    assert windows == [3, 2, 9, 0, 8, 7, 1, 4, 5, 6, 1, 8, 2, 0, 6, 9, 7, 5, 4, 3]


@given(tokens=st.lists(st.integers(0, 2), min_size=9, max_size=60), step=st.integers(0, 9))
def test_equal_document_numbers_mean_no_start_between(tokens, step):
    batch = Batches(np.array(tokens), sequence_length=8, batch_size=2, seed=0).at(step)
    for row, documents in zip(batch.tokens_BT.tolist(), batch.documents_BT.tolist(), strict=True):
        for i in range(8):
            for j in range(i, 8):
                assert (documents[i] == documents[j]) == (0 not in row[i + 1 : j + 1])


def test_tokens_on_disk_make_the_same_batches(tmp_path):
    np.arange(300, dtype="<u2").tofile(tmp_path / "t.bin")
    on_disk = np.memmap(tmp_path / "t.bin", dtype="<u2", mode="r")
    arguments = {"sequence_length": 16, "batch_size": 4, "seed": 1}
    a, b = Batches(on_disk, **arguments), Batches(np.arange(300), **arguments)
    assert all(torch.equal(x, y) for x, y in zip(a.at(9), b.at(9), strict=True))


def test_batches_go_to_the_device_that_was_asked_for():
    batches = Batches(np.arange(9), sequence_length=2, batch_size=1, seed=0, device="meta")
    assert {tensor.device.type for tensor in batches.at(0)} == {"meta"}
    batch = next(sequential(np.arange(9), sequence_length=2, batch_size=1, device="meta"))
    assert {tensor.device.type for tensor in batch} == {"meta"}


@given(num_tokens=st.integers(2, 60), sequence_length=small, batch_size=small)
def test_evaluation_predicts_every_token_after_the_first_once_and_in_order(
    num_tokens, sequence_length, batch_size
):
    batches = list(sequential(np.arange(num_tokens), sequence_length=sequence_length, batch_size=batch_size))
    targets = [token for batch in batches for token in batch.targets_BT.flatten().tolist()]
    assert targets == list(range(1, num_tokens))
    for batch in batches:
        assert torch.equal(batch.targets_BT, batch.tokens_BT + 1)
        assert batch.tokens_BT.shape[0] <= batch_size
        assert batch.tokens_BT.shape[1] <= sequence_length
    ragged = [batch for batch in batches if batch.tokens_BT.shape[1] < sequence_length]
    assert len(ragged) == ((num_tokens - 1) % sequence_length > 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sequence_length": 0}, "sequence_length=0\n.*>= 1"),
        ({"batch_size": 0}, "batch_size=0\n.*>= 1"),
        ({"seed": -1}, "seed=-1\n.*>= 0"),
    ],
)
def test_numbers_out_of_range_are_refused(change, said):
    with pytest.raises(ConfigError, match=said):
        make(**change)


def test_negative_step_is_refused():
    with pytest.raises(ConfigError, match="step=-1"):
        make().at(-1)


def test_evaluation_checks_its_arguments_when_called():
    with pytest.raises(ConfigError, match="batch_size=0"):
        sequential(np.arange(9), sequence_length=2, batch_size=0)
    with pytest.raises(DataError, match=r"1 tokens\n.*at least 2"):
        sequential(np.arange(1), sequence_length=2, batch_size=1)


def test_corpus_shorter_than_a_sequence_is_refused_with_both_lengths():
    assert make(num_tokens=5, sequence_length=4).num_windows == 1
    with pytest.raises(DataError, match=r"4 tokens\n.*at least 5"):
        make(num_tokens=4, sequence_length=4)


@pytest.mark.parametrize("tokens", [np.zeros((9, 9), dtype=np.int64), np.zeros(99)])
def test_tokens_must_be_a_row_of_integers(tokens):
    with pytest.raises(DataError, match="a single row of integers"):
        Batches(tokens, sequence_length=2, batch_size=1, seed=0)
