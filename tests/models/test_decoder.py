from dataclasses import replace

import pytest
import torch
from closeness import assert_close
from torch.nn import functional as F

from attention_residuals.errors import ConfigError, DataError, ShapeError
from attention_residuals.inference import KVCache
from attention_residuals.layers import EMBEDDING, Chain
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.layers.rope import rotate, rotation
from attention_residuals.models import Decoder, DecoderConfig, presets
from attention_residuals.models.language_model import checked_positions
from attention_residuals.trace import Recorder, record

RULES = {
    "standard": StandardResidual(),
    "full": AttnRes(sublayers_per_block=1),
    "block": AttnRes(sublayers_per_block=3),
}
every_rule = pytest.mark.parametrize("residual", RULES.values(), ids=RULES.keys())
CONFIG = presets.scaled(4, vocab_size=50, max_tokens=32)


def model_of(residual, **changes):
    model = Decoder(replace(CONFIG, residual=residual, **changes)).double()
    for name, parameter in model.named_parameters():
        if name.startswith("residual.readers.") and parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) / 3
    return model


def tokens_of(batch=2, length=9):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(4))


@every_rule
def test_a_token_does_not_see_later_ones(residual):
    model, tokens = model_of(residual), tokens_of()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert ((before - after)[:, 5:].abs().amax(-1) > 0).all()


@every_rule
@pytest.mark.parametrize("chunks", [(9,), (1,) * 9, (4, 5), (2, 1, 6), (5, 1, 1, 1, 1)])
def test_cached_pieces_give_the_whole(residual, chunks):
    model, tokens, cache = model_of(residual), tokens_of(), KVCache()
    with torch.no_grad():
        pieces = [model(piece, cache=cache) for piece in tokens.split(chunks, dim=1)]
    assert cache.num_tokens == 9
    assert_close(torch.cat(pieces, dim=1), model(tokens).detach())


@every_rule
@pytest.mark.parametrize("left", [True, False], ids=["left", "right"])
def test_padded_in_a_batch_equals_alone(residual, left):
    model, tokens = model_of(residual), tokens_of()
    real = slice(3, 9) if left else slice(0, 6)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0] = False
    mask[0, real] = True
    alone, batched = model(tokens[:1, real]), model(tokens, mask=mask)
    assert_close(batched[:1, real], alone)
    assert_close(batched[1:], model(tokens[1:]))


@every_rule
def test_packed_documents_equal_documents_alone(residual):
    model, tokens = model_of(residual), tokens_of()
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]] * 2)
    packed = model(tokens, mask=documents[:, :, None] == documents[:, None, :])
    pieces = [model(piece) for piece in tokens.split((4, 3, 2), dim=1)]
    assert_close(packed, torch.cat(pieces, dim=1))


@every_rule
def test_only_distances_between_positions_matter(residual):
    model, tokens = model_of(residual), tokens_of()
    shifted = torch.arange(9).expand(2, 9) + 1000
    assert_close(model(tokens, positions=shifted), model(tokens), tolerance=1e-9)


@every_rule
def test_grouped_queries_equal_repeated_keys_and_values(residual):
    grouped = model_of(residual, num_heads=4, num_kv_heads=2)
    repeated = model_of(residual, num_heads=4, num_kv_heads=4)
    state = grouped.state_dict()
    for name in state:
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            state[name] = state[name].view(2, 1, 32, -1).repeat(1, 2, 1, 1).view(128, -1)
    repeated.load_state_dict(state)
    assert_close(repeated(tokens_of()), grouped(tokens_of()))


def gradients(model, tap=None):
    tokens = tokens_of()
    model.zero_grad()
    logits = model(tokens, tap=tap)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@every_rule
@pytest.mark.parametrize("tapped", [False, True])
def test_checkpointed_activations_give_the_same_gradients(residual, tapped):
    model = model_of(residual)
    expected = gradients(model)
    model.checkpoint_activations = True
    actual = gradients(model, Recorder() if tapped else None)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        assert_close(actual[name], gradient)


@every_rule
def test_a_tap_fires_once_under_activation_checkpointing(residual):
    class Counter:
        def __init__(self):
            self.events = []

        def begin(self, run):
            self.events.append("begin")

        def read(self, read):
            self.events.append(str(read.site))
            return read

        def write(self, write):
            self.events.append(write.writer)
            return write

    model, counter = model_of(residual), Counter()
    model.checkpoint_activations = True
    gradients(model, counter)
    sites = [str(site) for site in model.residual.sites()]
    expected = ["begin", EMBEDDING, *(name for site in sites[:-1] for name in (site, site)), "output"]
    assert counter.events == expected


