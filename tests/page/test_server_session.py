"""What the server computes: the same numbers as without it, and errors that say what to do."""

import base64
import zlib

import numpy as np
import pytest
import torch
from closeness import assert_close
from page.live_model import MAX_TOKENS, session, tiny

from attention_residuals.errors import AttentionResidualsError, ConfigError, DataError, EditError
from attention_residuals.inference import Engine, Sampling
from attention_residuals.models.weights import fingerprint
from attention_residuals.page.jobs import Cancelled
from attention_residuals.page.session import Session
from attention_residuals.trace import Drop, Force, control, divergence, intervene, record

DROP = {"type": "Drop", "sites": "L2.mlp", "sources": "B1"}


@pytest.fixture(scope="module")
def here():
    return session()


def never():
    pass


def asked(here, kind, check=never, **fields):
    return list(here.work(kind, fields)(check))


def done(here, kind, **fields):
    *_, last = asked(here, kind, **fields)
    assert last["type"] == "done"
    return last


def array(found):
    places = np.frombuffer(zlib.decompress(base64.b64decode(found["data"])), np.uint8).reshape(4, -1)
    numbers = np.frombuffer(places.T.tobytes(), "<f4" if found["type"] == "float32" else "<i4")
    return torch.from_numpy(numbers.reshape(found["shape"]).copy())


def ids_of(here, text):
    return torch.tensor([[here.tokenizer.end_of_text, *here.tokenizer.encode(text).tolist()]])


def weights_of(trace):
    return torch.cat([site.distinct().token_weights for site in trace])


def shown_weights(payload, number):
    shown = payload["traces"][number]
    return array(shown["arrays"]["weight"])[: shown["num_source_rows"]]


def test_a_text_has_the_routing_and_the_predictions_of_the_model(here):
    found = done(here, "trace", text="the cat")
    trace = record(here.model, ["the cat"], tokenizer=here.tokenizer)
    payload = found["payload"]
    assert len(payload["traces"]) == 1
    assert payload["pair"] is None
    assert torch.equal(shown_weights(payload, 0), weights_of(trace))
    assert payload["traces"][0]["tokens"]["texts"] == [list(trace.token_texts[0])]
    best = here.model(ids_of(here, "the cat")).softmax(-1).topk(5)
    predictions = payload["traces"][0]["predictions"]
    assert torch.equal(array(predictions["top_tokens"]), best.indices.int())
    assert_close(array(predictions["top_probabilities"]), best.values)
    assert payload["traces"][0]["lens"]["sites"][-1] == "output"


@pytest.mark.parametrize(
    ("data", "edit"),
    [
        (DROP, Drop(sites="L2.mlp", sources="B1")),
        ({**DROP, "positions": [2]}, Drop(sites="L2.mlp", sources="B1", positions=(2,))),
        (
            {"type": "Force", "sites": "L1.attention", "to": "embedding"},
            Force(sites="L1.attention", to="embedding"),
        ),
    ],
    ids=["drop", "drop at a token", "force"],
)
def test_an_edit_does_what_it_does_without_the_server(here, data, edit):
    found = done(here, "trace", text="the dog sat", edits=[data])
    tokens = ids_of(here, "the dog sat")
    edited, clean = intervene(here.model, tokens, [edit]), control(here.model, tokens, [edit])
    assert_close(torch.tensor(found["kl"]), divergence(clean, edited.logits).values[0])
    for name, logits in (("before", clean), ("after", edited.logits)):
        best = logits[0].softmax(-1).topk(5)
        assert_close(torch.tensor([[share for _, share in row] for row in found[name]]), best.values)
        assert [[word for word, _ in row] for row in found[name]] == [
            here.tokenizer.tokens(row) for row in best.indices.tolist()
        ]
    (receipt,), (expected,) = found["payload"]["receipts"], edited.receipts
    assert (receipt["fired"], receipt["tokens"]) == (expected.fired, expected.tokens)
    assert receipt["largest_weight_change"] == expected.largest_weight_change
    assert [one["name"] for one in found["payload"]["traces"]] == ["as it is", "with edits"]
    assert max(found["kl"]) > 0


