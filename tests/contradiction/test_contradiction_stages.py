"""The whole study, made tiny: everything but the numbers is what ``attnres study contradiction`` gives."""

import csv
import json
import re

import pytest
import torch
from contradiction_fixtures import SMALL, STUDY, evidence, made_up
from test_preregistration import git, write

from attention_residuals.contradiction import (
    behaviour,
    conclusions,
    measurement,
    run_study,
    stages,
)
from attention_residuals.contradiction.claims import primary_of
from attention_residuals.contradiction.effects import Finding, over_seeds
from attention_residuals.contradiction.figures import FIGURES, figures
from attention_residuals.contradiction.findings import behaviour_of, plain, routing_of
from attention_residuals.contradiction.models import model_of, run_folder
from attention_residuals.contradiction.preregistration import Preregistration
from attention_residuals.contradiction.tables import TABLES, tables
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models.weights import fingerprint
from attention_residuals.train import load_run
from attention_residuals.train.trainer import initial_model

AGREED = Preregistration("0" * 64, "1" * 40, 16, {"0": ("L1.attention < embedding", "output < B1")}, "3" * 64)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "run"
    assert run_study(SMALL, folder, folder / "none.md", stage="train", progress=False)
    return folder


@pytest.fixture(scope="module")
def piloted(trained):
    run_study(SMALL, trained, trained / "none.md", stage="pilot", progress=False)
    return json.loads((trained / "pilot.json").read_text())


@pytest.fixture(scope="module")
def failing(trained, piloted):
    """The results of a model that learned nothing."""
    return stages.confirm(SMALL, trained, AGREED._replace(pilot=piloted["filled_in"]["pilot"]))


