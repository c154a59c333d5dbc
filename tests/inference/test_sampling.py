"""What is drawn is the filtered distribution, and each draw is a sequence's own."""

import math

import numpy as np
import pytest
import torch
from closeness import assert_close
from hypothesis import assume, given
from hypothesis import strategies as st

from attention_residuals.errors import ConfigError, DataError, NonFiniteError, ShapeError
from attention_residuals.inference import Sampling
from attention_residuals.inference.sampling import choose, filtered_probabilities

NO_IDS = torch.tensor([], dtype=torch.long)
# Quarters make ties; floats make none.
numbers = st.lists(st.floats(-4, 4) | st.integers(-8, 8).map(lambda n: n / 4), min_size=2, max_size=12)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0.1, 3),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.just(1.0) | st.floats(0.01, 1),
    min_p=st.just(0.0) | st.floats(0, 1),
)


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def chosen(logits, sampling, *, sequence=0, step=0, seen=NO_IDS):
    found = choose(float64([logits]), sampling, seen=[seen], sequences=[sequence], steps=[step])
    return int(found.tokens[0])


def by_hand(logits, sampling):
    """The filtered distribution with plain lists, and how near a token came to being in or out by rounding."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: sampling.top_k]
    weights = [math.exp((logits[token] - max(logits)) / sampling.temperature) for token in order]
    likely = [weight / sum(weights) for weight in weights]
    before = [math.fsum(likely[:place]) for place in range(len(order))]
    nearest = min(abs(some - sampling.top_p) for some in before)
    nearest = min(nearest, *(abs(weight - sampling.min_p) for weight in (*weights[1:], 9.0)))
    kept = {
        token: share
        for token, share, above, weight in zip(order, likely, before, weights, strict=True)
        if above < sampling.top_p and weight >= sampling.min_p
    }
    return float64([kept.get(token, 0.0) / sum(kept.values()) for token in range(len(logits))]), nearest


@given(logits=numbers, sampling=samplings)
def test_what_is_drawn_from_is_the_distribution_by_hand(logits, sampling):
    expected, nearest = by_hand(logits, sampling)
    assume(nearest > 1e-9)
    assert_close(filtered_probabilities(float64(logits), sampling), expected)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, [0, 1, 3]),
        ({"top_p": 0.7}, [0, 1, 3]),  # 0.4 0.2 0.2 0.1 0.1
        ({"top_p": 0.85}, [0, 1, 2, 3]),
        ({"min_p": 0.4}, [0, 1, 3]),
        ({"min_p": 0.6}, [3]),
        ({"min_p": 1.0}, [3]),
        ({"top_k": 2, "top_p": 0.6}, [3]),  # 2/3 of the two, though 0.4 of all
        ({"top_k": 4, "top_p": 0.85, "min_p": 0.4}, [0, 1, 3]),
    ],
    ids=repr,
)
def test_each_filter_keeps_what_it_says_and_of_equal_tokens_the_lower_ids(options, kept):
    probabilities = float64([0.2, 0.2, 0.1, 0.4, 0.1])
    found = filtered_probabilities(probabilities.log(), Sampling(**options))
    assert found.nonzero()[:, 0].tolist() == kept
    assert_close(found[kept], probabilities[kept] / probabilities[kept].sum())


def test_among_many_equal_tokens_filters_keep_the_lower_ids():
    for options in ({"top_k": 8}, {"top_p": 7.5 / 500}):
        found = filtered_probabilities(torch.zeros(500, dtype=torch.float64), Sampling(**options))
        assert found.nonzero()[:, 0].tolist() == list(range(8))


@given(logits=st.lists(st.floats(-80, 80), min_size=2, max_size=12))
def test_settings_that_filter_nothing_give_the_softmax(logits):
    found = filtered_probabilities(float64(logits), Sampling(top_k=12, top_p=1.0, min_p=0.0))
    torch.testing.assert_close(found, float64(logits).softmax(0), rtol=1e-12, atol=0)


@given(logits=numbers, seed=st.integers(0, 99))
def test_temperature_zero_and_filters_down_to_one_take_the_most_likely(logits, seed):
    best = max(range(len(logits)), key=lambda token: (logits[token], -token))
    assert chosen(logits, Sampling(temperature=0.0, seed=seed)) == best
    assert chosen(logits, Sampling(top_k=1, seed=seed)) == best
    assert chosen(logits, Sampling(top_p=1e-9, seed=seed)) == best
    assert filtered_probabilities(float64(logits), Sampling(temperature=0.0)).tolist()[best] == 1


def test_draws_follow_the_distribution_over_steps_sequences_and_seeds():
    sampling = Sampling(temperature=0.7, top_k=4, seed=3)
    logits, count = float64([1.0, 0.0, 2.0, -1.0, 0.5]).expand(20_000, 5), 20_000
    zeros, rising = [0] * count, list(range(count))
    expected = count * filtered_probabilities(logits[0], sampling)
    for sequences, steps in ((zeros, rising), (rising, zeros)):
        found = choose(logits, sampling, seen=[NO_IDS] * count, sequences=sequences, steps=steps)
        counts = found.tokens.bincount(minlength=5)
        assert counts[3] == 0
        kept = expected > 0
        assert ((counts - expected)[kept].square() / expected[kept]).sum() < 16.3  # 3 degrees, p = 0.001
        pairs = (found.tokens[1:] * 5 + found.tokens[:-1]).bincount(minlength=25).view(5, 5)
        together = expected[:, None] * expected / count
        both = together > 0
        assert ((pairs - together)[both].square() / together[both]).sum() < 37.7  # 15 degrees, p = 0.001


@given(seed=st.integers(0, 2**63 - 1), size=st.integers(2, 70))
def test_a_row_is_chosen_as_if_alone(seed, size):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, size, generator=generator)
    sampling = Sampling(top_p=0.9, repetition_penalty=1.3, seed=seed)
    seen = [torch.arange(row % size) for row in range(4)]
    places = [(0, 7), (9, 7), (2, 8), (2**40, 0)]
    together = choose(
        logits, sampling, seen=seen, sequences=[a for a, _ in places], steps=[b for _, b in places]
    )
    for row, (sequence, step) in enumerate(places):
        alone = choose(logits[row : row + 1], sampling, seen=[seen[row]], sequences=[sequence], steps=[step])
        assert alone.tokens[0] == together.tokens[row]
        assert alone.log_probabilities[0] == together.log_probabilities[row]


def test_a_draw_depends_on_seed_sequence_and_step():
    flat = [0.0] * 1000
    draws = {chosen(flat, Sampling(seed=seed), sequence=n, step=step)
             for seed in (0, 1) for n in (0, 1) for step in (0, 1)}  # fmt: skip
    assert len(draws) == 8


def test_a_little_noise_in_the_logits_moves_few_draws():
    """Drawing by rank would change many, for nearly equal tokens swap places."""
    logits = float64([n * 1e-7 for n in range(64)])
    noisy = logits + 1e-5 * torch.randn(64, dtype=torch.float64)
    changed = sum(
        chosen(logits.tolist(), Sampling(), step=n) != chosen(noisy.tolist(), Sampling(), step=n)
        for n in range(200)
    )
    assert changed <= 1


@given(logits=numbers, penalty=st.floats(0.5, 2), seen=st.lists(st.integers(0, 1), max_size=4))
def test_the_penalty_divides_positive_and_multiplies_negative_logits_of_seen_tokens(logits, penalty, seen):
    adjusted = [
        (logit / penalty if logit > 0 else logit * penalty) if token in seen else logit
        for token, logit in enumerate(logits)
    ]
    ids = torch.tensor(seen, dtype=torch.long)
    for step in range(5):
        for temperature in (0.0, 1.5):
            plain = Sampling(temperature=temperature)
            penalised = Sampling(temperature=temperature, repetition_penalty=penalty)
            assert chosen(logits, penalised, seen=ids, step=step) == chosen(adjusted, plain, step=step)


def test_log_probabilities_are_those_before_any_filter():
    logits = torch.tensor([[0.0, 1.0, 3.0]], requires_grad=True)
    sampling = Sampling(temperature=0.0, repetition_penalty=9.0, top_k=1)
    found = choose(logits, sampling, seen=[torch.tensor([2])], sequences=[0], steps=[0])
    assert found.tokens.tolist() == [1]
    assert_close(found.log_probabilities, logits.detach().double().log_softmax(1)[:, 1])
    assert not found.log_probabilities.requires_grad


def test_a_token_of_minus_infinity_is_never_chosen():
    logits = [-math.inf, 0.0, -math.inf, 0.5]
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.99), Sampling(min_p=0.1)):
        assert {chosen(logits, sampling, step=step) for step in range(40)} == {1, 3}


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1e300])
def test_extreme_temperatures_are_still_a_distribution(temperature):
    found = filtered_probabilities(float64([3.0, 80.0, -80.0]), Sampling(temperature=temperature))
    assert_close(found, float64([0, 1, 0] if temperature < 1 else [1 / 3] * 3))


@pytest.mark.parametrize("row", [[0, math.nan, 1], [0, math.inf, 1], [-math.inf] * 3], ids=repr)
def test_logits_that_give_no_distribution_are_told_with_their_sequence(row):
    logits = torch.tensor([[0.0, 0, 0], row])
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFiniteError, match="sequence 7 at step 3"):
            choose(
                logits, Sampling(temperature=temperature), seen=[NO_IDS] * 2, sequences=[4, 7], steps=[0, 3]
            )


@pytest.mark.parametrize("ids", [[0, 3], [-1]], ids=repr)
def test_seen_ids_without_a_logit_are_refused(ids):
    with pytest.raises(DataError, match="0 to 2, one for each logit"):
        chosen([0.0, 1.0, 2.0], Sampling(repetition_penalty=1.2), seen=torch.tensor(ids))


def test_one_of_everything_is_needed_for_every_sequence():
    with pytest.raises(ShapeError, match="2 rows of logits, 1 seen, 2 sequences, 2 steps"):
        choose(torch.zeros(2, 3), Sampling(), seen=[NO_IDS], sequences=[0, 1], steps=[0, 0])


def made(**options):
    """Makes one past the type checker of the tests, which would come first."""
    sampling = object.__new__(Sampling)
    for name, value in {**vars(Sampling()), **options}.items():
        object.__setattr__(sampling, name, value)
    sampling.__post_init__()
    return sampling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"top_p": math.nan}, "top_p=nan"),
        ({"min_p": -0.1}, r"min_p=-0\.1"),
        ({"min_p": 1.1}, r"min_p=1\.1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
        ({"temperature": "1"}, "temperature='1'"),
        ({"top_p": None}, "top_p=None"),
        ({"min_p": "0.1"}, "min_p='0.1'"),
        ({"repetition_penalty": None}, "repetition_penalty=None"),
        ({"seed": 1.5}, r"seed=1\.5"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, r"from 0 to 2\*\*63 - 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        made(**options)


def test_numbers_of_numpy_are_those_of_python():
    given = made(temperature=np.float32(0.5), top_k=np.int64(3), seed=np.int64(7))
    assert given == Sampling(temperature=0.5, top_k=3, seed=7)
    assert type(given.seed) is int


@pytest.mark.parametrize("penalty", [1e-308, 5e-324, 1e308])
@pytest.mark.parametrize("logits", [[2.0, 1.0, -3.0], [-2.0, -1.0, -3.0]], ids=repr)
def test_an_extreme_penalty_is_no_infinity(logits, penalty):
    greedy = Sampling(temperature=0.0, repetition_penalty=penalty)
    everything = torch.tensor([0, 1, 2])
    assert chosen(logits, greedy, seen=everything) in range(3)
    assert chosen(logits, Sampling(repetition_penalty=penalty), seen=everything[:1]) in range(3)
    ruled_out = [-math.inf, *logits]
    assert chosen(ruled_out, greedy, seen=torch.tensor([0])) == chosen(ruled_out, Sampling(temperature=0.0))
