"""Tasks of depth: answers that follow from the text, in the number of hops that was asked for, and exact chance."""

import re
from collections import Counter

import pytest

from attention_residuals.data import BindingDocuments, BindingItems, prepare
from attention_residuals.data.synthetic import binding_tokenizer
from attention_residuals.data.synthetic.binding import VARIABLES, BindingProblem
from attention_residuals.data.synthetic.words import COLOURS
from attention_residuals.errors import ConfigError

SOURCE = BindingDocuments(num_documents=300, trained_hops=(1, 3), num_questions=3)
RECALL = BindingDocuments(num_documents=200, num_colours=4)


def read(text):
    """Reads a text as a person would: what is bound to what, and the questions with their answers."""
    bound = dict(re.findall(r"(?:^|\. )([a-z]+) = (\w+)(?= \.)", text))
    return bound, re.findall(r"\? (\w+) (\S+) (\w+) \.", text)


def look_up(bound, name):
    hops = 0
    while name in bound:
        name, hops = bound[name], hops + 1
    return int(name), hops


def test_every_answer_is_what_the_links_lead_to_in_a_trained_number_of_hops():
    hops_seen = Counter()
    for document in SOURCE.documents():
        bound, questions = read(document.text)
        assert len(bound) == 24
        assert len(questions) == 3
        for name, sign, answer in questions:
            value, hops = look_up(bound, name)
            assert (sign, int(answer)) == (":", value)
            hops_seen[hops] += 1
    assert set(hops_seen) == {1, 3}
    assert min(hops_seen.values()) > 300


def test_the_answer_of_recall_tells_value_and_colour():
    colours = Counter()
    for document in RECALL.documents():
        bound, questions = read(document.text)
        for name, colour, answer in questions:
            value, _ = look_up(bound, name)
            assert int(answer) == 100 + 4 * value + COLOURS.index(colour)
            colours[colour] += 1
    assert set(colours) == set(COLOURS[:4])
    assert min(colours.values()) > 150


def test_no_chain_is_asked_for_twice_in_a_text():
    for document in RECALL.documents():
        bound, questions = read(document.text)
        values = [look_up(bound, name)[0] for name, _, _ in questions]
        assert len(set(values)) == 4


def test_every_text_has_the_length_that_is_stated_and_words_of_the_tokenizer(tmp_path):
    for source in (SOURCE, RECALL):
        tokenizer = binding_tokenizer(source.num_values, source.num_colours)
        for document in list(source.documents())[:50]:
            assert len(tokenizer.encode(document.text)) + 1 == source.document_length
    corpus = prepare(SOURCE, tmp_path / "corpus", tokenizer=binding_tokenizer(), valid_fraction=0.1)
    starts = (corpus.valid == corpus.tokenizer.end_of_text).nonzero()[0]
    assert set(starts % SOURCE.document_length) == {0}


def test_an_item_ends_before_its_answer_and_no_other_candidate_follows_from_its_links():
    for items in (BindingItems(seed=3), BindingItems(num_colours=4)):
        tokenizer = binding_tokenizer(items.num_values, items.num_colours)
        for hops in (1, 2, 5):
            for index in range(25):
                item = items.item(hops, index)
                text = tokenizer.decode([*item.ids[1:], item.answer]).strip() + " ."
                bound, ((name, sign, answer),) = read(text)
                value, found = look_up(bound, name)
                colour = COLOURS.index(sign) if items.num_colours > 1 else 0
                assert found == hops
                assert items.answer(value, colour) == answer
                assert item.ids[0] == 0
                assert item.candidates.count(item.answer) == 1
                assert len(set(item.candidates)) == items.num_chains * items.num_colours == 1 / items.chance


def test_without_the_links_nothing_tells_the_answer():
    """Neither the order of statements nor of values tells which chain is asked for."""
    items = BindingItems(num_chains=4, chain_length=3)
    places = Counter()
    for index in range(2000):
        item = items.item(2, index)
        told = [word for word in item.ids if word in item.candidates]
        assert len(told) == 4
        places[told.index(item.answer)] += 1
    assert set(places) == set(range(4))
    assert all(abs(count / 2000 - 0.25) < 0.04 for count in places.values())


def test_the_same_item_with_other_hops_tells_the_same_text_up_to_its_question():
    items = BindingItems()
    one, other = items.item(1, 7), items.item(4, 7)
    assert one.ids[:-2] == other.ids[:-2]
    assert one.ids[-2] != other.ids[-2]
    assert (one.answer, one.candidates) == (other.answer, other.candidates)


def test_items_are_no_training_texts_and_seeds_give_others():
    trained = {document.text.partition(" ? ")[0] for document in SOURCE.documents()}
    tokenizer, asked = binding_tokenizer(), set()
    for seed in range(2):
        for index in range(100):
            asked.add(tokenizer.decode(list(BindingItems(seed=seed).item(1, index).ids[1:-3])).strip())
    assert len(asked) == 200
    assert not asked & trained
    assert next(SOURCE.documents()).text != next(BindingDocuments(num_documents=1, seed=1).documents()).text


def test_texts_do_not_depend_on_how_many_there_are():
    few = BindingDocuments(num_documents=3)
    many = BindingDocuments(num_documents=9)
    assert list(few.documents()) == list(many.documents())[:3]


def test_a_problem_binds_each_variable_once():
    problem = BindingProblem((("ba", "be"), ("bi", "bo")), (7, 9), ((1, 1), (0, 0), (1, 0), (0, 1)))
    assert " ".join(problem.words()) == "bo = bi . ba = 7 . bi = 9 . be = ba ."
    assert len(set(VARIABLES)) == 40


@pytest.mark.parametrize(
    "options",
    [
        {"num_chains": 1},
        {"chain_length": 11},
        {"num_values": 3},
        {"num_values": 65},
        {"num_colours": 0},
        {"num_colours": 25},
        {"num_documents": 0},
        {"trained_hops": ()},
        {"trained_hops": (7,)},
        {"trained_hops": (0,)},
        {"num_questions": 5},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        BindingDocuments(**{"num_documents": 1, **options})


@pytest.mark.parametrize("hops", [0, 7])
def test_hops_that_no_variable_is_away_are_refused(hops):
    with pytest.raises(ConfigError, match="length of a chain"):
        BindingItems().item(hops, 0)
