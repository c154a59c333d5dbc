import inspect
import sys

import pytest
import torch
from closeness import assert_close
from layers.test_residual_rules import RULE_CONFIGS

from attention_residuals.errors import ConfigError, DataError, NonFiniteError, ShapeError
from attention_residuals.inference import left_padded, positions_of, prefill
from attention_residuals.layers.residual import AttnRes, TwoPhaseRule
from attention_residuals.models import Decoder, presets
from attention_residuals.trace import Recorder

TOKENS = torch.randint(40, (2, 9), generator=torch.Generator().manual_seed(0))


def model_of(config, dtype=torch.float64, max_tokens=16):
    model = Decoder(presets.scaled(3, vocab_size=40, max_tokens=max_tokens, residual=config)).to(dtype)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    return model.requires_grad_(False)


@pytest.mark.parametrize("chunk", [1, 7, 9, 2048])
@pytest.mark.parametrize("config", [c for n, c in RULE_CONFIGS.items() if "heads" not in n], ids=repr)
def test_chunks_give_the_logits_of_one_pass_for_every_rule(config, chunk):
    model = model_of(config)
    found = prefill(model, TOKENS, chunk=chunk)
    assert_close(found.logits, model(TOKENS)[:, -1])
    assert found.cache.num_tokens == 9
    assert found.mask is None
    following = model(TOKENS[:, :1], cache=found.cache)
    assert_close(following[:, 0], model(torch.cat([TOKENS, TOKENS[:, :1]], dim=1))[:, -1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", [2, 9])
@pytest.mark.parametrize("two_phase", [False, True])
def test_padded_sequences_read_as_they_do_alone(two_phase, chunk, side, dtype):
    model = model_of(AttnRes(sublayers_per_block=2), dtype)
    residual = TwoPhaseRule(model.residual) if two_phase else None
    lengths, rows = [9, 4, 6], torch.randint(1, 40, (3, 9))
    tokens, mask = torch.zeros(3, 9, dtype=torch.long), torch.zeros(3, 9, dtype=torch.bool)
    for row, length in enumerate(lengths):
        place = slice(9 - length, 9) if side == "left" else slice(0, length)
        tokens[row, place], mask[row, place] = rows[row, :length], True
    found = prefill(model, tokens, mask=mask, chunk=chunk, residual=residual)
    for row, length in enumerate(lengths):
        assert_close(found.logits[row], model(rows[row : row + 1, :length])[0, -1])
        assert int(found.mask[row].sum()) == length


def test_depth_sources_exist_for_one_chunk_at_a_time():
    recorders = []

    def tap():
        recorders.append(Recorder())
        return recorders[-1]

    model = model_of(AttnRes(sublayers_per_block=2))
    prefill(model, TOKENS, chunk=4, tap=tap)
    traces = [recorder.trace(model) for recorder in recorders]
    assert [trace.tokens.shape[1] for trace in traces] == [4, 4, 1]
    assert torch.cat([trace.positions for trace in traces], dim=1)[0].tolist() == list(range(9))


def test_a_cache_that_holds_a_text_is_gone_on_with():
    model = model_of(AttnRes())
    cache = prefill(model, TOKENS[:, :5]).cache
    assert_close(prefill(model, TOKENS[:, 5:], cache=cache, chunk=2).logits, model(TOKENS)[:, -1])


def test_padding_is_moved_and_empty_columns_are_dropped():
    tokens = torch.tensor([[0, 5, 6, 0], [0, 0, 7, 0]])
    moved, real = left_padded(tokens, tokens > 0)
    assert moved.tolist() == [[5, 6], [0, 7]]
    assert real.tolist() == [[True, True], [False, True]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1], [0, 0, 0]], "sequence 1 of 2 without a token"),
        ([[1, 0, 1], [1, 1, 1]], "padding between the tokens of sequence 0"),
    ],
)
def test_a_mask_that_makes_no_sense_is_refused(mask, message):
    with pytest.raises(DataError, match=message):
        left_padded(TOKENS[:, :3], torch.tensor(mask).bool())


