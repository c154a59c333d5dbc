import pytest
import torch
from closeness import assert_close
from layers.test_residual_rules import RULE_CONFIGS

from attention_residuals.errors import ConfigError, DataError, ShapeError
from attention_residuals.inference import KVCache, left_padded, prefill
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


def test_sequences_leave_and_join_a_cache():
    model = model_of(AttnRes(sublayers_per_block=2))
    cache = prefill(model, TOKENS[:, :6]).cache
    cache.keep([1], start=0)
    cache.join(prefill(model, TOKENS[:1, :4]).cache)
    mask = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
    positions, newest = torch.tensor([[6], [4]]), torch.tensor([[3], [8]])
    logits = model(newest, cache=cache, mask=mask, positions=positions)
    alone = [torch.cat([TOKENS[1:, :6], newest[:1]], dim=1), torch.cat([TOKENS[:1, :4], newest[1:]], dim=1)]
    for row, text in enumerate(alone):
        assert_close(logits[row, 0], model(text)[0, -1])
    cache.keep([1], start=2)
    assert cache.num_tokens == 5
    longer = torch.cat([alone[1], newest[:1]], dim=1)
    assert_close(model(newest[:1], cache=cache)[0, 0], model(longer)[0, -1])


def test_an_empty_cache_takes_over_what_joins():
    model, cache = model_of(AttnRes()), KVCache()
    cache.join(prefill(model, TOKENS[:, :4]).cache)
    assert_close(model(TOKENS[:, 4:5], cache=cache)[:, 0], model(TOKENS[:, :5])[:, -1])
