"""Training texts: true, disjoint from items, and without a hint of a contradiction but the contradiction."""

import re
import sys
from collections import Counter, defaultdict
from types import ModuleType

import numpy as np
import pytest
from data.interpreter import FACT, SENTENCES, read, read_list
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.data import (
    Corpus,
    Lesson,
    ReasoningGym,
    StepDocuments,
    StepItems,
    prepare,
    step_tokenizer,
)
from attention_residuals.data.synthetic import FAMILIES, REMARKS, word_tokenizer
from attention_residuals.data.synthetic.documents import NUM_FACTS
from attention_residuals.data.synthetic.draws import Draws
from attention_residuals.data.synthetic.lists import (
    BARE_SHARE,
    ECHOED,
    GRADED_SHARE,
    LISTED,
    NUM_ASKED,
    NUM_PARTS,
    PAIRED,
    PART,
)
from attention_residuals.data.synthetic.problems import KINDS, SPLITS, check_options, draw_problem, split_of
from attention_residuals.data.synthetic.words import REMARK_WEIGHTS, VERDICTS
from attention_residuals.errors import ConfigError, DataError

NUMBER = 4000
SOURCE = StepDocuments(num_documents=NUMBER, inconsistent_share=0.5)


@pytest.fixture(scope="module")
def stories():
    return [SOURCE.story(index) for index in range(NUMBER)]


@pytest.fixture(scope="module")
def wrong(stories):
    return np.array([story.verdict == "conflict" for _, _, story in stories])


STORIES = (Lesson(),)


def scored_words(document):
    return [document.text[first:end] for first, end in document.scored]


def test_another_reader_agrees_with_every_answer_verdict_and_recap():
    source = StepDocuments(num_documents=1200, seed=1, course=STORIES)
    verdicts = Counter(
        read(document.name.split("/")[0], document.text).verdict for document in source.documents()
    )
    assert verdicts["conflict"] / 1200 == pytest.approx(0.25, abs=0.04)


def test_the_share_of_inconsistent_texts_is_what_was_asked_for(wrong):
    assert wrong.mean() == pytest.approx(0.5, abs=0.02)
    none = StepDocuments(num_documents=200, inconsistent_share=0.0, course=STORIES)
    assert not any(" conflict " in document.text for document in none.documents())


def test_lists_state_different_values_and_ask_for_some_of_them_or_grade_them():
    source = StepDocuments(num_documents=600, course=(Lesson(lists=0.5),), inconsistent_share=0.5)
    lists = [one for one in source.documents() if " check " not in one.text]
    assert len(lists) / 600 == pytest.approx(0.5, abs=0.07)
    sizes, bare, verdicts = Counter(), 0, []
    for one in lists:
        known, determined = read_list(one.name.split("/")[0], one.text)
        assert len(known) == len(set(known.values()))
        assert scored_words(one) == determined
        sizes[len(known)] += 1
        bare += len(one.text.split(" . ")[0].split()) == 2
        verdicts += [[word for word in determined if word in VERDICTS]]
    assert sorted(sizes) == list(range(LISTED[0], LISTED[1] + 1))
    assert bare / len(lists) == pytest.approx(BARE_SHARE, abs=0.1)
    graded = [own for own in verdicts if own]
    assert {len(own) for own in graded} == {NUM_ASKED}
    assert len(graded) / len(lists) == pytest.approx(GRADED_SHARE, abs=0.1)
    assert np.mean([word == "conflict" for own in graded for word in own]) == pytest.approx(0.5, abs=0.08)


def is_echo(text):
    """Whether its first sentence is a row of words, none of which belongs to a sentence."""
    return len(text.split(" . ")[0].split()) >= ECHOED[0] and not GRAMMAR & set(text.split())


GRAMMAR = {word for family in FAMILIES.values() for template in family.templates for word in template.words}


