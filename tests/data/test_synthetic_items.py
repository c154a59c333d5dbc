"""Items of the contradiction experiment: true by another reader, aligned by ids, told apart by nothing else."""

import numpy as np
import pytest
from data.interpreter import read

from attention_residuals.data import Item, StepItems, step_tokenizer
from attention_residuals.data.synthetic import CLAIM_PLACES, FAMILIES, KINDS, REMARKS, VERDICTS
from attention_residuals.errors import ConfigError, DataError

TEMPLATES = [(family, one.name) for family, about in FAMILIES.items() for one in about.templates]
CELLS = [(u, p) for u in range(2) for p in range(2)]


def word(token):
    return step_tokenizer().decode([token]).strip()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("family", "template"), TEMPLATES)
def test_another_reader_finds_the_same_truth(family, template, kind):
    items = StepItems(family=family, template=template, kind=kind, distance=3, seed=3)
    for item in items.items(4):
        for u, p in CELLS:
            found = read(family, items.text(item.ids[u, p]))
            assert found.answer == word(item.answers[u])
            assert found.verdict == VERDICTS[u != p or kind == "corrected"]
            assert found.distances[-1] == 3
        assert (item.answers == item.claimed_answers) == (
            kind != "irrelevant" or item.answers[0] == item.answers[1]
        )
        for u in range(2):
            for text in item.rare[u]:
                assert read(family, items.text(text)).verdict == VERDICTS[kind == "corrected"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_edit_is_one_token_and_all_before_the_plant_is_the_same(family, kind):
    for item in StepItems(family=family, kind=kind).items(8):
        plant, upstream = item.places["plant"], item.places["upstream"]
        for u in range(2):
            differing = np.flatnonzero(item.ids[u, 0] != item.ids[u, 1])
            assert differing.tolist() == [plant]
            np.testing.assert_array_equal(item.ids[u, 0, :plant], item.ids[u, 1, :plant])
        across = np.flatnonzero(item.ids[0, 0] != item.ids[1, 0])
        assert upstream in across
        assert set(across) <= {upstream, item.places["answer"] + 1, item.places.get("first claim", upstream)}
        assert item.ids[0, 0, plant] == item.ids[1, 0, plant] != item.ids[0, 1, plant]


@pytest.mark.parametrize("kind", ["derived", "copied", "irrelevant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_before_the_verdict_but_the_statement_tells_a_wrong_claim(family, kind):
    for item in StepItems(family=family, kind=kind).items(8):
        before = item.ids[..., : item.places["check"] + 1]
        for p in range(
            2
        ):  # so a reader who leaves the statement out says the same of a right and a wrong claim
            assert np.flatnonzero(before[0, p] != before[1, p]).tolist() == [item.places["upstream"]]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_would_be_another_if_the_claim_were_right(family):
    for item in StepItems(family=family).items(8):
        assert item.answers[0] != item.answers[1]
        assert item.answers == item.claimed_answers
    for item in StepItems(family=family, kind="irrelevant").items(8):
        assert item.answers[0] == item.answers[1] == item.claimed_answers[0] == item.claimed_answers[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_places_are_what_they_are_called(family):
    for item in StepItems(family=family).items(12):
        words = [word(token) for token in item.ids[0, 1]]
        at = {place: words[token] for place, token in item.places.items()}
        assert at["step end"] == "."
        assert words[item.places["check"] :][:3] == ["check", "unsaid", "."]
        assert at["remark"] in REMARKS
        assert words[item.places["answer"] + 1] == word(item.answers[0])
        assert at["next operand"] in FAMILIES[family].things
        assert item.places["plant"] < min(item.places[place] for place in CLAIM_PLACES)
        # The next step goes on from the thing that was claimed, which the claim's sentence names.
        start = item.places["step end"] - words[: item.places["step end"]][::-1].index(".")
        assert at["next operand"] in words[start : item.places["plant"]]


def test_rare_remarks_are_the_same_text_with_another_word_behind_the_claim():
    for item in StepItems(family="entities").items(4):
        assert item.rare.shape == (2, len(REMARKS), item.ids.shape[-1])
        for u in range(2):
            for text, remark in zip(item.rare[u], REMARKS, strict=True):
                assert word(text[item.places["remark"]]) == remark
                same = np.arange(len(text)) != item.places["remark"]
                np.testing.assert_array_equal(text[same], item.ids[u, u][same])


@pytest.mark.parametrize("distance", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_distance_moves_the_statement_and_nothing_else(family, distance):
    items = StepItems(family=family, distance=distance, num_steps=5)
    other = StepItems(family=family, distance=3, num_steps=5)
    for index in range(6):
        one = items.item(index)
        assert read(family, items.text(one.ids[0, 0])).distances == [distance]
        assert sorted(one.ids[0, 0]) == sorted(other.item(index).ids[0, 0])
        assert one.places["plant"] == other.item(index).places["plant"]


def test_the_same_seed_and_index_give_the_same_item_and_others_give_others():
    one, again = StepItems(family="calendar", seed=4).item(9), StepItems(family="calendar", seed=4).item(9)
    np.testing.assert_array_equal(one.ids, again.ids)
    assert one.name == again.name
    every = {
        StepItems(family="calendar", seed=seed, split=split).item(index).ids.tobytes()
        for seed in range(3)
        for split in ("pilot", "confirm")
        for index in range(20)
    }
    assert len(every) == 3 * 2 * 20


def test_an_item_is_the_same_on_every_machine():
    items = StepItems(family="variables", template="copies", num_steps=3)
    assert items.text(items.item(5).ids[0, 1]) == (
        "set u to ant . set n to bee . set s to bee . "
        "copy n into c so c is cat today . copy c into b . check unsaid . so b is bee ."
    )


def test_held_out_templates_tell_the_same_problem_in_other_words():
    plain = StepItems(family="variables", template="copies")
    other = StepItems(family="variables", template="cells-new")
    for index in range(5):
        one, paraphrase = plain.item(index), other.item(index)
        assert one.answers == paraphrase.answers
        creatures = set(FAMILIES["variables"].templates[0].values.words)
        values = [[word(t) for t in item.ids[0, 1] if word(t) in creatures] for item in (one, paraphrase)]
        assert values[0] == values[1]


def test_templates_of_training_come_in_turn_and_name_the_cluster():
    clusters = [item.cluster for item in StepItems(family="entities").items(8)]
    assert clusters == [template.name for template in FAMILIES["entities"].trained] * 2


def test_fewer_values_are_drawn_where_that_is_asked_for():
    for family, most in (("arithmetic", 4), ("entities", 4), ("calendar", 12)):
        planted = {
            int(item.ids[0, p, item.places["plant"]])
            for item in StepItems(
                family=family, num_values=4, template=FAMILIES[family].templates[1].name
            ).items(60)
            for p in range(2)
        }
        assert len(planted) == most


def test_misaligned_texts_are_refused_with_the_place():
    item = StepItems(family="arithmetic").item(0)
    options = {
        name: getattr(item, name) for name in ("cluster", "rare", "places", "answers", "claimed_answers")
    }
    longer = item.ids.copy()
    longer[0, 1, -1] += 1
    last, plant = item.ids.shape[-1] - 1, item.places["plant"]
    with pytest.raises(DataError, match=rf"planted values that differ at tokens \[{plant}, {last}\]"):
        Item(name="mine", ids=longer, **options)
    same = item.ids.copy()
    same[0, 1] = same[0, 0]
    with pytest.raises(DataError, match=r"differ at tokens \[\]"):
        Item(name="mine", ids=same, **options)
    with pytest.raises(DataError, match=r"ids of shape \[2, 1,"):
        Item(name="mine", ids=item.ids[:, :1], **options)
    early = {**options, "places": {**item.places, "step end": 1}}
    with pytest.raises(DataError, match="upstream < plant < every place"):
        Item(name="mine", ids=item.ids, **early)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"family": "arithmetics"}, "did you mean 'arithmetic'"),
        ({"kind": "irrelevant", "distance": 0}, "1 to 4 steps"),
        ({"split": "train"}, "StepDocuments"),
        ({"template": "coats"}, "known: coins"),
        ({"distance": 0}, "1 to 4 steps"),
        ({"distance": 5}, "1 to 4 steps"),
        ({"kind": "corrected", "distance": 1}, "2 to 5 steps"),
        ({"kind": "irrelevant", "num_steps": 1, "distance": 1}, "2 to 18 statements"),
        ({"num_steps": 40}, "1 to 18 statements"),
        ({"num_values": 1}, "num_values >= 2"),
    ],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(ConfigError, match=named):
        StepItems(**{"family": "arithmetic", **options})


def test_wrong_indices_are_named():
    with pytest.raises(ConfigError, match="index=-1"):
        StepItems(family="arithmetic").item(-1)
    with pytest.raises(ConfigError, match="number=0"):
        StepItems(family="arithmetic").items(0)