def test_tokens_before_an_edited_one_predict_exactly_the_same(here):
    found = done(here, "trace", text="the dog sat on", edits=[{**DROP, "positions": [3]}])
    assert found["kl"][:3] == [0, 0, 0]
    assert found["kl"][3] > 0
    assert found["before"][:3] == found["after"][:3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generation_streams_what_the_engine_generates_and_shows_all_of_it(here, temperature):
    *pieces, last = asked(here, "generate", text="the cat", max_new_tokens=6, temperature=temperature, seed=3)
    engine = Engine(here.model, here.tokenizer)
    sampling = Sampling(temperature=temperature, seed=3)
    expected = list(engine.stream("the cat", max_new_tokens=6, sampling=sampling))
    assert [piece["text"] for piece in pieces] == [piece.text for piece in expected]
    assert_close(
        torch.tensor([piece["probability"] for piece in pieces]),
        torch.tensor([piece.log_probability for piece in expected]).exp(),
    )
    ids = [*ids_of(here, "the cat")[0].tolist(), *(piece.token for piece in expected)]
    assert last["payload"]["traces"][0]["tokens"]["ids"] == [ids]
    assert last["ended"] == "length"
    trace = record(here.model, torch.tensor([ids]))
    assert torch.equal(shown_weights(last["payload"], 0), weights_of(trace))


def test_an_empty_prompt_begins_a_new_text_and_the_context_ends_a_long_one(here):
    assert done(here, "generate", text="", max_new_tokens=2)["ended"]
    *pieces, last = asked(here, "generate", text="the cat", max_new_tokens=1024)
    assert last["ended"] == "length"
    assert last["payload"]["traces"][0]["arrays"]["state_norm"]["shape"][2] == MAX_TOKENS
    assert len(pieces) < MAX_TOKENS


def test_the_end_of_a_text_is_told_and_is_not_part_of_it(monkeypatch):
    model, tokenizer = tiny()
    ends = torch.full((tokenizer.vocab_size,), 0.0)
    ends[tokenizer.end_of_text] = 100.0
    monkeypatch.setattr(model, "unembed", lambda state: ends.expand(*state.shape[:-1], -1))
    monkeypatch.setattr(type(model), "forward", _ending(type(model).forward, ends))
    last = done(Session(Engine(model, tokenizer), "ends"), "generate", text="the cat")
    assert last["ended"] == "end of text"
    assert last["payload"]["traces"][0]["tokens"]["ids"][0][-1] != tokenizer.end_of_text


def _ending(forward, ends):
    return lambda self, tokens, **options: forward(self, tokens, **options) * 0 + ends


def test_edits_act_in_generation_too(here):
    force = {"type": "Force", "sites": ["*", "!L0.attention"], "to": "embedding"}
    clean = done(here, "generate", text="the cat", max_new_tokens=8)
    found = done(here, "generate", text="the cat", max_new_tokens=8, edits=[force])
    assert found["payload"]["receipts"][0]["fired"] > 8
    ids = [one["payload"]["traces"][0]["tokens"]["ids"] for one in (clean, found)]
    assert ids[0] != ids[1]
    rows = {site["name"]: site["first"] for site in found["payload"]["traces"][0]["sites"]}
    assert shown_weights(found["payload"], 0)[rows["L2.mlp"]].eq(1).all()


def test_two_texts_are_shown_beside_each_other(here):
    found = done(here, "compare", text="the cat sat", other="the dog sat")
    payload = found["payload"]
    assert payload["pair"]["aligned"]
    assert [one["name"] for one in payload["traces"]] == ["text", "other text"]
    assert {one["about"]["checkpoint"] for one in payload["traces"]} == {fingerprint(here.model)}
    for number, text in enumerate(("the cat sat", "the dog sat")):
        assert torch.equal(
            shown_weights(payload, number), weights_of(record(here.model, [text], tokenizer=here.tokenizer))
        )
    logits = [here.model(ids_of(here, text)) for text in ("the cat sat", "the dog sat")]
    assert_close(torch.tensor(found["kl"]), divergence(*logits).values[0])


def test_texts_that_do_not_align_are_explained(here):
    with pytest.raises(DataError) as told:
        here.work("compare", {"text": "the cat sat", "other": "the cat"})
    tokens = [len(here.tokenizer.encode(text)) for text in ("the cat sat", "the cat")]
    assert f"texts of {tokens[0]} and {tokens[1]} tokens, which part at token" in told.value.got
    assert "each token has its partner" in told.value.expected
    with pytest.raises(DataError, match="the same text twice"):
        here.work("compare", {"text": "the cat", "other": "the cat"})


@pytest.mark.parametrize(
    ("kind", "fields", "error", "says"),
    [
        ("trace", {}, ConfigError, "without text"),
        ("trace", {"text": 5}, ConfigError, "text=5"),
        ("trace", {"text": {"type": "Drop"}}, ConfigError, "Drop"),
        ("trace", {"text": "a", "txt": "b"}, ConfigError, "did you mean 'text'"),
        ("trace", {"text": ""}, DataError, "type something"),
        ("trace", {"text": "\ud800"}, DataError, "surrogate"),
        ("trace", {"text": "a b " * MAX_TOKENS}, DataError, "shorten the text"),
        ("trace", {"text": "a", "edits": "Drop"}, ConfigError, "edits"),
        ("trace", {"text": "a", "edits": ["Drop"]}, ConfigError, "edits"),
        ("trace", {"text": "a", "edits": [{"type": "Dropp"}]}, ConfigError, "did you mean 'Drop'"),
        ("trace", {"text": "a", "edits": [{**DROP, "sites": "L9.mlp"}]}, ConfigError, "L9.mlp"),
        ("trace", {"text": "a", "edits": [{**DROP, "rows": ["x"]}]}, ConfigError, "rows"),
        ("generate", {"text": "a", "max_new_tokens": 0}, ConfigError, "1 to 1024"),
        ("generate", {"text": "a", "max_new_tokens": 1025}, ConfigError, "1 to 1024"),
        ("generate", {"text": "a", "max_new_tokens": None}, ConfigError, "max_new_tokens"),
        ("generate", {"text": "a", "temperature": float("nan")}, ConfigError, "temperature"),
        ("generate", {"text": "a", "temperature": -1}, ConfigError, "temperature"),
        ("generate", {"text": "a", "seed": -1}, ConfigError, "seed"),
        ("compare", {"text": "a"}, ConfigError, "without other"),
        ("delete", {"text": "a"}, ConfigError, "delete"),
    ],
)
def test_nonsense_is_refused_before_it_waits(here, kind, fields, error, says):
    with pytest.raises(error) as told:
        here.work(kind, fields)
    assert says in str(told.value)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({**DROP, "positions": [40]}, "never fired"),
        ({**DROP, "sources": "B7"}, "B7"),
        ({"type": "Drop", "sites": "L0.attention", "sources": "embedding"}, "read nothing"),
        ({"type": "Static", "sites": "L2.mlp"}, "mean"),
    ],
    ids=["never fires", "no such source", "nothing left", "without its reference"],
)
def test_an_edit_that_cannot_be_made_is_an_error_of_the_pass(here, edit, says):
    with pytest.raises(AttentionResidualsError, match=says):
        asked(here, "trace", text="the cat", edits=[edit])
    with pytest.raises(AttentionResidualsError, match=says):
        asked(here, "generate", text="the cat", edits=[edit], max_new_tokens=2)