def test_echoes_say_parts_of_a_row_again_and_score_all_but_the_first_word_of_each():
    source = StepDocuments(num_documents=300, course=(Lesson(echoes=0.5),))
    echoes = [one for one in source.documents() if " check " not in one.text]
    assert len(echoes) / 300 == pytest.approx(0.5, abs=0.1)
    begins = Counter()
    for one in echoes:
        row, *parts = one.text.removesuffix(" .").split(" . ")
        words = row.split()
        assert len(set(words)) == len(words) in range(ECHOED[0], ECHOED[1] + 1)
        assert len(parts) == NUM_PARTS
        assert all(
            f" {part} " in f" {row} " and len(part.split()) in range(PART[0], PART[1] + 1) for part in parts
        )
        assert scored_words(one) == [word for part in parts for word in part.split()[1:]]
        begins.update(words.index(part.split()[0]) for part in parts)
    assert set(begins) >= set(range(ECHOED[0]))


def only(kind, number=200, **options):
    """Texts of one kind."""
    source = StepDocuments(num_documents=number, course=(Lesson(**{kind: 1.0}),), **options)
    return list(source.documents())


def test_matches_say_of_words_in_twos_whether_they_are_the_same():
    verdicts = Counter()
    for one in only("matches", inconsistent_share=0.5):
        for sentence in one.text.removesuffix(" .").split(" . "):
            first, second, verdict = sentence.split()
            assert verdict == ("fine" if first == second else "conflict")
            verdicts[verdict] += 1
        assert scored_words(one) == [word for word in one.text.split() if word in VERDICTS]
    assert verdicts["conflict"] / verdicts.total() == pytest.approx(0.5, abs=0.05)


def test_pairs_are_said_again_as_they_were():
    for one in only("pairs"):
        known, determined = read_list(one.name.split("/")[0], one.text)
        assert all(len(sentence.split()) == 2 for sentence in one.text.removesuffix(" .").split(" . "))
        assert scored_words(one) == determined
        assert (len(determined), set(determined) <= set(known.values())) == (NUM_ASKED, True)


def test_half_of_the_wrong_values_of_graded_pairs_were_not_said_before():
    sizes, new = Counter(), []
    for one in only("graded_pairs", number=400, inconsistent_share=0.5):
        known, determined = read_list(one.name.split("/")[0], one.text)
        assert scored_words(one) == determined
        sizes[len(known)] += 1
        wrong = re.findall(r"(\w+) (\w+) conflict", one.text)
        assert all(known[name] != value for name, value in wrong)
        new += [value not in known.values() for _, value in wrong if len(known) > 2]
    assert sorted(sizes) == list(range(PAIRED[0], PAIRED[1] + 1))
    assert np.mean(new) == pytest.approx(0.5, abs=0.08)


def test_a_course_goes_from_lesson_to_lesson_and_the_last_goes_on():
    lessons = (
        Lesson(num_documents=150, pairs=0.5, echoes=0.5),
        Lesson(num_documents=50, lists=1.0),
        Lesson(lists=0.4),
    )
    source = StepDocuments(num_documents=600, course=lessons)
    texts = [document.text for document in source.documents()]
    kinds = ["story" if " check " in text else "echo" if is_echo(text) else "list" for text in texts]
    assert kinds[:150].count("echo") / 150 == pytest.approx(0.5, abs=0.1)
    assert set(kinds[150:200]) == {"list"}
    assert kinds[200:].count("story") / 400 == pytest.approx(0.6, abs=0.08)
    assert [source.lesson(index) for index in (0, 149, 150, 199, 200, 10**6)] == [
        lesson for lesson in lessons for _ in range(2)
    ]
    assert texts[200:] == [document.text for document in StepDocuments(num_documents=600).documents()][200:]


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({"lists": -0.1}, "shares"),
        ({"lists": 0.6, "echoes": 0.5}, "shares"),
        ({"num_documents": 0}, "num_documents=0"),
    ],
)
def test_a_lesson_of_impossible_shares_or_no_texts_is_refused(shares, said):
    with pytest.raises(ConfigError, match=said):
        Lesson(**shares)


def test_a_course_without_lessons_is_refused():
    with pytest.raises(ConfigError, match="course"):
        StepDocuments(num_documents=1, course=())