@every_rule
def test_checkpointing_keeps_less_for_backward(residual):
    def kept(model):
        seen = {}

        def note(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(tokens_of(2, 32))
        return sum(size for pointer, size in seen.items() if pointer not in parameters)

    model = model_of(residual)
    whole = kept(model)
    model.checkpoint_activations = True
    assert kept(model) < whole / 3


@every_rule
def test_autocast_computes_in_bfloat16_and_keeps_sources_in_float32(residual):
    model, recorder = Decoder(replace(CONFIG, residual=residual)), Recorder()
    exact = model(tokens_of())
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens_of(), tap=recorder)
    assert logits.dtype == torch.bfloat16
    assert_close(logits.float(), exact, tolerance=0.03)


def test_a_tied_head_is_the_embedding_and_an_untied_one_its_own():
    tied, untied = Decoder(CONFIG), Decoder(replace(CONFIG, tied=False))
    assert tied.head is None
    assert (
        sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
        == 50 * CONFIG.width
    )


def test_there_are_no_biases():
    assert not [name for name, _ in Decoder(CONFIG).named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tokens": torch.tensor([[1, 50]])}, DataError, "token ids from 1 to 50"),
        ({"tokens": torch.tensor([[-1, 5]])}, DataError, "token ids from -1 to 5"),
        ({"tokens": torch.zeros(1, 33, dtype=torch.long)}, ShapeError, "a sequence of 33 tokens"),
        (
            {"tokens": torch.zeros(1, 4, dtype=torch.long), "mask": torch.ones(1, 3, dtype=torch.bool)},
            ShapeError,
            r"a mask of shape \[1, 3\]",
        ),
        (
            {"tokens": torch.zeros(2, 4, dtype=torch.long), "positions": torch.arange(4)[None]},
            ShapeError,
            r"positions of shape \[1, 4\]",
        ),
    ],
)
def test_input_that_does_not_fit_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        unchecked(checked_positions)(
            CONFIG, arguments["tokens"], arguments.get("positions"), arguments.get("mask"), 0, None
        )


def test_a_mask_of_numbers_is_refused():
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ShapeError, match=r"a mask of torch\.int64"):
        unchecked(checked_positions)(CONFIG, tokens, None, torch.ones_like(tokens), 0, None)


def unchecked(function):
    """Without the run-time check of shapes, which comes first in tests only."""
    return getattr(function, "__wrapped__", function)