def test_positions_from_the_end_are_refused_in_a_generation(here):
    with pytest.raises(EditError, match="counted from the start"):
        asked(here, "generate", text="the cat", edits=[{**DROP, "positions": [-1]}])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("trace", {"text": "the cat"}),
        ("trace", {"text": "the cat", "edits": [DROP]}),
        ("compare", {"text": "the cat", "other": "the dog"}),
        ("generate", {"text": "the cat", "max_new_tokens": 4}),
        ("generate", {"text": "the cat", "max_new_tokens": 4, "edits": [DROP]}),
    ],
)
def test_a_pass_that_is_not_wanted_any_more_ends_within_a_sublayer(here, kind, fields):
    calls = [0]

    def count():
        calls[0] += 1

    asked(here, kind, count, **fields)
    total, sublayers = calls[0], 2 * here.model.config.num_layers
    assert total > 2 * sublayers
    for allowed in (0, 3, total - 1):
        calls[0] = 0

        def stop(allowed=allowed):
            calls[0] += 1
            if calls[0] > allowed:
                raise Cancelled

        with pytest.raises(Cancelled):
            asked(here, kind, stop, **fields)
        assert calls[0] == allowed + 1


def test_the_longest_text_is_bounded_by_memory_too(monkeypatch):
    monkeypatch.setattr("attention_residuals.page.session._MAX_BYTES", 200_000)
    found = session()
    assert 1 < found.max_tokens < MAX_TOKENS
    with pytest.raises(DataError, match="shorten"):
        found.work("trace", {"text": "a b " * found.max_tokens})
    assert len(found.tokenizer.encode(found.example)) < found.max_tokens


def test_a_lens_that_would_take_long_is_left_out(here, monkeypatch):
    monkeypatch.setattr("attention_residuals.page.session._LENS_WORK", 10)
    assert done(here, "trace", text="the cat")["payload"]["traces"][0]["lens"] is None


def test_a_session_needs_a_tokenizer():
    with pytest.raises(ConfigError, match="without a tokenizer"):
        Session(Engine(tiny()[0]), "tiny")


def test_the_first_page_shows_the_example(here):
    assert '<section id="live"' in here.first_page()
    assert here.about() == {"model": "tiny", "max_tokens": MAX_TOKENS, "text": here.example}