def test_what_is_scored_are_claims_remarks_verdicts_answer_true_values_and_facts():
    source = StepDocuments(num_documents=300, seed=2, course=STORIES, inconsistent_share=0.5)
    said, marked = Counter(), 0
    for index, one in enumerate(source.documents()):
        _, _, story = source.story(index)
        names = [name for name in ("first claim", "plant") if name in story.places]
        behind = one.text.split()[story.places["remark"] - 1]
        if behind in VERDICTS:
            assert behind == story.last_verdict
            marked += 1
        else:
            assert behind in REMARKS
        told = [*(story.words[story.places[name] - 1] for name in names), behind]
        verdict, _, *rest = one.text.split(" check ")[1].removesuffix(" .").split(" . ")
        said[verdict] += 1
        told += [story.answer] if verdict == "unsaid" else [story.verdict, story.answer]
        assert scored_words(one)[: len(told)] == told
        plain, graded = rest[: len(story.truths)], rest[len(story.truths) : 2 * len(story.truths)]
        facts = [sentence.split()[-1] for sentence in rest[2 * len(story.truths) :]]
        true = dict(story.truths)
        values = [next(true[name] for name in true if name in sentence.split()) for sentence in plain]
        marks = " ".join(re.search(r"(fine|conflict \w+)$", sentence)[0] for sentence in graded).split()
        assert scored_words(one)[len(told) :] == [*values, *marks, *facts]
    assert said["unsaid"] / 300 == pytest.approx(1 - source.said_share, abs=0.08)
    assert marked / 300 == pytest.approx(source.marked_share, abs=0.08)


def test_moves_are_no_longer_than_asked_and_all_up_to_that_occur():
    source = StepDocuments(num_documents=300, families=("arithmetic",), max_move=2, course=STORIES)
    facts = [
        sentence
        for one in source.documents()
        for sentence in one.text.removesuffix(" .").split(" . ")
        if FACT.fullmatch(sentence)
    ]
    assert len(facts) == NUM_FACTS * 300
    told = {sentence.split()[2] for sentence in facts}
    claimed = {word for one in source.documents() for word in re.findall(r"(?:plus|[-+]) (\d+)", one.text)}
    assert told == claimed == {"1", "2"}


def test_wrong_values_in_recaps_come_as_often_as_wrong_claims(wrong):
    graded = Counter(
        word
        for one in StepDocuments(num_documents=600, inconsistent_share=0.5, course=STORIES).documents()
        for word in one.text.split(" check ")[1].split()[1:]  # without the verdict on the claim
        if word in VERDICTS
    )
    # A little below the share, since a recap has no wrong value to say where all things have the same.
    assert 0.44 < graded["conflict"] / graded.total() < 0.5


def test_held_out_templates_never_occur_and_use_no_word_that_training_lacks(stories):
    told = {template.name for _, template, _ in stories}
    assert told == {template.name for family in FAMILIES.values() for template in family.trained}
    for family in FAMILIES.values():
        trained = set().union(*(template.words for template in family.trained))
        held_out = [template for template in family.templates if template.held_out]
        assert len(family.trained) == 4
        assert len(held_out) == 2
        for template in held_out:
            assert template.words <= trained, template.words - trained
            sentences = {(one.statement, one.claim, one.next) for one in family.trained}
            assert (template.statement, template.claim, template.next) not in sentences


def test_no_problem_is_in_two_splits():
    problems = defaultdict(set)
    for family, about in FAMILIES.items():
        for split in SPLITS:
            for index in range(24):
                draws = Draws((split, 0, index))
                one = draw_problem(
                    draws,
                    family,
                    about.templates[index % 6],
                    split=split,
                    num_steps=3,
                    num_values=8,
                    max_move=9,
                )
                moves = (one.first_move, one.second_move)
                assert split_of(family, one.main, one.new, one.last, moves=moves) == split
                problems[split].add((family, one.main, one.new, one.last, moves))
    assert not problems["train"] & problems["pilot"]
    assert not problems["train"] & problems["confirm"]
    assert not problems["pilot"] & problems["confirm"]


