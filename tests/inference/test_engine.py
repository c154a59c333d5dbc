import inspect

import numpy as np
import pytest
import torch
from closeness import assert_close

from attention_residuals.data import Tokenizer
from attention_residuals.errors import ConfigError, DataError
from attention_residuals.inference import Engine, Sampling, TextStream
from attention_residuals.inference.sampling import Choice
from attention_residuals.layers.residual import AttnRes, Inkling2, StandardResidual, TwoPhaseRule
from attention_residuals.models import Decoder, presets
from attention_residuals.trace import Recorder, record

TOKENIZER = Tokenizer.train(["the cat sat on the mat, and the dog sat on the cat. END\n"] * 9, vocab_size=290)
PROMPTS = ["the cat", "the dog sat on", "a", "mat, and the", "END\n the"]
GREEDY = Sampling(temperature=0.0)


def model_of(config=AttnRes(sublayers_per_block=2), max_tokens=64, seed=0):  # noqa: B008
    torch.manual_seed(seed)
    model = Decoder(
        presets.scaled(3, vocab_size=TOKENIZER.vocab_size, max_tokens=max_tokens, residual=config)
    ).double()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) / 10
    return model.requires_grad_(False)


def greedy_by_full_passes(model, ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] == 0:
            break
    return ids


@pytest.mark.parametrize(
    "config", [StandardResidual(), AttnRes(), AttnRes(sublayers_per_block=4), Inkling2()], ids=repr
)
def test_greedy_generation_is_that_of_full_passes(config):
    model = model_of(config)
    (found,) = Engine(model, TOKENIZER, chunk=3).generate(PROMPTS[1:2], max_new_tokens=12, sampling=GREEDY)
    assert [*found.prompt, *found.tokens] == greedy_by_full_passes(model, found.prompt, 12)
    logits = model(torch.tensor([[*found.prompt, *found.tokens]])).log_softmax(-1)[
        0, len(found.prompt) - 1 : -1
    ]
    expected = logits.gather(1, torch.tensor(found.tokens)[:, None])[:, 0]
    assert_close(torch.tensor(found.log_probabilities, dtype=torch.float64), expected)


@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, top_p=0.9, seed=4)], ids=repr)
def test_a_batch_that_sequences_join_and_leave_gives_what_each_gives_alone(sampling, batch_size, two_phase):
    model = model_of()
    residual = TwoPhaseRule(model.residual) if two_phase else None
    options = {"max_new_tokens": 9, "sampling": sampling, "stop": ["e"]}
    found = Engine(model, TOKENIZER, residual=residual).generate(PROMPTS, batch_size=batch_size, **options)
    alone = Engine(model, TOKENIZER).generate(PROMPTS, batch_size=1, **options)
    assert [one.tokens for one in found] == [one.tokens for one in alone]
    assert [one.text for one in found] == [one.text for one in alone]
    assert len({len(one.tokens) for one in found}) > 1 or sampling == GREEDY


def test_a_stream_is_the_completion_piece_by_piece():
    engine = Engine(model_of(), TOKENIZER)
    pieces = list(engine.stream(PROMPTS[0], max_new_tokens=7))
    (whole,) = engine.generate(PROMPTS[:1], max_new_tokens=7)
    assert [piece.token for piece in pieces] == whole.tokens
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.ended for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].ended == whole.ended is not None


def test_generation_ends_at_a_stop_string_at_the_end_of_text_and_at_the_length():
    model = model_of()
    text = Engine(model, TOKENIZER).generate(PROMPTS[:1], max_new_tokens=30)[0].text
    stop = text[3:5]
    (found,) = Engine(model, TOKENIZER).generate(PROMPTS[:1], max_new_tokens=30, stop=[stop])
    assert (found.ended, found.text) == ("stop string", text[: text.index(stop)])
    assert Engine(model, TOKENIZER).generate(PROMPTS[:1], max_new_tokens=2)[0].ended == "length"
    model.embedding.weight.data[0] = 99 * model.norm(torch.ones(1, model.config.width).double())[0]
    ended = {Engine(model, TOKENIZER).generate([p], max_new_tokens=30, sampling=Sampling(seed=s))[0].ended
             for s in range(9) for p in PROMPTS}  # fmt: skip
    assert "end of text" in ended


def test_a_sequence_that_fills_the_context_ends():
    (found,) = Engine(model_of(max_tokens=12)).generate([[5, 6, 7]], max_new_tokens=99)
    assert (len(found.tokens), found.ended, found.text) == (9, "length", "")


