"""An effect that was put there is found, and none where there is none."""

import numpy as np
import pytest
from contradiction_fixtures import evidence, made_up

from attention_residuals.contradiction import CONTROLS, finding, gate, primary_effects, probe
from attention_residuals.contradiction.controls import all_controls
from attention_residuals.contradiction.effects import cell_tests, design_effect, over_seeds

DRAWS = 2000


def test_a_planted_effect_is_found_and_measured():
    main = made_up(effect=0.3)
    found = finding(primary_effects(main), main.clusters, num_draws=DRAWS)
    assert found.p <= 0.001
    assert found.low < 0.3 < found.high
    assert abs(found.estimate - 0.3) < 0.1
    assert found.num_clusters == 16


def test_nothing_is_found_where_there_is_nothing():
    small = [
        finding(primary_effects(made_up(seed=seed)), made_up(seed=seed).clusters, num_draws=500).p <= 0.05
        for seed in range(40)
    ]
    assert sum(small) <= 6  # 2 are expected


def test_effects_of_one_item_more_or_less_do_not_count_as_many():
    rng = np.random.default_rng(0)
    shared = np.repeat(rng.normal(size=16), 4)
    clusters = [str(number // 4) for number in range(64)]
    assert design_effect(shared + 0.1 * rng.normal(size=64), clusters) > 3
    assert design_effect(rng.normal(size=64), clusters) < 2


def test_a_planted_cell_may_be_named_and_no_other():
    found = cell_tests(made_up(effect=0.5), num_draws=DRAWS)
    assert found.named == ("L2.attention < embedding",)
    assert found.rows["L2.attention"] <= 0.05
    assert (found.q_yekutieli >= found.q_hochberg).all()
    assert cell_tests(made_up(), num_draws=DRAWS).named == ()


def test_models_are_put_together():
    mains = [made_up(effect=0.3, seed=seed) for seed in range(3)]
    found = over_seeds([finding(primary_effects(one), one.clusters, num_draws=500) for one in mains])
    assert found.num_models == 3
    assert found.sign_agreement == 1
    assert found.low < 0.3 < found.high
    assert found.random is not None
    alone = over_seeds([finding(primary_effects(mains[0]), mains[0].clusters, num_draws=500)])
    assert np.isnan(alone.low)
    assert alone.random is None


def test_there_are_twelve_controls_and_a_planted_effect_passes_them():
    found = all_controls(evidence(made_up(effect=0.4)))
    assert len(CONTROLS) == 12
    assert list(found) == list(CONTROLS)
    judged = {name: control.holds for name, control in found.items() if control.holds is not None}
    assert judged.keys() >= {
        "surprise-matched",
        "before the plant",
        "untrained and zero-query",
        "static weights",
    }
    assert all(judged.values()), found
    across = found["matches of other items"].numbers
    assert across["estimate"] == pytest.approx(0.4, abs=0.15)
    assert found["other wording"].numbers["estimate"] == pytest.approx(0.3, abs=0.1)


def test_what_is_surprise_alone_is_no_effect_of_contradiction():
    main = made_up(per_nat=0.1, rare=4.0, cost=4.0, items=1024)  # so many that the slope is known
    assert finding(primary_effects(main), main.clusters, num_draws=DRAWS).p <= 0.001
    control = all_controls(evidence(main))["surprise-matched"]
    assert control.holds is False
    assert control.numbers["slope"] == pytest.approx(0.1, abs=0.03)


def test_a_control_that_cannot_be_computed_says_so():
    main = made_up(effect=0.4)
    main.arrays["surprisal"][:], main.arrays["remark surprisal"][:] = 1.0, 1.0
    control = all_controls(evidence(main))["surprise-matched"]
    assert control.holds is None
    assert control.found.startswith("not computed")


def test_controls_that_must_be_zero_notice_what_is_not():
    given = evidence(made_up(effect=0.4))
    given.models["untrained"].arrays["cell clr"][0, 0, 1, 0] = 1e-6
    given.sets["copied"].about["tokens_before_plant"] = 0
    found = all_controls(given)
    assert found["untrained and zero-query"].holds is False
    assert found["before the plant"].holds is False


def test_the_gate_lets_a_model_pass_that_notices():
    found = gate(made_up(), num_draws=DRAWS)
    assert found.is_passed
    assert found.probe.accuracy > 0.9
    assert abs(found.probe.shuffled - 0.5) < 0.2
    assert found.surprise.estimate == pytest.approx(4, abs=0.2)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"knows": False}, "consistent texts right"), ({"cost": 0.0}, "surprising")],
)
def test_the_gate_stops_a_model_that_does_not(options, why):
    found = gate(made_up(**options), num_draws=DRAWS)
    assert not found.is_passed
    assert any(why in failure for failure in found.failures)


def test_a_probe_cannot_use_what_the_planted_token_is():
    token = np.array([[[-1.0, 1.0], [-1.0, 1.0]]])[..., None]
    states = np.random.default_rng(0).normal(size=(60, 2, 2, 3)) + 5 * token
    assert abs(probe(states, ["a", "b", "c"] * 20).accuracy - 0.5) < 0.1