def test_no_pilot_item_is_a_confirming_item_or_a_training_text(stories):
    trained = {story.words for _, _, story in stories}
    texts = defaultdict(set)
    for split in ("pilot", "confirm"):
        for family in FAMILIES:
            items = StepItems(family=family, split=split)
            texts[split] |= {
                items.text(item.ids[u, p]) for item in items.items(5) for u in (0, 1) for p in (0, 1)
            }
    assert not texts["pilot"] & texts["confirm"]
    assert not {" ".join(words) for words in trained} & (texts["pilot"] | texts["confirm"])


def accuracy_of_lookup(features, wrong):
    """How often the likelier verdict of one feature, learnt on one half, is right on the other half."""
    counts = defaultdict(lambda: [0, 0])
    half = len(wrong) // 2
    for feature, label in zip(features[:half], wrong[:half], strict=True):
        counts[feature][int(label)] += 1
    guesses = [counts[feature][1] > counts[feature][0] for feature in features[half:]]
    return np.mean(np.array(guesses) == wrong[half:])


PLACES = ("upstream", "plant", "remark", "next operand", "length", "template")


@pytest.mark.parametrize("place", PLACES)
def test_no_single_position_tells_a_wrong_claim(stories, wrong, place):
    single = {
        "length": lambda template, story: len(story.words),
        "template": lambda template, story: template.name,
    }
    look = single.get(place, lambda template, story: (template.name, story.words[story.places[place] - 1]))
    accuracy = accuracy_of_lookup([look(template, story) for _, template, story in stories], wrong)
    assert accuracy == pytest.approx(0.5, abs=0.045)


def test_a_bag_of_words_does_not_tell_a_wrong_claim(stories, wrong):
    tokenizer = step_tokenizer()
    bags = np.stack(
        [
            np.bincount(
                tokenizer.encode(" ".join(story.words[: story.places["check"]])),
                minlength=tokenizer.vocab_size,
            )
            for *_, story in stories
        ]
    )
    bags, half = bags - bags.mean(0), NUMBER // 2
    ridge = bags[:half].T @ bags[:half] + 50 * np.eye(bags.shape[1])
    weights = np.linalg.solve(ridge, bags[:half].T @ (wrong[:half] - 0.5))
    accuracy = ((bags[half:] @ weights > 0) == wrong[half:]).mean()
    assert accuracy == pytest.approx(0.5, abs=0.045)


@pytest.mark.parametrize(("family", "most"), [("arithmetic", 0.65), ("variables", 0.82), ("entities", 0.75)])
def test_whether_the_claimed_value_stands_elsewhere_does_not_tell_if_it_is_right(
    stories, wrong, family, most
):
    """A right value that was carried over must stand elsewhere; a wrong one often does as well."""
    numbers = [number for number, (name, _, _) in enumerate(stories) if name == family]
    told = [(stories[number][2].words, stories[number][2].places["plant"] - 1) for number in numbers]
    elsewhere = [words[plant] in words[:plant] for words, plant in told]
    assert accuracy_of_lookup(elsewhere, wrong[numbers]) < most


def test_values_of_claims_are_uniform_whether_right_or_wrong(stories, wrong):
    for name, number in (("sums", 8), ("copies", 8), ("starts", 12), ("places", 8)):
        for label in (False, True):
            counts = Counter(
                story.words[story.places["plant"] - 1]
                for (_, template, story), is_wrong in zip(stories, wrong, strict=True)
                if template.name == name and is_wrong == label
            )
            assert len(counts) <= number
            expected = counts.total() / number
            seen = [*counts.values(), *[0] * (number - len(counts))]
            chi_squared = sum((count - expected) ** 2 / expected for count in seen)
            assert chi_squared < number - 1 + 4 * np.sqrt(2 * (number - 1)), (name, counts)


def test_remarks_are_as_common_as_promised_and_stand_nowhere_else(stories):
    counts = Counter(story.words[story.places["remark"] - 1] for *_, story in stories)
    assert sum(REMARK_WEIGHTS) == 1
    for remark, weight in zip(REMARKS, REMARK_WEIGHTS, strict=True):
        assert counts[remark] / NUMBER == pytest.approx(weight, abs=4 * np.sqrt(weight / NUMBER) + 1e-3)
    words = set().union(*(template.words for family in FAMILIES.values() for template in family.templates))
    assert not words & set(REMARKS)