@every_rule
def test_a_pass_that_failed_leaves_the_cache_as_it_was(residual, monkeypatch):
    model, tokens, cache = model_of(residual), tokens_of(), KVCache()
    with torch.no_grad():
        model(tokens[:, :4], cache=cache)
        with monkeypatch.context() as patch:
            patch.setattr(model.layers[2].mlp, "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(tokens[:, 4:], cache=cache)
        assert cache.num_tokens == 4
        rest = model(tokens[:, 4:], cache=cache)
    assert_close(rest, model(tokens)[:, 4:].detach())


def test_a_cache_refuses_another_batch():
    model, cache = Decoder(CONFIG), KVCache()
    with torch.no_grad():
        model(tokens_of(), cache=cache)
        with pytest.raises(ShapeError, match="a batch of 1 for a cache of 2"):
            model(tokens_of(1), cache=cache)


def test_rotary_positions_are_turns_of_complex_numbers():
    heads, positions = torch.randn(1, 2, 5, 8).double(), torch.tensor([[0, 1, 7, 100, 3]])
    turned = rotate(heads, rotation(positions, 8, 10_000.0, torch.float64))
    for pair in range(4):
        angle = positions[0].double() * 10_000.0 ** (-2 * pair / 8)
        expected = torch.complex(heads[0, :, :, pair], heads[0, :, :, pair + 4]) * torch.exp(1j * angle)
        assert_close(turned[0, :, :, pair], expected.real)
        assert_close(turned[0, :, :, pair + 4], expected.imag)


def test_what_writes_to_the_state_starts_smaller_with_depth():
    torch.manual_seed(0)
    model = Decoder(presets.scaled(8, vocab_size=500))
    layer = model.layers[3]
    for weight in (layer.attention.output.weight, layer.mlp.down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    for weight in (layer.attention.query.weight, layer.mlp.up.weight, model.embedding.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize(
    ("tokens", "advice"),
    [
        (torch.tensor([1, 2]), "add a batch axis"),
        (torch.ones(1, 2), "as integers"),
        (torch.zeros(1, 0, dtype=torch.long), "at least one token"),
    ],
)
def test_tokens_must_be_integers_with_a_batch_axis(tokens, advice):
    with pytest.raises(ShapeError, match=f"do: .*{advice}"):
        unchecked(checked_positions)(CONFIG, tokens, None, None, 0, None)


def test_a_cache_counts_towards_the_longest_sequence():
    model, cache = Decoder(CONFIG), KVCache()
    with torch.no_grad():
        model(torch.zeros(1, 30, dtype=torch.long), cache=cache)
        with pytest.raises(ShapeError, match="a sequence of 33 tokens"):
            model(torch.zeros(1, 3, dtype=torch.long), cache=cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 0}, "width=0"),
        ({"width": True}, "width=True"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads=6 with num_kv_heads=4"),
        ({"head_width": 7}, "head_width=7"),
        ({"norm_eps": -1e-6}, "norm_eps"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"init_std": 0.0}, "init_std=0.0"),
        ({"common_std": -0.1}, "common_std=-0.1"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, **change)


def test_weights_start_as_large_as_was_asked_and_writers_smaller():
    torch.manual_seed(0)
    model = Decoder(replace(CONFIG, width=64, vocab_size=500, init_std=0.125))
    writer = 0.125 / (2 * CONFIG.num_layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and not name.startswith("residual."):
            expected = writer if name.endswith(("output.weight", "down.weight")) else 0.125
            assert parameter.std().item() == pytest.approx(expected, rel=0.1), name
    assert model.embedding.weight.mean(0).abs().max() < 0.03


def test_rows_of_the_embedding_share_a_vector_and_nothing_else_changes():
    models = []
    for common_std in (0.0, 0.5):
        torch.manual_seed(0)
        models.append(Decoder(replace(CONFIG, common_std=common_std)))
    alone, shared = (dict(model.named_parameters()) for model in models)
    added = shared["embedding.weight"] - alone["embedding.weight"]
    assert_close(added, added[:1].expand_as(added))
    assert added.std().item() == pytest.approx(0.5, rel=0.4)
    assert all(torch.equal(alone[name], shared[name]) for name in alone if name != "embedding.weight")


def test_one_dial_scales_the_model():
    sizes = [presets.scaled(depth, vocab_size=100) for depth in (2, 5, 8, 12)]
    parameters = [sum(p.numel() for p in Decoder(config).parameters()) for config in sizes]
    assert parameters == sorted(parameters)
    assert len({(config.width, config.mlp_width) for config in sizes}) == len(sizes)
    with pytest.raises(ConfigError, match="depth=1"):
        presets.scaled(1, vocab_size=100)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("paper-194m", 194), ("paper-241m", 241), ("paper-296m", 296), ("paper-436m", 436), ("paper-528m", 528)],
)
def test_paper_shapes_come_near_the_published_counts(name, millions):
    config = presets.paper(name, vocab_size=1000)
    with torch.device("meta"):
        model = Decoder(config)
    count = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(("embedding", "head")))
    assert 0.93 < count / (millions * 1e6) < 1.0
    blocks = -(-2 * config.num_layers // config.residual.sublayers_per_block)
    assert 7 <= blocks <= 9


def test_an_unknown_paper_shape_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'paper-436m'"):
        presets.paper("paper-463m", vocab_size=1000)


def test_default_residual_is_the_block_form():
    config = DecoderConfig(
        vocab_size=9,
        num_layers=2,
        width=8,
        num_heads=1,
        num_kv_heads=1,
        head_width=8,
        mlp_width=8,
        max_tokens=4,
    )
    assert record(Decoder(config), torch.tensor([[1, 2]])).rule["type"] == "AttnRes"


def test_a_chain_tells_every_tap_what_the_pass_runs_on():
    recorders = Recorder(), Recorder()
    model, tokens = Decoder(CONFIG), tokens_of()
    model(tokens, tap=Chain(*recorders))
    for recorder in recorders:
        assert torch.equal(recorder.trace(model).tokens, tokens)


def test_printing_a_norm_shows_width_and_eps():
    assert str(Decoder(CONFIG).norm) == "RMSNorm(64, eps=1e-06)"


def test_the_logits_of_the_last_tokens_are_those_of_all():
    model, tokens = Decoder(CONFIG), torch.tensor([[1, 2, 3, 4]])
    assert torch.allclose(model(tokens, num_logits=2), model(tokens)[:, -2:], atol=1e-6)
    with pytest.raises(ShapeError, match="num_logits=0"):
        model(tokens, num_logits=0)