def test_the_weights_of_every_generated_token_are_those_of_a_full_pass():
    model, recorders = model_of(), []

    def tap():
        recorders.append(Recorder())
        return recorders[-1]

    engine = Engine(model, TOKENIZER, chunk=2)
    pieces = list(engine.stream(PROMPTS[1], max_new_tokens=6, tap=tap))
    ids = [
        TOKENIZER.end_of_text,
        *TOKENIZER.encode(PROMPTS[1]).tolist(),
        *(piece.token for piece in pieces[:-1]),
    ]
    full = record(model, torch.tensor([ids]))
    parts = [recorder.trace(model) for recorder in recorders]
    for number, site in enumerate(full.sites):
        weights = torch.cat([part.sites[number].weights for part in parts], dim=2)
        assert_close(weights, site.weights)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([[]], {}, DataError, "prompt 0 of 1, which is empty"),
        (["a", []], {}, DataError, "prompt 1 of 2, which is empty"),
        (["a" * 99], {}, DataError, "fewer than 64, the model's context"),
        ("abc", {}, DataError, "'abc' as the list of prompts"),
        (5, {}, DataError, "5 as the list of prompts"),
        ([5, 6], {}, DataError, "prompt 0 of 2: 5"),
        (["a", ["abc"]], {}, DataError, r"prompt 1 of 2: \['abc'\]"),
        ([[5, 1.7]], {}, DataError, r"prompt 0 of 1: \[5, 1.7\]"),
        ([torch.tensor([1.7])], {}, DataError, "prompt 0 of 1: tensor"),
        (["a", [5, 290, 6]], {}, DataError, "prompt 1 of 2, with token ids from 5 to 290"),
        ([[-1]], {}, DataError, "token ids from -1 to -1"),
        (["a"], {"max_new_tokens": 0}, ConfigError, "max_new_tokens=0"),
        (["a"], {"batch_size": 0}, ConfigError, "batch_size=0"),
        (["a"], {"stop": [""]}, ConfigError, "none of them empty"),
        (["a"], {"stop": "END"}, ConfigError, "stop='END'"),
        (["a"], {"stop": [5]}, ConfigError, "none of them empty"),
    ],
)
def test_bad_requests_are_refused(prompts, options, error, message, monkeypatch):
    # The checks are the functions' own: the type checker of the tests must not come first.
    monkeypatch.setattr(Engine, "_require", inspect.unwrap(Engine._require))
    monkeypatch.setattr(Engine, "_sequences", inspect.unwrap(Engine._sequences))
    monkeypatch.setattr(TextStream, "__init__", inspect.unwrap(TextStream.__init__))
    engine, options = Engine(model_of(), TOKENIZER), {"max_new_tokens": 3, **options}
    with pytest.raises(error, match=message):
        inspect.unwrap(Engine.generate)(engine, prompts, **options)
    if isinstance(prompts, list) and len(prompts) == 1 and "batch_size" not in options:
        with pytest.raises(error, match=message):  # at once, not when the first piece is asked for
            inspect.unwrap(Engine.stream)(engine, prompts[0], **options)


def test_ids_may_be_whole_numbers_of_any_kind():
    engine, options = Engine(model_of()), {"max_new_tokens": 3, "sampling": GREEDY}
    expected = [one.tokens for one in engine.generate([[5, 6], [5, 6]], **options)]
    for prompts in (np.array([[5, 6]] * 2), torch.tensor([[5, 6]] * 2), [(5, np.int64(6)), range(5, 7)]):
        assert [one.tokens for one in inspect.unwrap(Engine.generate)(engine, prompts, **options)] == expected


def test_an_empty_text_begins_a_new_one():
    engine = Engine(model_of(), TOKENIZER)
    text, ids = engine.generate(["", [TOKENIZER.end_of_text]], max_new_tokens=4, sampling=GREEDY)
    assert text.prompt == ids.prompt == (TOKENIZER.end_of_text,)
    assert text.tokens == ids.tokens


@pytest.mark.parametrize("last", ["length", "end of text"])
def test_a_stop_string_that_the_end_completes_is_the_reason_of_the_end(last, monkeypatch):
    tokenizer = Tokenizer([])
    half = next(token for token in range(257) if tokenizer.bytes_of(token) == b"\xf0")
    tokens = [half, tokenizer.end_of_text]
    monkeypatch.setattr(
        "attention_residuals.inference.engine.choose",
        lambda logits, sampling, *, seen, sequences, steps: Choice(
            torch.tensor([tokens[steps[0]]]), torch.zeros(1)
        ),
    )
    engine = Engine(Decoder(presets.scaled(2, vocab_size=257)), tokenizer)
    for stop, ended, text in (([], last, "\ufffd"), (["\ufffd"], "stop string", "")):
        count = 1 if last == "length" else 2
        pieces = list(engine.stream("a", max_new_tokens=count, stop=stop))
        assert (pieces[-1].ended, "".join(piece.text for piece in pieces)) == (ended, text)
        assert len(pieces) == count


def test_a_rule_of_another_model_is_refused():
    model, other = model_of(), model_of(seed=1)
    for residual in (other.residual, TwoPhaseRule(other.residual)):
        with pytest.raises(ConfigError, match="make it from this very model"):
            Engine(model, residual=residual)
    Engine(model, residual=TwoPhaseRule(model.residual))


def test_chunks_have_at_least_a_token():
    with pytest.raises(ConfigError, match="chunk=0"):
        Engine(model_of(), chunk=0)


def test_a_tokenizer_of_another_model_is_refused():
    model = Decoder(presets.scaled(2, vocab_size=300))
    with pytest.raises(ConfigError, match=f"{TOKENIZER.vocab_size} ids for a model of 300"):
        Engine(model, TOKENIZER)


def test_texts_and_stop_strings_need_a_tokenizer():
    engine = Engine(model_of())
    with pytest.raises(ConfigError, match="no tokenizer"):
        engine.generate(["a"], max_new_tokens=3)
    with pytest.raises(ConfigError, match="stop strings, and no tokenizer"):
        engine.generate([[5]], max_new_tokens=3, stop=["a"])
