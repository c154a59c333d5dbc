import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from attention_residuals.errors import ShapeError
from attention_residuals.trace import (
    Effect,
    change_of_log_probability,
    change_of_logit_difference,
    change_of_loss,
    divergence,
)

TOKENS = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(1))


def pair(seed=0, dtype=torch.float64, scale=3.0):
    return scale * torch.randn(2, 2, 5, 11, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def all_effects(clean, edited):
    return [
        change_of_logit_difference(clean, edited, right=3, wrong=4),
        change_of_log_probability(clean, edited, TOKENS),
        divergence(clean, edited),
        change_of_loss(clean, edited, TOKENS),
    ]


def test_no_change_has_no_effect():
    clean = pair()[0]
    assert all(effect.values.eq(0).all() for effect in all_effects(clean, clean.clone()))


def test_every_effect_has_a_name_and_a_unit_of_its_own():
    effects = all_effects(*pair())
    assert len({effect.name for effect in effects}) == 4
    assert all("nats" in effect.unit for effect in effects)


def test_effects_are_those_of_torch():
    clean, edited = pair()
    assert_close(
        change_of_log_probability(clean, edited, TOKENS).values,
        F.nll_loss(clean.log_softmax(-1).mT, TOKENS, reduction="none")
        - F.nll_loss(edited.log_softmax(-1).mT, TOKENS, reduction="none"),
    )
    own, other = torch.distributions.Categorical(logits=clean), torch.distributions.Categorical(logits=edited)
    assert_close(divergence(clean, edited).values, torch.distributions.kl_divergence(own, other))

    def loss(logits):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())

    found = change_of_loss(clean, edited, TOKENS)
    assert found.values.shape == (2, 4)
    assert found.mean() == pytest.approx((loss(edited) - loss(clean)).item(), rel=1e-12)


def test_a_logit_difference_is_of_one_pair_or_of_one_for_each_row():
    clean, edited = pair()
    both = change_of_logit_difference(clean, edited, right=torch.tensor([3, 1]), wrong=torch.tensor([4, 2]))
    first = change_of_logit_difference(clean, edited, right=3, wrong=4)
    second = change_of_logit_difference(clean, edited, right=1, wrong=2)
    assert torch.equal(both.values, torch.stack([first.values[0], second.values[1]]))
    change = edited - clean
    assert_close(first.values, change[..., 3] - change[..., 4])


@given(st.integers(0, 10**6), st.floats(0.01, 30))
def test_effects_stay_in_their_range(seed, scale):
    clean, edited = pair(seed, torch.float32, scale)
    assert divergence(clean, edited).values.min() >= 0
    surprise = -clean.log_softmax(-1).gather(-1, TOKENS[..., None]).squeeze(-1)
    assert (change_of_log_probability(clean, edited, TOKENS).values <= surprise + 1e-5).all()
    loss = -clean[:, :-1].log_softmax(-1).gather(-1, TOKENS[:, 1:, None]).squeeze(-1)
    assert (change_of_loss(clean, edited, TOKENS).values >= -loss - 1e-4).all()


def test_a_logit_difference_adds_up_over_edits():
    clean, edited = pair()
    further = pair(1)[0]

    def change(one, other):
        return change_of_logit_difference(one, other, right=3, wrong=4).values

    assert_close(change(clean, edited) + change(edited, further), change(clean, further))


def test_half_precision_is_measured_in_float32():
    clean, edited = pair(dtype=torch.float32).bfloat16()
    assert all(effect.values.dtype == torch.float32 for effect in all_effects(clean, edited))


def test_a_mean_is_over_the_tokens_that_are_marked():
    effect = Effect(name="a", unit="b", values=torch.tensor([[1.0, 2.0], [4.0, 9.0]]))
    assert effect.mean() == 4.0
    assert effect.mean(torch.tensor([[True, False], [False, True]])) == 5.0
    for mask in (torch.zeros(2, 2, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)):
        with pytest.raises(ShapeError, match="a mask of shape"):
            effect.mean.__wrapped__(effect, mask)


def test_logits_of_other_tokens_are_refused():
    clean, edited = pair()
    for effect in (divergence, lambda *logits: change_of_loss.__wrapped__(*logits, TOKENS)):
        with pytest.raises(ShapeError, match="clean logits"):
            getattr(effect, "__wrapped__", effect)(clean, edited[:, :-1])
