"""What the benchmarks are built of; no test here looks at a clock."""

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.arms import op_arms
from benchmarks.cases import CASES
from benchmarks.timing import paired_times, ratio


def test_arms_take_turns_there_and_back():
    calls = []
    times = paired_times({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=2)
    assert "".join(calls) == "abccba" * 3  # one round warms up
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 2, "b": 2, "c": 2}


def test_a_ratio_is_paired_and_its_interval_holds_it():
    theirs = [1.0, 2.0, 10.0, 3.0, 5.0]
    middle, low, high = ratio([2 * seconds for seconds in theirs], theirs)
    assert (middle, low, high) == (2.0, 2.0, 2.0)
    middle, low, high = ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5)
    assert middle == 3.0
    assert 1.0 <= low < middle < high <= 5.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from within the peers
def test_every_arm_that_is_here_computes_the_same_mix():
    sources, query, gain = list(torch.randn(5, 7, 96)), torch.randn(96), torch.ones(96)
    arms = {name: arm for name, arm in op_arms(96).items() if arm.run is not None and "compiled" not in name}
    mixes = {
        name: arm.run(sources, query, gain) for name, arm in arms.items() if arm.kind != "other mathematics"
    }
    assert {"attention-residuals, auto", "stacked reference", "FLA naive"} <= set(mixes)
    for mix in mixes.values():
        assert (mix - mixes["stacked reference"]).norm() <= 1e-5 * mix.norm()


def test_every_case_says_what_it_measures():
    assert all(case.__doc__ for case in CASES.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_check_finds_the_backends_of_a_device_and_that_they_agree(dtype):
    found = gpu_check._agreement("cpu", dtype)
    assert set(found["errors"]) == {"cpu", "eager", "reference"}
    assert found["agrees"]


def test_the_gpu_check_times_backends_side_by_side():
    found = gpu_check._timing("cpu", 3, 16, 64)
    assert set(found) == {"what", "cpu", "eager"}


def test_the_gpu_check_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 1
    assert "no CUDA device" in capsys.readouterr().err
