"""The confirming run begins only with a document that was committed as it is."""

import json
import subprocess
from dataclasses import replace

import pytest
from contradiction_fixtures import STUDY

from attention_residuals.contradiction import Study, preregistered
from attention_residuals.contradiction.preregistration import (
    Preregistration,
    checked_pilot,
    filled_in,
    filled_in_by,
    pilot_digest,
    planned_items,
)
from attention_residuals.errors import ConfigError


def git(folder, *arguments):
    name = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *name, *arguments], cwd=folder, check=True, capture_output=True)


def write(path, block):
    path.write_text(f"# Preregistration\n\nWords.\n\n```json\n{json.dumps(block)}\n```\n")


@pytest.fixture
def document(tmp_path):
    """A committed document for the tiny study, and what it says."""
    git(tmp_path, "init", "-q")
    block = filled_in(
        STUDY, pilot="p", dz=1.4, design_effect=1.0, routes={"0": ["output < B1"], "1": ["L1.mlp < B1"]}
    )
    write(tmp_path / "preregistration.md", block)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "preregistered")
    return tmp_path / "preregistration.md", block


def test_a_committed_document_is_taken(document):
    path, block = document
    found = preregistered(path, STUDY)
    assert found.num_items == block["num_items"]
    assert found.routes == {"0": ("output < B1",), "1": ("L1.mlp < B1",)}
    assert found.pilot == "p"
    assert len(found.sha256) == 64
    assert len(found.commit) == 40


def test_a_missing_document_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the preregistration"):
        preregistered(tmp_path / "none.md", STUDY)


def test_a_document_that_was_never_committed_is_refused(document):
    path, block = document
    other = path.with_name("other.md")
    write(other, block)
    with pytest.raises(ConfigError, match="not committed"):
        preregistered(other, STUDY)
    git(path.parent, "add", "other.md")
    with pytest.raises(ConfigError, match="not committed"):
        preregistered(other, STUDY)


def test_a_document_that_git_forgot_again_is_refused_though_it_was_committed_once(document):
    path, _ = document
    path.with_name(".gitignore").write_text("*.md\n")
    git(path.parent, "add", ".gitignore")
    git(path.parent, "rm", "-q", "--cached", path.name)
    git(path.parent, "commit", "-qm", "forgotten")
    with pytest.raises(ConfigError, match="not committed"):
        preregistered(path, STUDY)


