import copy
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import model_config, train_config

from attention_residuals.configs import decode, encode
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import StandardResidual
from attention_residuals.train import TRAIN_CONFIGS, WSD, AdamW, Cosine, Muon, Saving, Segment, Segments
from attention_residuals.train.config import first_difference

STEPS = st.integers(1, 200)
SHARE = st.floats(0, 1)


@given(warmup=st.integers(0, 50), more=STEPS, final=SHARE)
def test_cosine_rises_to_the_peak_and_falls_to_its_final_fraction(warmup, more, final):
    schedule, num_steps = Cosine(warmup_steps=warmup, final_fraction=final), warmup + more
    shares = [schedule.fraction(step, num_steps) for step in range(1, num_steps + 1)]
    rising, falling = shares[:warmup], shares[warmup:]
    assert rising == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == pytest.approx(final)
    assert falling[0] < 1 or final == 1
    quarter, half = (schedule.fraction(warmup + step, warmup + 100) for step in (25, 50))
    assert half == pytest.approx((1 + final) / 2)
    assert quarter == pytest.approx(final + (1 - final) * (2 + math.sqrt(2)) / 4)


@given(warmup=st.integers(0, 50), stable=STEPS, decay=STEPS, final=SHARE)
def test_wsd_stays_at_the_peak_and_then_falls_in_equal_steps(warmup, stable, decay, final):
    schedule = WSD(warmup_steps=warmup, decay_steps=decay, final_fraction=final)
    num_steps = warmup + stable + decay
    shares = [schedule.fraction(step, num_steps) for step in range(1, num_steps + 1)]
    assert shares[:warmup] == pytest.approx([(step + 1) / warmup for step in range(warmup)])
    assert shares[warmup : warmup + stable] == [1.0] * stable
    falling = shares[warmup + stable - 1 :]
    drops = [earlier - later for earlier, later in itertools.pairwise(falling)]
    assert drops == pytest.approx([(1 - final) / decay] * decay, abs=1e-12)
    assert shares[-1] == pytest.approx(final)


def test_a_whole_run_of_warm_up_fits_both_schedules():
    assert Cosine(warmup_steps=3).fraction(3, 3) == 1.0
    assert WSD(warmup_steps=3, decay_steps=0).fraction(3, 3) == 1.0


def test_the_learning_rate_is_the_optimizers_times_the_schedules_share():
    config = train_config(optimizer=AdamW(learning_rate=0.5), schedule=Cosine(warmup_steps=4))
    assert [config.learning_rate(step) for step in (1, 2, 3, 4)] == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize(
    "config",
    [
        train_config(),
        train_config(model=model_config(StandardResidual()), optimizer=AdamW(clip_norm=None)),
        train_config(schedule=WSD(decay_steps=2), micro_batch_size=None, precision="bfloat16"),
    ],
    ids=["muon", "adamw", "wsd"],
)
def test_a_config_comes_back_from_json_as_it_was(config):
    assert decode(json.loads(json.dumps(encode(config))), TRAIN_CONFIGS) == config


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_steps": 0}, "num_steps=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**63}, "at most 2**63 - 1"),
        ({"shuffled_within": -1}, "shuffled_within=-1"),
        ({"micro_batch_size": 3}, "use one of [1, 2, 4]"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"micro_batch_size": -2}, "micro_batch_size=-2"),
        ({"sequence_length": 65}, "max_tokens=64"),
        ({"schedule": WSD(warmup_steps=4, decay_steps=3)}, "at least 7 steps"),
        ({"schedule": Cosine(warmup_steps=7)}, "at least 7 steps"),
    ],
)
def test_a_run_that_cannot_be_is_refused(changes, named):
    with pytest.raises(ConfigError) as caught:
        train_config(**changes)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("schedule", AdamW(), "Cosine or WSD or Segments"),
        ("optimizer", Cosine(), "AdamW or Muon"),
        ("model", None, "DecoderConfig"),
        ("precision", "float16", "precision='float16'"),
    ],
)
def test_a_part_of_another_type_is_refused(name, value, named):
    config = train_config()
    object.__setattr__(config, name, value)  # the constructor is checked by the tests' shape checker
    with pytest.raises(ConfigError) as caught:
        config.__post_init__()
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("make", "changes", "named"),
    [
        (AdamW, {"learning_rate": 0.0}, "learning_rate=0.0"),
        (AdamW, {"learning_rate": float("nan")}, "learning_rate=nan"),
        (AdamW, {"learning_rate": float("inf")}, "learning_rate=inf"),
        (AdamW, {"weight_decay": -0.1}, "weight_decay=-0.1"),
        (AdamW, {"beta1": 1.0}, "beta1=1.0"),
        (AdamW, {"beta2": -0.1}, "beta2=-0.1"),
        (AdamW, {"eps": 0.0}, "eps=0.0"),
        (AdamW, {"clip_norm": 0.0}, "clip_norm=0.0"),
        (Muon, {"momentum": 1.0}, "momentum=1.0"),
        (Cosine, {"warmup_steps": -1}, "warmup_steps=-1"),
        (Cosine, {"final_fraction": 1.1}, "final_fraction=1.1"),
        (WSD, {"decay_steps": -1}, "decay_steps=-1"),
        (Saving, {"every": 0}, "every=0"),
        (Saving, {"keep": 0}, "keep=0"),
        (Saving, {"evaluate_every": 0}, "evaluate_every=0"),
        (Saving, {"evaluate_batches": 0}, "evaluate_batches=0"),
        (Saving, {"log_every": 0}, "log_every=0"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(make, changes, named):
    with pytest.raises(ConfigError) as caught:
        make(**changes)
    assert named in caught.value.got


NOT_WHOLE = [2.5, True, "2", float("nan")]


@pytest.mark.parametrize("value", NOT_WHOLE)
@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((train_config(), name) for name in ("num_steps", "batch_size", "sequence_length", "seed")),
        (train_config(), "micro_batch_size"),
        *((Saving(), name) for name in ("every", "keep", "evaluate_every", "evaluate_batches", "log_every")),
        (Cosine(), "warmup_steps"),
        (WSD(decay_steps=1), "warmup_steps"),
        (WSD(decay_steps=1), "decay_steps"),
    ],
)
def test_a_count_that_is_no_whole_number_is_refused(config, name, value):
    config = copy.copy(config)
    object.__setattr__(config, name, value)  # the constructor is checked by the tests' shape checker
    with pytest.raises(ConfigError, match=f"{name}="):
        config.__post_init__()


