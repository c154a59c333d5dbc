"""Ranges of a text that count in the loss reach the targets of the right tokens, and no others."""

import string

import numpy as np
import pytest
import torch
from closeness import assert_close
from hypothesis import given
from hypothesis import strategies as st

from attention_residuals.data import Batches, Corpus, Document, Tokenizer, prepare, sequential, step_tokenizer
from attention_residuals.data.batches import UNSCORED
from attention_residuals.data.scored import scored_tokens
from attention_residuals.errors import ConfigError, DataError
from attention_residuals.models import build, presets
from attention_residuals.train import TrainConfig
from attention_residuals.train.evaluation import evaluate
from attention_residuals.train.execution import backward

TOKENIZER = Tokenizer.train(["low lower lowest snow ☃ élan"] * 9, vocab_size=290)


class Sums:
    """Sums whose results are scored, and a text that is scored whole."""

    name, licence = "sums", "CC0-1.0"
    shift = 0

    def documents(self):
        for a in range(30):
            text = f"☃ {a} plus {a} is {2 * a} ."
            first = text.index("is ") + 3 + self.shift
            yield Document(f"sum {a}", text, scored=((first, text.index(" .")),))
        yield Document("title", "sums of numbers")


@pytest.fixture
def corpus(tmp_path):
    return prepare(Sums(), tmp_path / "corpus", vocab_size=300, valid_fraction=0.3)


def texts_in(tokens, scored, tokenizer):
    """Each document with the text of its scored tokens."""
    starts = np.flatnonzero(tokens == 0)
    parts = zip(np.split(tokens, starts)[1:], np.split(scored, starts)[1:], strict=True)
    return {tokenizer.decode(ids): tokenizer.decode(ids[counts]) for ids, counts in parts}


@given(
    st.text(string.ascii_letters + " é☃\N{MUSICAL SYMBOL G CLEF}lowest", min_size=1, max_size=30),
    st.lists(st.integers(0, 30), min_size=2, max_size=6, unique=True),
)
def test_a_token_counts_where_its_last_character_does(text, ends):
    ends = sorted(min(end, len(text)) for end in ends)
    ranges = tuple((a, b) for a, b in zip(ends[::2], ends[1::2], strict=False) if a < b)
    ids = TOKENIZER.encode(text)
    found = scored_tokens(Document("text", text, scored=ranges), ids, TOKENIZER)
    owner = [place for place, character in enumerate(text) for _ in character.encode()]
    last = [owner[end - 1] for end in np.cumsum([len(TOKENIZER.bytes_of(int(one))) for one in ids])]
    assert found.tolist() == [False, *(any(a <= place < b for a, b in ranges) for place in last)]


def test_a_space_that_the_tokenizer_puts_before_a_text_moves_nothing():
    tokenizer = step_tokenizer()
    document = Document("claim", "t is 16 .", scored=((0, 1), (5, 7)))
    found = scored_tokens(document, tokenizer.encode(document.text), tokenizer)
    assert found.tolist() == [False, True, False, True, False]


def test_a_tokenizer_that_changes_the_text_is_refused():
    document = Document("e", "e\N{COMBINING ACUTE ACCENT}", scored=((0, 1),))
    with pytest.raises(DataError, match="keeps the text"):
        scored_tokens(document, TOKENIZER.encode("é"), TOKENIZER)


def test_a_prepared_corpus_scores_results_and_the_whole_of_texts_without_ranges(corpus):
    whole = texts_in(corpus.train, corpus.train_scored, corpus.tokenizer)
    whole |= texts_in(corpus.valid, corpus.valid_scored, corpus.tokenizer)
    assert whole.pop("sums of numbers") == "sums of numbers"
    assert {text: found.strip() for text, found in whole.items()} == {
        f"☃ {a} plus {a} is {2 * a} .": str(2 * a) for a in range(30)
    }
    splits = corpus.manifest["splits"]
    assert splits["train"]["scored"] == corpus.train_scored.sum()
    assert corpus.manifest["version"] == 2  # which readers that would score every token refuse
    corpus.verify()


