"""Where sources are: at the length-weighted mean of their writers, token by token."""

import torch
from closeness import assert_close
from stats.planted import one_hot, planted, uniform

from attention_residuals.stats import (
    effective_distance,
    reach_back,
    source_distances,
)

SITE = "output"
ROW = torch.ones(1, 3, dtype=torch.float64)
BLOCKS = torch.tensor([[1.0, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]])


def test_a_block_is_where_the_length_weighted_mean_of_its_writers_is():
    outputs = torch.zeros(5, 1, 3, 8, dtype=torch.float64)
    outputs[:, ..., 0] = torch.tensor([5.0, 1.0, 3.0, 0.0, 2.0], dtype=torch.float64)[:, None, None]
    trace = planted(uniform(3), membership=BLOCKS, outputs=outputs, names=("embedding", "B1", "B2"))
    found = source_distances(trace, SITE)
    assert_close(found.mean[:, 0, 0], torch.tensor([5.0, (4 + 3 * 3) / 4, 1.0], dtype=torch.float64))
    assert found.nearest[:, 0, 0].tolist() == [5, 3, 1]
    assert found.farthest[:, 0, 0].tolist() == [5, 4, 2]
    average = effective_distance(trace, SITE)
    assert_close(average.nearest[0], torch.full((3,), 3.0, dtype=torch.float64))
    assert_close(average.farthest[0], torch.full((3,), 11 / 3, dtype=torch.float64))
    assert (average.nearest <= average.mean).all()
    assert (average.mean <= average.farthest).all()


def test_writers_that_wrote_nothing_have_a_place():
    outputs = torch.zeros(5, 1, 3, 8, dtype=torch.float64)
    trace = planted(uniform(3), membership=BLOCKS, outputs=outputs, names=("embedding", "B1", "B2"))
    # All three sources are zeros, hence one.
    assert source_distances(trace, SITE).mean.shape[0] == 1
    outputs[0], outputs[1] = 1.0, 2.0
    outputs[1, ..., 0] = 3.0
    trace = planted(uniform(3), membership=BLOCKS, outputs=outputs, names=("embedding", "B1", "B2"))
    assert_close(
        source_distances(trace, SITE).mean[:, 0, 0], torch.tensor([5.0, 4.0, 1.5], dtype=torch.float64)
    )


def test_a_membership_of_each_token_gives_each_token_its_distance():
    membership = torch.zeros(2, 3, 1, 3)
    membership[0, 0], membership[1, 1], membership[1, 2] = 1.0, 1.0, torch.tensor([0.0, 1.0, 0.0])
    outputs = torch.ones(3, 1, 3, 8, dtype=torch.float64)
    trace = planted(one_hot(1, 2), membership=membership, outputs=outputs, names=("embedding", "stream"))
    found = source_distances(trace, SITE)
    assert_close(found.mean[1, 0], torch.tensor([2.0, 1.5, 2.0], dtype=torch.float64))
    assert found.nearest[1, 0].tolist() == [2, 1, 2]
    assert reach_back(trace, SITE, sublayers=1).eq(0).all()


def test_values_of_nobody_knows_whom_have_no_distance():
    membership = torch.eye(3)
    outputs = torch.randn(3, 1, 3, 8).double()
    trace = planted(uniform(3), membership=membership.where(membership == 1, 0), outputs=outputs)
    membership[1] = torch.nan
    unknown = planted(uniform(3), membership=membership, outputs=outputs, values=outputs)
    assert source_distances(trace, SITE).mean.isfinite().all()
    assert source_distances(unknown, SITE).mean[1].isnan().all()
    assert effective_distance(unknown, SITE).mean.isnan().all()