def test_the_largest_seed_is_taken():
    assert train_config(seed=2**63 - 1).seed == 2**63 - 1


def test_all_batches_of_the_validation_split_may_be_asked_for():
    assert Saving(evaluate_batches=None).evaluate_batches is None


def test_the_first_difference_is_named_whichever_side_has_the_field():
    assert first_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 2}}) is None
    assert first_difference({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}) == "a.c is None there and 2 here"
    assert first_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}) == "a.c is 2 there and None here"
    assert first_difference({"a": {"b": 1}}, {"a": 7}) == "a is {'b': 1} there and 7 here"


PARTS = (
    Segment(num_steps=4, end=1.0),
    Segment(num_steps=10, end=1.0),
    Segment(num_steps=6, end=0.1, shape="cosine"),
    Segment(num_steps=1, end=0.25),
    Segment(num_steps=5, end=0.0),
)
"""Pre-training with warm-up, stable and decay; then a mid-training that rises again and goes to 0."""


def test_segments_follow_one_another_and_stay_where_they_end():
    schedule = Segments(parts=PARTS)
    shares = [schedule.fraction(step, 30) for step in range(1, 31)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4:14] == [1.0] * 10
    assert shares[16] == pytest.approx(0.55)  # in the middle of half a cosine
    assert shares[19:21] == [0.1, 0.25]
    assert shares[21:26] == pytest.approx([0.2, 0.15, 0.1, 0.05, 0.0])
    assert shares[26:] == [0.0] * 4
    assert schedule.least_steps == 26


def test_segments_of_a_warm_up_a_peak_and_a_decay_are_wsd():
    parts = (Segment(num_steps=3, end=1.0), Segment(num_steps=5, end=1.0), Segment(num_steps=4, end=0.1))
    schedule, wsd = Segments(parts=parts), WSD(warmup_steps=3, decay_steps=4)
    for step in range(1, 13):
        assert schedule.fraction(step, 12) == pytest.approx(wsd.fraction(step, 12))


def test_segments_are_stored_and_read_back_and_must_fit_the_run():
    config = train_config(schedule=Segments(parts=PARTS), num_steps=26)
    assert decode(json.loads(json.dumps(encode(config))), TRAIN_CONFIGS) == config
    with pytest.raises(ConfigError, match="at least 26 steps"):
        train_config(schedule=Segments(parts=PARTS), num_steps=25)


@pytest.mark.parametrize("wrong", [{"num_steps": 0}, {"end": 1.5}, {"end": float("nan")}], ids=str)
def test_impossible_segments_are_refused(wrong):
    with pytest.raises(ConfigError, match="1 step or more"):
        Segment(**{"num_steps": 3, "end": 0.5, **wrong})
    with pytest.raises(ConfigError, match="begin with a warm-up"):
        Segments(parts=())
    part = {"type": "Segment", "num_steps": 3, "end": 0.5}
    for parts in ([{**part, "shape": "square"}], [0.5]):
        with pytest.raises(ConfigError, match=r"Segment\.shape='square'|parts=\(0\.5,\)"):
            decode({"type": "Segments", "parts": parts}, TRAIN_CONFIGS)
