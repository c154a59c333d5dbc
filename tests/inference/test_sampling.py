import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.inference import Sampling
from attention_residuals.inference.sampling import choose, filtered_probabilities

NO_IDS = torch.tensor([], dtype=torch.long)
numbers = st.lists(st.floats(-20, 20), min_size=2, max_size=12)


def chosen(logits, sampling, *, sequence=0, step=0, seen=NO_IDS):
    found = choose(torch.tensor([logits]), sampling, seen=[seen], sequences=[sequence], steps=[step])
    return int(found.tokens[0])


def by_hand(logits, sampling):
    """The filtered distribution with plain lists."""
    scaled = [logit / sampling.temperature for logit in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    total = sum(math.exp(scaled[token] - scaled[order[0]]) for token in order)
    likely = {token: math.exp(scaled[token] - scaled[order[0]]) / total for token in order}
    kept, before = {}, 0.0
    for token in order:
        if before < sampling.top_p and likely[token] >= sampling.min_p * likely[order[0]]:
            kept[token] = likely[token]
        before += likely[token]
    return [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(logits))]


@given(
    numbers,
    st.floats(0.1, 3),
    st.none() | st.integers(1, 12),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.1, 0.9]),
)
def test_what_is_drawn_from_is_the_distribution_by_hand(logits, temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = filtered_probabilities(torch.tensor(logits, dtype=torch.float64), sampling)
    expected = torch.tensor(by_hand(logits, sampling), dtype=torch.float64)
    close = torch.isclose(found, expected, atol=1e-9)
    # A sum may land on top_p itself, and rounding then decides; nothing else may differ.
    assert close.all() or top_p < 1
    assert found.sum().item() == pytest.approx(1)
    assert found[int(torch.tensor(logits, dtype=torch.float64).argmax())] > 0


@given(numbers, st.integers(0, 99))
def test_temperature_zero_and_top_k_one_take_the_most_likely(logits, seed):
    best = max(range(len(logits)), key=lambda token: (torch.tensor(logits)[token].item(), -token))
    assert chosen(logits, Sampling(temperature=0.0, seed=seed)) == best
    assert chosen(logits, Sampling(top_k=1, seed=seed)) == best
    assert chosen(logits, Sampling(top_p=1e-9, seed=seed)) == best


def test_draws_follow_the_distribution():
    logits, sampling = [1.0, 0.0, 2.0, -1.0, 0.5], Sampling(temperature=0.7, top_k=4, seed=3)
    expected = filtered_probabilities(torch.tensor(logits), sampling)
    counts = torch.zeros(5)
    for step in range(4000):
        counts[chosen(logits, sampling, step=step)] += 1
    assert counts[3] == 0
    kept = expected > 0
    chi_square = ((counts - 4000 * expected)[kept].square() / (4000 * expected)[kept]).sum()
    assert chi_square < 16.3  # three degrees of freedom, p = 0.001


def test_a_draw_depends_on_seed_sequence_and_step_and_on_no_other_row():
    logits, sampling = torch.randn(3, 50), Sampling(seed=5)
    seen = [NO_IDS] * 3
    together = choose(logits, sampling, seen=seen, sequences=[0, 1, 2], steps=[7, 7, 8])
    for row, (sequence, step) in enumerate([(0, 7), (1, 7), (2, 8)]):
        alone = choose(logits[row : row + 1], sampling, seen=[NO_IDS], sequences=[sequence], steps=[step])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.log_probabilities[0] == together.log_probabilities[row]
    flat = [0.0] * 1000
    draws = {chosen(flat, Sampling(seed=seed), sequence=n, step=step)
             for seed in (0, 1) for n in (0, 1) for step in (0, 1)}  # fmt: skip
    assert len(draws) == 8


@given(numbers, st.floats(0.5, 2))
def test_the_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens(logits, penalty):
    seen = torch.tensor([0, 1, 0])
    adjusted = [
        (logit / penalty if logit > 0 else logit * penalty) if token in (0, 1) else logit
        for token, logit in enumerate(torch.tensor(logits).double().tolist())
    ]
    best = max(range(len(adjusted)), key=lambda token: (adjusted[token], -token))
    assert chosen(logits, Sampling(temperature=0.0, repetition_penalty=penalty), seen=seen) == best


def test_log_probabilities_are_those_before_any_filter():
    logits = torch.tensor([[0.0, 1.0, 3.0]])
    found = choose(
        logits,
        Sampling(temperature=0.0, repetition_penalty=9.0),
        seen=[torch.tensor([2])],
        sequences=[0],
        steps=[0],
    )
    assert found.tokens.tolist() == [1]
    assert found.log_probabilities[0].item() == pytest.approx(logits.log_softmax(1)[0, 1].item())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_told_with_their_sequence(value):
    logits = torch.zeros(2, 4)
    logits[1, 2] = value
    with pytest.raises(NonFiniteError, match="sequence 7 at step 3"):
        choose(logits, Sampling(), seen=[NO_IDS] * 2, sequences=[4, 7], steps=[0, 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"min_p": -0.1}, r"min_p=-0\.1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**options)