def test_a_document_outside_of_any_repository_is_refused(document, tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "preregistration.md"
    write(path, document[1])
    with pytest.raises(ConfigError, match="not committed"):
        preregistered(path, STUDY)


def test_a_document_that_was_changed_is_refused(document):
    path, _ = document
    path.write_text(path.read_text().replace("Words.", "Other words."))
    with pytest.raises(ConfigError, match="differs from what was committed"):
        preregistered(path, STUDY)


def recommit(path, block):
    write(path, block)
    git(path.parent, "commit", "-aqm", "changed")


def test_a_document_that_the_pilot_has_not_filled_in_is_refused(document):
    path, block = document
    recommit(path, {**block, "num_items": None})
    with pytest.raises(ConfigError, match="without num_items"):
        preregistered(path, STUDY)


def test_too_few_items_are_refused_with_the_number_needed(document):
    path, block = document
    recommit(path, {**block, "num_items": 100, "planned_dz": 0.3, "design_effect": 2.0})
    with pytest.raises(ConfigError, match=r"392 items or more(.|\n)*plans 292 more items"):
        preregistered(path, STUDY)


def test_a_document_for_another_study_is_refused(document):
    path, _ = document
    with pytest.raises(ConfigError, match="for the study"):
        preregistered(path, replace(STUDY, num_random=9))


@pytest.mark.parametrize(
    ("text", "why"), [("no block", "0 JSON blocks"), ("```json\n{\n```\n", "Expecting property name")]
)
def test_a_garbled_document_is_refused(document, text, why):
    path, _ = document
    path.write_text(text)
    git(path.parent, "commit", "-aqm", "garbled")
    with pytest.raises(ConfigError, match=why):
        preregistered(path, STUDY)


def test_the_effect_that_is_planned_for_stays_in_its_bounds():
    assert planned_items(Study(), 0.01, 1.0)[0] == 0.2
    assert planned_items(Study(), -2.0, 1.0) == (0.3, 400)
    assert planned_items(Study(), 0.2, 3.0)[1] > 1000


PILOT = {"0": {"behaviour": {"code": "a", "answers": 0.9}, "primary": {"dz": 0.2}, "routes": ["output < B1"]}}


def checked(folder, seeds):
    (folder / "pilot.json").write_text(json.dumps({"format": 1, "seeds": seeds}))
    return checked_pilot(folder / "pilot.json", Preregistration("h", "c", 400, {}, pilot_digest(PILOT)))


def test_the_pilot_of_the_document_is_taken(tmp_path):
    assert "is the pilot" in checked(tmp_path, PILOT)


def test_other_code_with_the_same_results_is_the_same_pilot(tmp_path):
    again = json.loads(json.dumps(PILOT).replace('"code": "a"', '"code": "b"'))
    assert again != PILOT
    assert "is the pilot" in checked(tmp_path, again)


@pytest.mark.parametrize(
    ("old", "new"), [("0.9", "0.91"), ("0.2", "0.3"), ("output < B1", "output < B2"), ('"0"', '"1"')]
)
def test_another_pilot_is_refused_with_both_digests(tmp_path, old, new):
    other = json.loads(json.dumps(PILOT).replace(old, new))
    assert other != PILOT
    with pytest.raises(ConfigError, match=pilot_digest(other)[:12]) as caught:
        checked(tmp_path, other)
    assert pilot_digest(PILOT)[:12] in str(caught.value)
    assert "commit it with the reason" in str(caught.value)


def test_a_missing_pilot_is_said(tmp_path):
    agreed = Preregistration("h", "c", 400, {}, "p")
    told = checked_pilot(tmp_path / "pilot.json", agreed)
    assert "unchecked" in told
    assert "--stage pilot" in told


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"num_items": "1010"}, "num_items='1010'(.|\n)*a whole number"),
        ({"num_items": True}, "num_items=True"),
        ({"planned_dz": "0.2"}, "planned_dz='0.2'(.|\n)*a number"),
        ({"planned_dz": 0.0}, "planned_dz=0.0(.|\n)*above 0"),
        ({"design_effect": float("nan")}, "design_effect=nan"),
        ({"pilot": 7}, "pilot=7(.|\n)*a text"),
        ({"routes": ["output < B1"]}, "lists of routes by seed"),
        ({"routes": {}}, "lists of routes by seed"),
        ({"routes": {"0": [], "1": ["output < B1"]}}, "lists of routes by seed"),
        ({"routes": {"0": ["output < B1"]}}, "routes of the seeds 0(.|\n)*those of 0, 1"),
        (
            {"routes": {"0": ["output < B1"], "1": ["output < B9"]}},
            "the route 'output < B9' of seed 1(.|\n)*output < B",
        ),
    ],
)
def test_a_block_that_no_pilot_can_have_printed_is_refused_before_anything_is_measured(document, change, why):
    path, block = document
    recommit(path, {**block, **change})
    with pytest.raises(ConfigError, match=why):
        preregistered(path, STUDY)


def test_a_block_that_is_a_list_is_refused(document):
    path, block = document
    recommit(path, [block])
    with pytest.raises(ConfigError, match=r"a list in its block(.|\n)*an object"):
        preregistered(path, STUDY)


SEEDS = {
    str(seed): {
        "behaviour": {"code": "a"},
        "primary": {"dz": dz},
        "design_effect": 1.5,
        "routes": ["output < B1", "L1.mlp < B1"],
    }
    for seed, dz in enumerate((0.1, 0.5))
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"num_items": 900},
        {"pilot_dz": 0.31},
        {"planned_dz": 0.31},
        {"design_effect": 1.4},
        {"routes": {"0": ["output < B1"], "1": ["L1.mlp < B1"]}},
        {"note": "more"},
    ],
)
def test_a_block_that_was_edited_is_refused_where_the_pilot_is_there(document, change):
    path, _ = document
    block = filled_in_by(STUDY, SEEDS)
    recommit(path, {**block, **change})
    pilot = path.with_name("pilot.json")
    assert (
        preregistered(path, STUDY, pilot=pilot).num_items == {**block, **change}["num_items"]
    )  # no pilot.json
    pilot.write_text(json.dumps({"format": 1, "seeds": SEEDS}))
    if change:
        with pytest.raises(ConfigError, match=f"where {next(iter(change))}(.|\n)*the very block"):
            preregistered(path, STUDY, pilot=pilot)
    else:
        assert preregistered(path, STUDY, pilot=pilot).num_items == block["num_items"]