def test_other_ranges_are_another_corpus(corpus):
    other = Sums()
    other.shift = -1
    with pytest.raises(ConfigError, match="prepared otherwise"):
        prepare(other, corpus.folder, vocab_size=300, valid_fraction=0.3)


@pytest.mark.parametrize("change", ["flip", "cut", "remove"])
def test_a_damaged_file_of_scores_is_refused(corpus, change):
    path = corpus.folder / "train.scored.bin"
    raw = bytearray(path.read_bytes())
    if change == "remove":
        path.unlink()
    else:
        raw[0] ^= 1
        path.write_bytes(raw if change == "flip" else raw[:-1])
    with pytest.raises(DataError, match=r"train\.scored\.bin has"):
        Corpus.load(corpus.folder).verify()


@pytest.mark.parametrize(
    "ranges", [((3, 3),), ((4, 2),), ((-1, 2),), ((0, 99),), ((3, 5), (4, 6)), ((5, 6), (1, 2))]
)
def test_ranges_outside_or_out_of_order_are_refused(tmp_path, ranges):
    class Source(Sums):
        def documents(self):
            yield Document("text", "some text", scored=ranges)
            yield Document("text", "other text")

    with pytest.raises(DataError, match="document 'text' of 9 characters, scored at"):
        prepare(Source(), tmp_path / "corpus", vocab_size=300)


def test_targets_that_do_not_count_are_marked_and_the_others_are_the_next_tokens():
    tokens, scored = np.arange(100), np.arange(100) % 3 == 0
    batches = Batches(tokens, sequence_length=8, batch_size=4, seed=1, scored=scored)
    for step in range(6):
        batch = batches.at(step)
        following = batch.tokens_BT + 1
        assert torch.equal(batch.targets_BT, torch.where(following % 3 == 0, following, UNSCORED))
        assert batch.num_scored == (following % 3 == 0).sum()
    in_order = torch.cat(
        [
            one.targets_BT.flatten()
            for one in sequential(tokens, sequence_length=8, batch_size=4, scored=scored)
        ]
    )
    assert in_order[in_order != UNSCORED].tolist() == [n for n in range(1, 100) if n % 3 == 0]


def test_scores_for_another_number_of_tokens_are_refused():
    with pytest.raises(DataError, match="100 tokens, and 99"):
        Batches(np.arange(100), sequence_length=8, batch_size=4, seed=1, scored=np.ones(99, dtype=np.bool_))


@pytest.mark.parametrize("size", [None, 2])
def test_loss_and_gradients_are_the_mean_over_scored_tokens(size):
    config = TrainConfig(
        model=presets.scaled(2, vocab_size=100),
        num_steps=1,
        batch_size=4,
        micro_batch_size=size,
        sequence_length=8,
    )
    tokens, scored = np.arange(100), np.arange(100) % 7 == 0
    batch = Batches(tokens, sequence_length=8, batch_size=4, seed=1, scored=scored).at(0)
    model = build(config.model)
    nats = backward(model, batch, config)
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad}
    model.zero_grad()
    logits, counts = model(batch.tokens_BT), batch.targets_BT != UNSCORED
    each = -logits[counts].log_softmax(-1).gather(1, batch.targets_BT[counts][:, None])
    each.mean().backward()
    assert_close(torch.tensor(nats), each.sum())
    named = dict(model.named_parameters())
    for name, gradient in found.items():
        assert_close(gradient, named[name].grad)


def test_evaluation_counts_scored_tokens_only():
    model = build(presets.scaled(2, vocab_size=100))
    tokens, scored = np.arange(1, 100), np.arange(1, 100) % 3 == 0
    options = {"bytes_per_token": np.full(100, 2), "sequence_length": 16, "batch_size": 4}
    found = evaluate(model, tokens, scored=scored, **options)
    assert (found.num_tokens, found.num_bytes) == (33, 66)
    assert found.loss != evaluate(model, tokens, **options).loss
