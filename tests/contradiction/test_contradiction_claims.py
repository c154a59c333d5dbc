"""What is printed agrees with the numbers, seed by seed, also of results of the older format."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from contradiction_fixtures import STUDY, evidence, made_up

from attention_residuals.configs import encode
from attention_residuals.contradiction import conclusions, finding, primary_effects
from attention_residuals.contradiction.behaviour import accuracies
from attention_residuals.contradiction.controls import all_controls
from attention_residuals.contradiction.figures import figures
from attention_residuals.contradiction.findings import plain, routing_of
from attention_residuals.contradiction.results import read_results
from attention_residuals.contradiction.sections import sections
from attention_residuals.contradiction.study import digest
from attention_residuals.contradiction.tables import tables
from attention_residuals.errors import ConfigError
from attention_residuals.page import ReportFigure

COMMITTED = Path(__file__).parents[2] / "studies" / "contradiction" / "first" / "confirm.json"
DRAWS = 2000


@pytest.fixture
def old(tmp_path):
    """The committed results, of format 1, as if they were of the tiny study."""
    told = {**json.loads(COMMITTED.read_text()), "study": digest(encode(STUDY))}
    assert told["format"] == 1
    (tmp_path / "confirm.json").write_text(json.dumps(told))
    return read_results(tmp_path / "confirm.json", STUDY)


def said(result, start):
    (found,) = (one for one in conclusions(result) if one.sentence.startswith(start))
    return found.sentence


def rows_of(result, name):
    header, *rows = tables(result, conclusions(result))[name]
    return [dict(zip(header, row, strict=True)) for row in rows]


def test_verdicts_on_corrected_claims_are_right_where_they_say_conflict():
    main = made_up()
    main.arrays["verdict"][:] = 5.0  # "conflict" whatever the text
    assert {one["verdict"] for one in accuracies(main, name="corrected").values()} == {1.0}
    assert {one["verdict"] for one in accuracies(main, name="main").values()} == {0.5}
    main.arrays["verdict"][:] = -5.0
    assert {one["verdict"] for one in accuracies(main, name="corrected").values()} == {0.0}


def test_verdicts_on_corrected_claims_that_were_scored_wrongly_are_not_shown(old):
    rows = rows_of(old, "accuracy")
    shares = {row["set"]: row["verdict_right"] for row in rows if row["seed"] == "0"}
    assert shares["corrected"] == ""
    assert float(shares["held out"]) > 0.6
    picture = ReportFigure(png=b"\x89PNG\r\n\x1a\n", caption="c", alt="a")
    page = next(
        one
        for one in sections(old, (), {"behaviour": picture})
        if one.heading.startswith("What the Block models")
    )
    assert {row[4] for row in page.table if row[0].endswith(": corrected")} == {"not scored"}


def test_routes_are_told_seed_by_seed_and_the_other_way_is_not_nothing(old):
    verdict = said(
        old,
        "Giving the contradictory text the consistent one's weights on the preregistered routes, for the v",
    )
    seeds = verdict.split("seed 1 ")
    assert "seed 0 moves it the other way, farther than they do (-1.719 logits" in seeds[0]
    assert "weights -47% [-50%, -44%]" in seeds[0]
    assert seeds[1].startswith("does more than they do (+0.285 logits towards the other text, 10 random")
    assert verdict.endswith("More with every seed, as was asked for: no.")
    answer = said(
        old,
        "Giving the consistent text the contradictory one's weights on the preregistered routes, for the a",
    )
    assert answer.count("does not do more than they do") == 2


@pytest.mark.parametrize(
    ("chosen", "random", "word", "every"),
    [
        (0.5, [0.1, -0.1, 0.2] * 3, "does more than they do (+0.500", "yes"),
        (
            -0.5,
            [0.1, -0.1, 0.2] * 3,
            "moves it the other way, farther than they do (-0.500",
            "no",
        ),
        (-0.2, [-0.5, -0.4, -0.3] * 3, "does not do more than they do (-0.200", "no"),
        (0.1, [0.5, 0.4, 0.3] * 3, "does not do more than they do (+0.100", "no"),
        (0.3, [0.5, -0.4, 0.2] * 3, "does not do more than they do (+0.300", "no"),
    ],
)
def test_words_of_routes_are_those_of_the_numbers(old, chosen, random, word, every):
    for one in old["seeds"].values():
        if one["causes"]:
            p = (1 + sum(other >= chosen for other in random)) / (1 + len(random))
            one["causes"]["repair"]["random"]["answer"] |= {"chosen": chosen, "random": random, "p": p}
    sentence = said(
        old,
        "Giving the contradictory text the consistent one's weights on the preregistered routes, for the a",
    )
    assert sentence.count(word) == 2
    assert sentence.endswith(f"More with every seed, as was asked for: {every}.")
    moved = [
        row
        for row in rows_of(old, "restoration")
        if (row["direction"], row["metric"], row["patch"]) == ("repair", "answer", "weights")
    ]
    away = (1 + sum(other <= chosen for other in random)) / (1 + len(random))
    assert {float(row["p_other_way"]) for row in moved} == {away}


def test_shuffles_turn_whole_templates():
    shared = np.repeat(np.random.default_rng(0).normal(size=16), 4)
    main = made_up(seed=3)
    main = replace(main, clusters=tuple(f"family/template{number // 4}" for number in range(64)))
    main.arrays["clr"] += (shared[:, None, None] * np.array([[0.0, 1.0], [1.0, 0.0]]))[..., None, None]
    control = all_controls(evidence(main))["labels shuffled"]
    effects = primary_effects(main)
    sums = effects.reshape(16, 4).sum(1)
    expected = 1.96 * np.sqrt((sums**2).sum()) / 64
    assert control.numbers["reach"] == pytest.approx(expected, rel=0.1)
    assert control.numbers["reach"] > 1.5 * 1.96 * np.sqrt((effects**2).sum()) / 64
    assert control.holds == (abs(effects.mean()) > control.numbers["reach"])


def test_shuffles_of_single_items_are_called_that_and_judge_nothing(old):
    control = old["seeds"]["0"]["routing"]["controls"]["labels shuffled"]
    assert control["holds"] is None
    assert "by single items" in control["found"]
    rows = [row for row in rows_of(old, "controls") if row["control"] == "labels shuffled"]
    assert {row["number"] for row in rows} == {"reach by single items", "estimate"}
    assert {row["holds"] for row in rows} == {""}


def test_a_word_as_surprising_presupposes_no_shift(old):
    sentence = said(
        old, "At equal surprisal a contradiction changes the primary number more than a rare word does"
    )
    assert "shift is" not in sentence
    assert "no evidence of a shift, which the primary test did not find" in sentence
    assert "p 0.011 by items;" in sentence
    old["seeds"]["1"]["routing"]["controls"]["surprise-matched"]["holds"] = False
    assert said(old, "At equal surprisal what a contradiction does to the primary number is not told from")


def test_a_word_as_surprising_is_tested_by_templates_beside_the_items():
    main = made_up(effect=0.1)
    shared = np.repeat(np.random.default_rng(1).normal(size=16), 4)
    main = replace(main, clusters=tuple(f"family/template{number // 4}" for number in range(64)))
    main.arrays["clr"] += (shared[:, None, None] * np.array([[0.0, 1.0], [1.0, 0.0]]))[..., None, None]
    control = all_controls(evidence(main))["surprise-matched"]
    assert control.numbers["template_p"] > 1.5 * control.numbers["p"]
    assert (
        f"p {control.numbers['p']:.2g} by items, {control.numbers['template_p']:.2g} by templates"
        in control.found
    )


def test_matches_of_other_items_have_no_p_of_their_own(old):
    main = made_up(effect=0.4)
    control = all_controls(evidence(main))["matches of other items"]
    primary = finding(primary_effects(main), main.clusters, num_draws=DRAWS)
    assert control.numbers["estimate"] == pytest.approx(primary.estimate)
    assert (control.numbers["low within items"], control.numbers["high within items"]) == (
        primary.low,
        primary.high,
    )
    for found in (plain(control), old["seeds"]["0"]["routing"]["controls"]["matches of other items"]):
        assert "p" not in found["numbers"]
        assert "p 0" not in found["found"]
        assert "within items [" in found["found"]
        assert "by construction" in found["expected"]


def test_full_models_that_fail_and_models_that_lack_are_named(old):
    assert "answers 74% of consistent texts right" in said(
        old, "The Full model of seed 0 does not pass the gate"
    )
    assert said(old, "The Full model of seed 1 passes the gate.")
    assert "do not say whether they were trained" in said(old, "No Full and no standard model of seed 2")
    assert "Of seed 0 nothing is said here: the Full model fails" in said(
        old, "Not found: after a contradiction the Full"
    )
    gates = {(row["seed"], row["arm"]): row for row in rows_of(old, "gate")}
    assert gates["0", "Full"]["passed"] == "False"
    assert "74%" in gates["0", "Full"]["failures"]
    assert gates["1", "Full"]["passed"] == "True"
    assert gates["2", "Full"]["failures"] == "not measured"
    below = " ".join(one.get_text() for one in figures(old, conclusions(old))["primary"].figure.texts)
    assert "Full models seed 0 fails the gate, seed 1 " in " ".join(below.split())


def test_models_that_were_not_trained_to_their_end_are_named(old):
    old["seeds"]["2"]["missing"] = ["full", "standard"]
    assert said(old, "There was no Full and no standard model of seed 2 that was trained to its end.")
    old["seeds"]["2"]["missing"] = []
    assert not any("seed 2" in one.sentence and "Full" in one.sentence for one in conclusions(old))


def test_the_weight_is_told_beside_its_clr(old):
    sentence = said(
        old, "The weight on the embedding in the same reads moves the other way than its clr with seeds 0, 1"
    )
    assert "seed 0 -0.00103 [-0.00194, -0.00031], p 0.028, beside +0.0030 nats of clr" in sentence
    for one in old["seeds"].values():
        if one["routing"]:
            one["routing"]["numbers"]["weight"]["estimate"] = 0.001
    assert said(old, "The weight on the embedding in the same reads moves the same way as its clr: ")


def test_reads_whose_sign_differs_between_seeds_are_named(old):
    sentence = said(old, "Read by read the seeds do not agree")
    first, second = (old["seeds"][seed]["routing"]["profile"] for seed in "01")
    apart = [site for site in first if first[site] * second[site] < 0]
    assert f"at {len(apart)} of {len(first)} reads, and at 4 of the 4 whose mean" in sentence
    assert "(L4.attention, L5.attention, L6.attention, L7.attention)" in sentence
    old["seeds"]["1"]["routing"]["profile"] = first
    assert said(old, "The effect on clr has the same sign with every seed at each of 24 reads.")
    old["seeds"]["1"]["routing"] = None
    assert not any(
        "Read by read" in one.sentence for one in conclusions({**old, "seeds": {"0": old["seeds"]["0"]}})
    )


def test_single_reads_have_intervals_where_they_were_measured(old):
    main = made_up(effect=0.4)
    routing = plain(routing_of(evidence(main), None))
    low, high = routing["profile_intervals"]["L2.attention"]
    assert low < routing["profile"]["L2.attention"] < high
    assert "No interval of a single read" in figures(old, conclusions(old))["profile-mlp"].caption
    for one in old["seeds"].values():
        if one["routing"]:
            one["routing"] |= {name: routing[name] for name in ("profile", "profile_intervals")}
    drawn = figures(old, conclusions(old))
    for kind, start in (("mlp", 0), ("attention", 1)):
        assert "Bands: 95 %" in drawn[f"profile-{kind}"].caption
        axes = drawn[f"profile-{kind}"].figure.axes[0]
        assert len(axes.collections) == 2
        sites = [site for site in routing["profile"] if site.endswith(kind)]
        corners = axes.collections[0].get_paths()[0].vertices
        for layer, site in enumerate(sites, start):
            at = sorted(set(corners[np.isclose(corners[:, 0], layer), 1]))
            assert [at[0], at[-1]] == pytest.approx(routing["profile_intervals"][site])


def test_both_kinds_of_claim_have_their_number_of_items_below_the_figure(old):
    below = " ".join(one.get_text() for one in figures(old, conclusions(old))["distance"].figure.texts)
    assert "200, 1012, 200 derived items; 200, 200, 200 copied items at 1, 2, 3 steps" in " ".join(
        below.split()
    )


def test_results_of_another_study_are_refused(old, tmp_path):
    other = replace(STUDY, num_random=9)
    with pytest.raises(ConfigError, match=digest(encode(STUDY))[:12]) as caught:
        read_results(tmp_path / "confirm.json", other)
    assert digest(encode(other))[:12] in str(caught.value)
    assert "--config" in str(caught.value)