def test_prompts_that_do_not_fit_are_refused():
    model = model_of(AttnRes(), max_tokens=8)
    with pytest.raises(ShapeError, match=r"a prompt of 9 tokens after 0"):
        prefill(model, TOKENS)
    with pytest.raises(ConfigError, match="chunk=0"):
        prefill(model, TOKENS[:, :3], chunk=0)
    with pytest.raises(ShapeError, match="a prompt of 0 tokens"):
        prefill(model, TOKENS[:, :0])
    cache = prefill(model, TOKENS[:, :3]).cache
    with pytest.raises(DataError, match="a cache that holds 3 tokens"):
        prefill(model, TOKENS[:, :3], cache=cache, mask=torch.tensor([[1, 1, 1], [0, 1, 1]]).bool())


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(2, 5).bool(), r"torch.bool\[2, 5\] for tokens of shape \[2, 6\]"),
        (torch.ones(1, 6).bool(), r"torch.bool\[1, 6\] for tokens"),
        (torch.ones(6).bool(), r"torch.bool\[6\] for tokens"),
        (torch.ones(2, 6), r"torch.float32\[2, 6\]"),
        (torch.ones(2, 6).long(), r"torch.int64\[2, 6\]"),
    ],
)
def test_a_mask_has_a_truth_for_each_token(mask, message, monkeypatch):
    # The check is the function's own: the shape checker of the tests must not come first.
    module = sys.modules["attention_residuals.inference.prefill"]
    monkeypatch.setattr(module, "left_padded", inspect.unwrap(left_padded))
    with pytest.raises(ShapeError, match=message):
        module.left_padded(TOKENS[:, :6], mask)
    with pytest.raises(ShapeError, match=message):
        inspect.unwrap(prefill)(model_of(AttnRes()), TOKENS[:, :6], mask=mask)


@pytest.mark.parametrize("tokens", [TOKENS[0], TOKENS[:0], TOKENS.double()], ids=["a row", "none", "floats"])
def test_tokens_must_be_integers_with_a_batch_axis(tokens):
    with pytest.raises(ShapeError, match="add a batch axis"):
        inspect.unwrap(prefill)(model_of(AttnRes()), tokens)
    with pytest.raises(ShapeError, match="add a batch axis"):
        inspect.unwrap(left_padded)(tokens, torch.ones_like(tokens).bool())


def test_a_prompt_that_fails_leaves_the_cache_as_it_was(monkeypatch):
    model = model_of(AttnRes())
    cache, bad = prefill(model, TOKENS[:, :3]).cache, TOKENS[:, 3:].clone()
    bad[1, 5] = 40
    with pytest.raises(DataError, match=r"token ids from \d+ to 40"):
        prefill(model, bad, chunk=2, cache=cache)
    assert cache.num_tokens == 3
    with monkeypatch.context() as patch:
        forward = model.layers[2].mlp.forward
        patch.setattr(
            model.layers[2].mlp,
            "forward",
            lambda *given, **options: forward(*given, **options) / (0 if cache.num_tokens == 5 else 1),
        )
        with pytest.raises(NonFiniteError):
            prefill(model, TOKENS[:, 3:], chunk=2, cache=cache)
    assert cache.num_tokens == 3
    assert_close(prefill(model, TOKENS[:, 3:], chunk=2, cache=cache).logits, model(TOKENS)[:, -1])


def test_what_stands_at_padding_does_not_count():
    model, mask = model_of(AttnRes()), torch.tensor([[True] * 3, [False, True, True]])
    tokens = TOKENS[:, :3].clone()
    expected = prefill(model, tokens, mask=mask).logits
    tokens[1, 0] = -100
    assert torch.equal(prefill(model, tokens, mask=mask).logits, expected)


def test_the_rule_of_another_model_is_refused():
    model, other = model_of(AttnRes()), model_of(AttnRes())
    with pytest.raises(ConfigError, match="make it from this very model"):
        prefill(model, TOKENS, residual=TwoPhaseRule(other.residual))


@pytest.mark.parametrize("joined", [False, True])
def test_texts_of_different_length_are_gone_on_with_by_hand_and_by_prefill(joined):
    model = model_of(AttnRes(sublayers_per_block=2))
    texts = [TOKENS[0, :2], TOKENS[1, :5]]
    if joined:
        cache = prefill(model, texts[0][None]).cache
        cache.join(prefill(model, texts[1][None]).cache)
    else:
        tokens, real = torch.zeros(2, 5).long(), torch.tensor([[True] * 2 + [False] * 3, [True] * 5])
        tokens[0, :2], tokens[1] = texts
        cache = prefill(model, tokens, mask=real, chunk=2).cache
    assert cache.padding == (3, 0)
    newest = TOKENS[:, 5:6]
    mask = cache.mask(1)
    assert mask.tolist() == [[False] * 3 + [True] * 3, [True] * 6]
    by_hand = model(newest, cache=cache, mask=mask, positions=positions_of(mask)[:, -1:])[:, -1]
    more = TOKENS[:, 6:]
    by_prefill = prefill(model, more, cache=cache, chunk=2)
    assert torch.equal(by_prefill.mask, cache.mask())
    for row, text in enumerate(texts):
        whole = torch.cat([text, newest[row], more[row]])[None]
        assert_close(by_hand[row], model(whole[:, :-3])[0, -1])
        assert_close(by_prefill.logits[row], model(whole)[0, -1])