def test_kinds_and_distances_all_occur(stories):
    distances = Counter(read(family, " ".join(story.words)).distances[-1] for family, _, story in stories)
    assert set(distances) == {1, 2, 3, 4, 5}
    two_claims = np.mean(["first claim" in story.places for *_, story in stories])
    assert two_claims == pytest.approx(0.1, abs=0.015)


def test_texts_become_a_corpus_whose_every_word_is_one_token(tmp_path):
    source = StepDocuments(num_documents=60)
    corpus = prepare(source, tmp_path / "corpus", tokenizer=step_tokenizer(), valid_fraction=0.2)
    words = sum(len(document.text.split()) + 1 for document in source.documents())
    assert len(corpus.train) + len(corpus.valid) == words
    opened = Corpus.load(tmp_path / "corpus")
    assert opened.tokenizer.definition == step_tokenizer().definition
    assert opened.manifest["source"]["config"]["inconsistent_share"] == 0.25
    texts = {document.text for document in source.documents()}
    assert opened.tokenizer.decode(opened.valid[1 : 1 + list(opened.valid[1:]).index(0)]).strip() in texts


def test_documents_are_the_same_each_time_and_a_longer_source_starts_with_a_shorter_one():
    few, more = (list(StepDocuments(num_documents=number).documents()) for number in (5, 9))
    assert more[:5] == few
    assert list(StepDocuments(num_documents=5, seed=1).documents()) != few


@given(st.lists(st.sampled_from(["red", "7", "=", "anna"]), min_size=1, max_size=9))
def test_a_word_tokenizer_gives_one_token_a_word(words):
    tokenizer = word_tokenizer(("red", "7", "=", "anna"))
    assert len(tokenizer.encode(" ".join(words))) == len(words)
    assert tokenizer.decode(tokenizer.encode(" ".join(words))).split() == words


def test_the_reader_knows_every_family():
    assert set(SENTENCES) == set(FAMILIES)
    assert KINDS == ("derived", "copied", "irrelevant", "corrected")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_documents": 0}, "num_documents=0"),
        ({"inconsistent_share": 1.5}, r"inconsistent_share=1\.5"),
        ({"said_share": -0.1}, r"said_share=-0\.1"),
        ({"marked_share": 2.0}, "marked_share=2"),
        ({"families": ()}, "one or more"),
        ({"families": ("animals",)}, "family='animals'"),
        ({"max_steps": 1}, "2 to 18"),
        ({"num_values": 1}, "num_values >= 2"),
        ({"max_move": 0}, "max_move=0"),
    ],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(ConfigError, match=named):
        StepDocuments(**{"num_documents": 5, **options})


def test_a_kind_that_does_not_exist_is_named():
    with pytest.raises(ConfigError, match="did you mean 'derived'"):
        check_options(family="arithmetic", kind="derive", num_steps=4, num_values=8, max_move=9, distance=1)


def test_reasoning_gym_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"attention-residuals\[reasoning\]"):
        next(ReasoningGym(task="chain_sum", num_documents=2).documents())


def test_reasoning_gym_gives_questions_with_answers_and_names_a_task_that_is_none(monkeypatch):
    def create_dataset(task, *, size, seed):
        if task != "chain_sum":
            raise ValueError(f"Dataset '{task}' not registered")
        return [{"question": f"{seed} + {n}?", "answer": str(seed + n)} for n in range(size)]

    module = ModuleType("reasoning_gym")
    module.create_dataset = create_dataset
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    documents = list(ReasoningGym(task="chain_sum", num_documents=2, seed=3).documents())
    assert [one[:2] for one in documents] == [("chain_sum", "3 + 0?\n3"), ("chain_sum", "3 + 1?\n4")]
    with pytest.raises(DataError, match=r"task='chain' .*not registered"):
        next(ReasoningGym(task="chain", num_documents=2).documents())
    with pytest.raises(ConfigError, match="task=''"):
        ReasoningGym(task="", num_documents=2)
    with pytest.raises(ConfigError, match="num_documents=0"):
        ReasoningGym(task="chain_sum", num_documents=0)