@pytest.fixture(scope="module")
def passing(trained, piloted):
    """The same with a gate that stands open, to see what comes behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(behaviour, "LEAST_SHARE", -1.0)
        patch.setattr(behaviour, "_is_surprised", lambda found: True)
        agreed = AGREED._replace(sha256="2" * 64, pilot=piloted["filled_in"]["pilot"])
        return stages.confirm(SMALL, trained, agreed)


def test_arms_differ_in_their_rule_only(trained):
    rules = {}
    for arm in ("block", "full", "standard"):
        config = load_run(run_folder(trained, arm, 0)).config
        rules[arm] = config.model.residual
        assert config == SMALL.train_config(arm, 0)
    assert rules["block"] == AttnRes(sublayers_per_block=2)
    assert rules["full"] == AttnRes(sublayers_per_block=1)
    assert rules["standard"] == StandardResidual()


def test_made_models_share_the_block_models_weights_or_its_start(trained):
    block, zero, fresh = (dict(model_of(SMALL, trained, arm, 0).named_parameters()) for arm in
                          ("block", "zero-query", "untrained"))  # fmt: skip
    queries = [name for name in block if name.endswith("pseudo_query")]
    assert any(block[name].abs().sum() > 0 for name in queries)
    assert all(zero[name].abs().sum() == 0 for name in queries)
    assert all(torch.equal(zero[name], block[name]) for name in block if name not in queries)
    assert not torch.equal(fresh["embedding.weight"], block["embedding.weight"])
    begun = dict(initial_model(load_run(run_folder(trained, "block", 0)).config).named_parameters())
    assert fresh.keys() == begun.keys()
    assert all(torch.equal(fresh[name], begun[name]) for name in begun)


def test_the_pilot_says_what_the_preregistration_needs(piloted):
    block = piloted["filled_in"]
    assert len(block["routes"]["0"]) == SMALL.num_routes
    assert all(" < " in route for route in block["routes"]["0"])
    assert 0.2 <= block["planned_dz"] <= 0.3
    assert block["num_items"] >= 196
    assert set(piloted["seeds"]["0"]["behaviour"]["accuracy"]) == {"main", "distance 1", "distance 3"}


def test_a_pilot_that_was_killed_measures_only_the_rest(trained, piloted, monkeypatch):
    monkeypatch.setattr(measurement, "measure", None)  # a second measurement would fail
    assert stages.pilot(SMALL, trained) == piloted


def test_a_failing_gate_gives_a_report_without_claims_about_routing(trained, failing):
    found = conclusions(failing)
    assert {claim.about for claim in found} == {"behaviour"}
    assert "No model passes the gate" in found[-1].sentence
    assert failing["over_seeds"]["primary"] is None
    (trained / "figures").mkdir()
    (trained / "figures" / "cells.png").write_bytes(b"of an earlier report")
    run_study(SMALL, trained, trained / "none.md", stage="report", progress=False)
    page = (trained / "report.html").read_text()
    assert "No model passes the gate" in page
    assert "Crossed effects" not in page
    assert "http:" not in page
    assert "https:" not in page
    assert AGREED.sha256 in page
    told = (trained / "claims.yaml").read_text()
    assert told.count("- sentence:") == len(found)
    assert {path.name for path in (trained / "tables").iterdir()} == {"accuracy.csv", "gate.csv"}
    assert {path.name for path in (trained / "figures").iterdir()} == {"behaviour.png", "behaviour.svg"}
    assert page.count("data:image/png;base64,") == 1
    with pytest.raises(ConfigError, match="finished"):
        run_study(SMALL, trained, trained / "none.md", stage="report", progress=False)


def test_what_stands_behind_the_gate_is_complete(passing):
    (one,) = passing["seeds"].values()
    assert len(one["routing"]["controls"]) == 12
    for name in ("before the plant", "untrained and zero-query", "static weights"):
        assert one["routing"]["controls"][name]["holds"] is True, name
    assert one["causes"]["routes"] == list(AGREED.routes["0"])
    assert one["causes"]["repair"]["random"]["mass"] == pytest.approx(
        one["causes"]["repair"]["weights"]["mass"], rel=0.05
    )
    assert {"weight", "norm share", "projection share"} <= set(one["causes"]["agreement"]["correlations"])
    assert [pair["direction"] for pair in one["causes"]["interactions"]] in (
        ["repair", "break"],
        ["break", "repair"],
    )
    searched = {read["site"] for read in one["causes"]["exclusivity"]["reads"]}
    assert searched == {"L1.attention", "output"}
    assert one["causes"]["exclusivity"]["num_items"] == 8
    json.dumps(passing, allow_nan=False)


def test_every_sentence_has_a_test_and_numbers_that_are_there(passing):
    found = conclusions(passing)
    assert {claim.about for claim in found} == {"behaviour", "routing", "causes"}
    assert any(claim.sentence.startswith("Not found") for claim in found)
    tests = " ".join(claim.test for claim in found)
    assert "exclusivity search" in tests
    assert "max-T over all pairs" in tests
    for claim in found:
        assert claim.test
        file, path = claim.artefact.split(": ")
        assert file == "confirm.json"
        where = passing
        for key in path.replace("*", "0").split("."):
            where = where[key]
        assert where


def results(passing, mains, *, full_knows=True):
    """The results of several seeds whose routing is made up, with causes of a real run."""
    (one,) = passing["seeds"].values()
    seeds = {}
    for seed, main in enumerate(mains):
        full = main if full_knows else made_up(knows=False)
        gate, told = behaviour_of({"main": full}, num_draws=200)
        routing = plain(routing_of(evidence(main), full if gate.is_passed else None))
        seeds[str(seed)] = {**one, "full_gate": told, "routing": routing}
    found = {arm: primary_of(seeds, arm).values() for arm in ("primary", "full")}
    together = {
        arm: plain(over_seeds([Finding(**each) for each in some])) if some else None
        for arm, some in found.items()
    }
    return {**passing, "seeds": seeds, "over_seeds": together}


def told(result, about, start):
    return next(
        one.sentence for one in conclusions(result) if one.about == about and one.sentence.startswith(start)
    )


def test_a_planted_effect_is_called_found_and_more_than_surprise(passing):
    result = results(passing, [made_up(effect=0.4, seed=seed) for seed in range(3)])
    assert "towards the embedding" in told(result, "routing", "Found: ")
    assert "Mean over 3 models" in told(result, "routing", "Found: ")
    assert "no evidence" not in told(
        result, "routing", "At equal surprisal a contradiction changes the primary"
    )
    assert "L2.attention < embedding" in told(result, "routing", "Cells that may be named with every seed")


def test_full_models_that_fail_the_gate_are_in_no_claim_and_no_picture(passing):
    result = results(passing, [made_up(effect=0.5, seed=1), made_up(effect=0.5, seed=2)], full_knows=False)
    assert result["over_seeds"]["full"] is None
    said = [one.sentence for one in conclusions(result) if "Full" in one.sentence]
    assert len(said) == 3
    assert said[0].startswith("The Full model of seed 0 does not pass the gate: it answers ")
    assert said[2] == "Nothing is said of the Full models' routing: none passes the gate (seeds 0, 1)."
    found = tables(result, conclusions(result))
    assert {row[1] for row in found["effects"][1:]} == {"Block"}
    assert [row[0] for row in found["over_seeds"][1:]] == ["Block"]
    drawn = figures(result, conclusions(result))["primary"].figure
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["Block"]
    assert "Full models seed 0 fails the gate, seed 1 fails the gate" in " ".join(
        one.get_text() for one in drawn.texts
    )


def test_an_effect_of_surprise_alone_is_called_that(passing):
    result = results(passing, [made_up(per_nat=0.1, seed=seed) for seed in range(2)])
    assert told(result, "routing", "Found: ")
    assert told(
        result, "routing", "At equal surprisal what a contradiction does to the primary number is not told"
    )


def test_models_that_disagree_are_said_to(passing):
    effects = (0.4, -0.4)
    result = results(passing, [made_up(effect=effect, seed=seed) for seed, effect in enumerate(effects)])
    assert told(result, "routing", "Models contradict each other")
    some = results(passing, [made_up(effect=0.4), made_up(seed=1)])
    assert told(some, "routing", "Found in some models only")


def test_nothing_is_called_not_found(passing):
    result = results(passing, [made_up(seed=seed) for seed in range(3)])
    assert told(result, "routing", "Not found")
    assert told(result, "routing", "No cell may be named")


def changed_causes(passing, change):
    other = json.loads(json.dumps(passing))
    change(other["seeds"]["0"]["causes"])
    return other


def test_pairs_of_routes_are_told_with_the_largest(passing):
    def name_first(causes):
        first, second = causes["interactions"]
        first["family_p"], second["family_p"] = 0.01, 0.5
        first["beyond"] |= {"estimate": -2.0, "low": -2.5, "high": -1.5}
        second["beyond"]["estimate"] = 0.1

    sentence = told(changed_causes(passing, name_first), "causes", "Some pairs of preregistered routes")
    assert "0 more and 1 less than the sum, of 2 tests" in sentence
    assert "-2.0000 [-2.5000, -1.5000] beyond the sum, p 0.01" in sentence

    def name_none(causes):
        for pair in causes["interactions"]:
            pair["family_p"] = 0.051

    assert told(changed_causes(passing, name_none), "causes", "No pair of preregistered routes")
    none = changed_causes(passing, lambda causes: causes.pop("interactions"))
    assert not any("pair of preregistered" in claim.sentence for claim in conclusions(none))
    assert "interactions" not in tables(none, conclusions(none))


def test_other_weights_are_told_beside_what_the_contradiction_moves(passing):
    def reach(causes, moved):
        for read in causes["exclusivity"]["reads"]:
            read |= {"moved": 0.9, "moved_same": moved, "pair": 0.05}

    far = changed_causes(passing, lambda causes: reach(causes, 0.4))
    assert "and 2 of 2 reads" in told(far, "causes", "Weights of single reads can move farther")
    near = changed_causes(passing, lambda causes: reach(causes, 0.04))
    assert "and 0 of 2 reads" in told(near, "causes", "For some reads no weights were found")


def test_tables_hold_the_numbers_of_the_results(passing):
    mains = [made_up(effect=0.5, seed=seed) for seed in range(2)]
    result = results(passing, mains)
    found = tables(result, conclusions(result))
    assert tuple(found) == TABLES
    for rows in found.values():
        assert len({len(row) for row in rows}) == 1
        assert not any(cell.startswith(("=", "@")) for row in rows for cell in row)
    cells = [dict(zip(found["cells"][0], row, strict=True)) for row in found["cells"][1:]]
    assert len(cells) == 2 * len(mains[0].cells)
    named = {(row["seed"], row["site"], row["source"]) for row in cells if row["named"] == "True"}
    assert named == {(seed, "L2.attention", "embedding") for seed in "01"}
    largest = max(cells, key=lambda row: float(row["effect_nats"]))
    assert float(largest["effect_nats"]) == pytest.approx(0.5, abs=0.1)
    assert float(largest["max_t_p"]) <= 0.05
    effects = [dict(zip(found["effects"][0], row, strict=True)) for row in found["effects"][1:]]
    primary = [
        row for row in effects if (row["model"], row["number"], row["place"]) == ("Block", "clr", "answer")
    ]
    assert [float(row["estimate"]) for row in primary] == [
        one["routing"]["primary"]["estimate"] for one in result["seeds"].values()
    ]
    patches = [dict(zip(found["restoration"][0], row, strict=True)) for row in found["restoration"][1:]]
    assert len(patches) == 2 * 2 * 4 * 2
    own = result["seeds"]["0"]["causes"]["repair"]
    assert float(patches[0]["moved_estimate"]) == own["weights"]["answer"]["moved"]["estimate"]
    random = [row["share_estimate"] for row in patches if row["patch"] == "random"]
    share = own["random"]["answer"]["share"]["estimate"]
    assert random[0] == ("" if share is None else str(share))


def test_accuracies_are_told_by_family_kind_and_distance(failing):
    header, *rows = tables(failing, conclusions(failing))["accuracy"]
    found = [dict(zip(header, row, strict=True)) for row in rows]
    assert {(row["kind"], row["distance"]) for row in found if row["set"] in ("main", "distance 3")} == {
        ("derived", "2"),
        ("derived", "3"),
    }
    assert {row["kind"] for row in found} == {"derived", "copied", "irrelevant", "corrected"}
    main = [row for row in found if row["set"] == "main"]
    assert len({row["family"] for row in main}) == len(main)
    assert sum(int(row["items"]) for row in main) == failing_items(failing)
    assert all(0 <= float(row["verdict_right"]) <= 1 for row in found)


def failing_items(result):
    return result["seeds"]["0"]["behaviour"]["surprise"]["num_items"]


def test_figures_say_what_they_are_from_and_mark_what_passes(passing):
    result = results(passing, [made_up(effect=0.5, seed=seed) for seed in range(2)])
    claims = conclusions(result)
    found = figures(result, claims)
    assert set(found) >= set(FIGURES) - {"restoration"}
    for name, drawn in found.items():
        below = " ".join(" ".join(text.get_text().split()) for text in drawn.figure.texts)
        for needed in ("n = ", "nothing is padded", "float32", "seed 0", "preregistration 2222", "code "):
            assert needed in below, (name, needed)
        assert result["seeds"]["0"]["behaviour"]["model"][:12] in below
        assert result["seeds"]["0"]["behaviour"]["code"][:12] in below
    panels = [axes for axes in found["cells"].figure.axes if axes.get_title(loc="left")]
    assert [axes.get_title(loc="left") for axes in panels] == ["seed 0", "seed 1", "mean"]
    sites = [label.get_text() for label in panels[0].get_yticklabels()]
    for axes in panels:
        (mark,) = axes.patches
        assert (sites[round(mark.get_y() + 0.5)], round(mark.get_x() + 0.5)) == ("L2.attention", 0)
    nothing = results(passing, [made_up(seed=seed) for seed in range(2)])
    drawn = figures(nothing, conclusions(nothing))["cells"].figure
    assert not any(axes.patches for axes in drawn.axes)


def test_a_control_that_must_be_zero_ends_all_claims(passing):
    broken = json.loads(json.dumps(passing))
    broken["seeds"]["0"]["routing"]["controls"]["static weights"]["holds"] = False
    found = conclusions(broken)
    assert {claim.about for claim in found} == {"behaviour", "pipeline"}
    assert "not to be trusted" in found[-1].sentence
    assert set(tables(broken, found)) == {"accuracy", "gate", "controls"}
    assert set(figures(broken, found)) == {"behaviour"}


def test_the_report_shows_all_parts_and_a_pair(passing, trained, tmp_path):
    placed(passing, tmp_path, trained)
    run_study(SMALL, tmp_path, tmp_path / "none.md", stage="report", progress=False)
    page = (tmp_path / "report.html").read_text()
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings[0] == "What was found, and what was not"
    assert {"Crossed effects", "The twelve controls", "What the routes do", "Layer by layer"} <= set(headings)
    assert {"Pairs of routes", "Would other weights give the same answer?"} <= set(headings)
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert set(FIGURES) - {"restoration"} <= names <= set(FIGURES)
    assert len(list((tmp_path / "figures").iterdir())) == 2 * len(names)
    assert page.count("data:image/png;base64,") == len(names)
    for name in TABLES:
        with (tmp_path / "tables" / f"{name}.csv").open(newline="") as file:
            rows = list(csv.reader(file))
        assert rows[0][0] in ("seed", "model")
        assert len(rows) > 1
    assert '"name":"contradictory"' in page


def test_confirming_is_refused_with_another_pilot(trained, piloted):
    with pytest.raises(ConfigError, match="a preregistration from 333333333333"):
        stages.confirm(SMALL, trained, AGREED)


def test_confirming_goes_on_without_a_pilot_and_says_so(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(stages, "_once", lambda *_: {"routing": None})
    (tmp_path / "run").mkdir()
    found = stages.confirm(SMALL, tmp_path / "run", AGREED, note=told.append)
    assert found["seeds"] == {"0": {"routing": None}}
    assert told[0].startswith("no pilot.json in ")


def test_confirming_is_refused_without_a_committed_preregistration(trained, piloted, tmp_path):
    path = tmp_path / "preregistration.md"
    write(path, piloted["filled_in"])
    with pytest.raises(ConfigError, match="not committed"):
        run_study(SMALL, trained, path, stage="confirm", progress=False)


def test_the_hash_of_the_preregistration_is_printed(trained, tmp_path, monkeypatch, capfd, piloted):
    path = tmp_path / "preregistration.md"
    git(tmp_path, "init", "-q")
    write(path, piloted["filled_in"])
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "preregistered")
    monkeypatch.setattr(stages, "confirm", lambda *_, **__: {})
    run_study(SMALL, trained, path, stage="confirm")
    assert re.search(r"preregistration [0-9a-f]{64}, committed in [0-9a-f]{12}", capfd.readouterr().err)


def test_a_folder_is_for_one_study(trained):
    with pytest.raises(ConfigError, match=r"study\.seeds is"):
        run_study(STUDY, trained, trained / "none.md", stage="train", progress=False)


def test_a_report_needs_results(tmp_path):
    with pytest.raises(ConfigError, match=r"without confirm\.json"):
        run_study(SMALL, tmp_path, tmp_path / "none.md", stage="report", progress=False)


def placed(result, folder, trained):
    for name in ("trained", "corpus"):
        (folder / name).symlink_to(trained / name)
    (folder / "confirm.json").write_text(json.dumps(result))


def test_results_of_other_models_are_refused(passing, trained, tmp_path):
    other = json.loads(json.dumps(passing))
    ours, other["seeds"]["0"]["behaviour"]["model"] = passing["seeds"]["0"]["behaviour"]["model"], "f" * 64
    placed(other, tmp_path, trained)
    with pytest.raises(
        ConfigError, match=f"model {'f' * 12} for seed 0(.|\n)*{ours[:12]}(.|\n)*--stage confirm"
    ):
        run_study(SMALL, tmp_path, tmp_path / "none.md", stage="report", progress=False)
    assert not (tmp_path / "report.html").exists()


def test_a_report_of_another_studys_results_is_refused(passing, tmp_path):
    (tmp_path / "confirm.json").write_text(json.dumps(passing))
    with pytest.raises(ConfigError, match="results of the study"):
        run_study(STUDY, tmp_path, tmp_path / "none.md", stage="report", progress=False)
    assert not (tmp_path / "report.html").exists()


def test_a_report_without_the_models_says_that_no_pair_is_shown(passing, tmp_path):
    (tmp_path / "confirm.json").write_text(json.dumps(passing))
    run_study(SMALL, tmp_path, tmp_path / "none.md", stage="report", progress=False)
    page = (tmp_path / "report.html").read_text()
    assert "No pair of texts is shown" in page
    assert '"name":"contradictory"' not in page


def test_full_models_are_measured_where_the_block_model_fails_and_missing_ones_are_named(
    trained, failing, tmp_path, monkeypatch
):
    (one,) = failing["seeds"].values()
    assert one["missing"] == []
    assert one["full_gate"]["model"] == fingerprint(model_of(SMALL, trained, "full", 0))
    assert not one["full_gate"]["passed"]
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "block-0").symlink_to(trained / "trained" / "block-0")
    monkeypatch.setattr(stages, "checked_pilot", lambda *_: "")
    without = stages.confirm(SMALL, tmp_path, AGREED)
    assert without["format"] == 2
    assert without["seeds"]["0"]["missing"] == ["full", "standard"]
    assert without["seeds"]["0"]["full_gate"] is None
    assert told(without, "behaviour", "There was no Full and no standard model of seed 0")
