from dataclasses import replace

import pytest
import torch
from closeness import assert_close, distance
from models.hf.wrapped_models import (
    GREEDY,
    PROMPTS,
    SHAPE,
    SOME_RULES,
    all_rules,
    both_heads,
    decoder_of,
    left_padded,
    model_of,
    some_rules,
    some_tokens,
)
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.inference import Engine, Sampling
from attention_residuals.layers.residual import AttnRes, HyperConnections
from attention_residuals.layers.tap import Site
from attention_residuals.models import Decoder
from attention_residuals.models.hf.causal_lm import AttnResForCausalLM
from attention_residuals.models.hf.configuration import AttnResConfig


class Watching:
    """A tap that keeps what passes ran on; halves what one layer's MLP writes, or mixes one read evenly."""

    def __init__(self, *, halved=None, even=None):
        self.passes, self.halved, self.even = [], halved, even

    def begin(self, run):
        self.passes.append(run)

    def read(self, read):
        if read.site != self.even:
            return read
        return read._replace(weights=torch.full_like(read.weights, 1 / len(read.values)))

    def write(self, write):
        return write._replace(output=write.output / 2) if write.writer == str(self.halved) else write


# Logits, loss, states


@all_rules
@both_heads
def test_logits_are_the_decoders_bit_for_bit(residual, tied):
    model, tokens = model_of(residual, tied=tied), some_tokens()
    expected = model.decoder(tokens)
    for options in ({}, {"use_cache": False}, {"output_hidden_states": True}):
        assert torch.equal(model(tokens, **options).logits, expected)
    assert torch.equal(model(tokens, attention_mask=torch.ones_like(tokens)).logits, expected)


def test_a_wrapped_decoder_shares_its_parameters():
    decoder = decoder_of()
    model = AttnResForCausalLM.from_decoder(decoder)
    assert model.decoder is decoder
    assert {id(parameter) for parameter in model.parameters()} == set(map(id, decoder.parameters()))


def test_a_new_model_starts_as_a_new_decoder():
    config = AttnResConfig.of(replace(SHAPE, tied=False, residual=HyperConnections()))
    torch.manual_seed(5)
    decoder = Decoder(config.decoder_config)
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    for name, tensor in decoder.state_dict().items():
        assert torch.equal(model.decoder.state_dict()[name], tensor)


@all_rules
def test_states_are_what_attention_reads_and_what_the_head_reads(residual):
    model, tokens = model_of(residual, tied=False), some_tokens()
    output = model(tokens, output_hidden_states=True)
    assert len(output.hidden_states) == SHAPE.num_layers + 1
    assert all(state.shape == (*tokens.shape, SHAPE.width) for state in output.hidden_states)
    assert_close(F.linear(output.hidden_states[-1], model.decoder.head.weight), output.logits)


def test_standard_states_are_the_running_sum():
    model, tokens = model_of(SOME_RULES["standard"]), some_tokens()
    outputs = []
    for layer in model.decoder.layers:
        for sublayer in (layer.attention, layer.mlp):
            sublayer.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    states = model(tokens, output_hidden_states=True).hidden_states
    stream = model.decoder.embedding(tokens)
    assert torch.equal(states[0], stream)
    for layer in range(SHAPE.num_layers):
        assert_close(states[layer], stream)
        stream = stream + outputs[2 * layer] + outputs[2 * layer + 1]
    assert_close(states[-1], model.decoder.norm(stream))


def test_attention_residuals_first_read_the_embedding():
    model, tokens = model_of(), some_tokens()
    states = model(tokens, output_hidden_states=True).hidden_states
    assert torch.equal(states[0], model.decoder.embedding(tokens))
    assert distance(states[1], states[0]) > 0.1


def test_states_can_be_switched_on_in_the_config():
    model = model_of()
    model.config.output_hidden_states = True
    assert model(some_tokens()).hidden_states is not None
    assert model(some_tokens(), output_hidden_states=False).hidden_states is None


def test_the_loss_is_cross_entropy_of_the_next_token_without_what_is_left_out():
    model, tokens = model_of(), some_tokens(3, 8)
    labels = tokens.clone()
    labels[0, :5] = -100
    output = model(tokens, labels=labels)
    expected = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    assert_close(output.loss, expected)
    total = expected * (labels[:, 1:] != -100).sum()
    assert_close(model(tokens, labels=labels, num_items_in_batch=10).loss, total / 10)
    assert_close(model(tokens, labels=labels, num_items_in_batch=torch.tensor(10)).loss, total / 10)


@pytest.mark.parametrize("kept", [1, 3, 9, 30, torch.tensor([0, 4])], ids=str)
def test_only_the_wanted_logits_are_returned(kept):
    model, tokens = model_of(), some_tokens()
    logits = model(tokens).logits
    expected = logits[:, kept] if isinstance(kept, torch.Tensor) else logits[:, -kept:]
    assert_close(model(tokens, logits_to_keep=kept).logits, expected)


def test_a_tuple_has_the_loss_first():
    model, tokens = model_of(), some_tokens()
    output = model(tokens, labels=tokens, output_hidden_states=True)
    loss, logits, cache, states = model(tokens, labels=tokens, output_hidden_states=True, return_dict=False)
    assert torch.equal(loss, output.loss)
    assert torch.equal(logits, output.logits)
    assert cache.get_seq_length() == tokens.shape[1]
    assert len(states) == len(output.hidden_states)
    (only,) = model(tokens, use_cache=False, return_dict=False)
    assert torch.equal(only, output.logits)


@pytest.mark.parametrize("edit", [{"halved": Site(0, "mlp")}, {"even": Site(1, "attention")}], ids=str)
def test_a_tap_sees_the_pass_and_states_show_its_changes(edit):
    model, tokens, tap = model_of(), some_tokens(), Watching(**edit)
    plain, edited = (model(tokens, tap=one, output_hidden_states=True) for one in (None, tap))
    assert len(tap.passes) == 1
    assert torch.equal(edited.logits, model.decoder(tokens, tap=Watching(**edit)))
    assert torch.equal(plain.hidden_states[0], edited.hidden_states[0])
    assert distance(edited.hidden_states[1], plain.hidden_states[1]) > 1e-3
    assert_close(F.linear(edited.hidden_states[-1], model.decoder.embedding.weight), edited.logits)


def test_states_have_the_models_dtype_where_sources_have_another():
    model, tokens = model_of(AttnRes(source_dtype="bfloat16")), some_tokens()
    output = model(tokens, output_hidden_states=True)
    assert {state.dtype for state in output.hidden_states} == {torch.float32}
    assert distance(F.linear(output.hidden_states[-1], model.decoder.embedding.weight), output.logits) < 1e-2


# Masks, positions, caches


@some_rules
def test_padded_sequences_are_computed_as_single_ones(residual):
    model, batch = model_of(residual), left_padded(PROMPTS)
    logits = model(**batch).logits
    for row, prompt in enumerate(PROMPTS):
        assert_close(logits[row, -len(prompt) :], model(torch.tensor([prompt])).logits[0])
    right = {
        name: tensor.flip(1) for name, tensor in left_padded([prompt[::-1] for prompt in PROMPTS]).items()
    }
    logits = model(**right).logits
    for row, prompt in enumerate(PROMPTS):
        assert_close(logits[row, : len(prompt)], model(torch.tensor([prompt])).logits[0])


def test_real_tokens_are_counted_unless_positions_are_given():
    model, batch, tap = model_of(), left_padded([[7, 8, 9], [13]]), Watching()
    first = model(**batch, tap=tap)
    mask = F.pad(batch["attention_mask"], (0, 1), value=1)
    model(torch.tensor([[1], [2]]), attention_mask=mask, cache=first.cache, tap=tap)
    model(**batch, position_ids=torch.tensor([[4, 5, 6]]), tap=tap)
    model(batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"]), tap=tap)
    padded, decoded, given, full = tap.passes
    assert padded.positions.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert padded.mask.tolist() == [[True, True, True], [False, False, True]]
    assert decoded.positions.tolist() == [[3], [1]]
    assert given.positions.tolist() == [[4, 5, 6], [4, 5, 6]]
    assert full.mask is None  # so that plain causal attention runs


def test_positions_can_be_given_for_all_sequences_at_once():
    model, tokens = model_of(), some_tokens()
    logits = model(tokens, position_ids=torch.arange(9)[None]).logits
    assert torch.equal(logits, model(tokens).logits)


def test_packed_texts_do_not_see_each_other():
    model, first, second = model_of(), some_tokens(1, 4), some_tokens(1, 5)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    logits = model(torch.cat([first, second], 1), position_ids=positions).logits
    assert_close(logits[:, :4], model(first).logits)
    assert_close(logits[:, 4:], model(second).logits)


@some_rules
def test_what_is_cached_goes_on_as_one_text(residual):
    model, tokens = model_of(residual), some_tokens()
    first = model(tokens[:, :5], use_cache=True)
    rest = model(tokens[:, 5:], cache=first.cache)
    assert rest.cache is first.cache
    assert rest.cache.get_seq_length() == 9
    assert_close(torch.cat([first.logits, rest.logits], 1), model(tokens).logits)
    own = DynamicCache()
    given = model(
        tokens[:, 5:], cache=model(tokens[:, :5], cache=own).cache, position_ids=torch.arange(5, 9)[None]
    )
    assert_close(given.logits, rest.logits)
    jumped = model(
        tokens[:, 5:], cache=model(tokens[:, :5]).cache, position_ids=torch.tensor([[5, 6, 8, 9]])
    ).logits
    assert_close(jumped[:, :2], rest.logits[:, :2])  # no new text begins behind cached tokens
    assert distance(jumped[:, 2:], rest.logits[:, 2:]) > 1e-4


def test_a_cache_comes_unless_in_training_or_refused():
    model, tokens = model_of(), some_tokens()
    assert isinstance(model(tokens).cache, DynamicCache)
    assert model(tokens, use_cache=False).cache is None
    assert model.train()(tokens).cache is None
    assert model.train()(tokens, use_cache=True).cache is not None
    model.config.use_cache = False
    assert model.eval()(tokens).cache is None


def test_caches_of_fixed_size_are_refused():
    model, tokens = model_of(), some_tokens()
    with pytest.raises(ConfigError, match=r"StaticCache(.|\n)*DynamicCache"):
        model(tokens, cache=StaticCache(config=model.config, max_cache_len=20))
    with pytest.raises(ConfigError, match="StaticCache"):
        model.generate(tokens, cache_implementation="static", **GREEDY)


@pytest.mark.parametrize(
    "mask", [torch.zeros(2, 9), torch.ones(2, 1, 9, 9).bool()], ids=["added to scores", "pairs"]
)
def test_masks_of_another_kind_are_refused(mask):
    with pytest.raises(ShapeError, match=r"integers or booleans of shape \[2, 9\]"):
        model_of()(some_tokens(), attention_mask=mask)


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ShapeError, match=r"\[2, 9\]"):
        model_of()(some_tokens(), attention_mask=torch.ones(2, 3, dtype=torch.long))


def test_what_the_decoder_does_not_do_is_refused():
    model, tokens = model_of(), some_tokens()
    with pytest.raises(ConfigError, match=r"output_attentions=True(.|\n)*tap"):
        model(tokens, output_attentions=True)
    with pytest.raises(ConfigError, match="got: inputs_embeds"):
        model(inputs_embeds=model.decoder.embedding(tokens))
    with pytest.raises(ConfigError, match="got: no input_ids"):
        model()
    with pytest.raises(TypeError, match="token_type_ids"):
        model(tokens, token_type_ids=tokens)
    with pytest.raises(ValueError, match="Flash"):
        model.set_attn_implementation("flash_attention_2")


# Generation


@some_rules
def test_greedy_generation_is_the_engines(residual):
    model = model_of(residual)
    found = model.generate(**left_padded(PROMPTS), **GREEDY)[:, max(map(len, PROMPTS)) :].tolist()
    engine = Engine(model.decoder).generate(PROMPTS, max_new_tokens=8, sampling=Sampling(temperature=0.0))
    assert found == [completion.tokens for completion in engine]
    assert len({token for row in found for token in row}) > 4


@some_rules
def test_generation_is_the_same_alone_in_a_batch_without_cache_and_in_chunks(residual):
    model = model_of(residual)
    together = model.generate(**left_padded(PROMPTS), **GREEDY)[:, 6:]
    assert torch.equal(model.generate(**left_padded(PROMPTS), use_cache=False, **GREEDY)[:, 6:], together)
    assert torch.equal(
        model.generate(**left_padded(PROMPTS), prefill_chunk_size=4, **GREEDY)[:, 6:], together
    )
    for row, prompt in enumerate(PROMPTS):
        alone = model.generate(torch.tensor([prompt]), **GREEDY)[0, len(prompt) :]
        assert torch.equal(alone, together[row])


@some_rules
def test_beam_search_is_the_same_without_a_cache_and_its_scores_are_log_probabilities(residual):
    model, tokens = model_of(residual), some_tokens(2, 5)
    options = {
        "num_beams": 3,
        "num_return_sequences": 3,
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "length_penalty": 0.0,
    }
    found = model.generate(tokens, **options)
    again = model.generate(tokens, use_cache=False, **options)
    assert torch.equal(found.sequences, again.sequences)
    with torch.no_grad():
        log_probabilities = model.decoder(found.sequences)[:, 4:-1].log_softmax(-1)
    scores = log_probabilities.gather(-1, found.sequences[:, 5:, None]).sum((1, 2))
    assert_close(found.sequences_scores, scores)
    greedy = model.generate(tokens, do_sample=False, max_new_tokens=6)
    assert not torch.equal(found.sequences[::3], greedy)  # or beams are not tested


def test_sampling_follows_the_seed_and_from_one_token_is_greedy():
    model, tokens = model_of(), some_tokens(3, 4)
    one = model.generate(tokens, do_sample=True, top_k=1, max_new_tokens=8)
    assert torch.equal(one, model.generate(tokens, **GREEDY))
    torch.manual_seed(3)
    first = model.generate(tokens, do_sample=True, temperature=2.0, max_new_tokens=8)
    torch.manual_seed(3)
    assert torch.equal(model.generate(tokens, do_sample=True, temperature=2.0, max_new_tokens=8), first)
    assert not torch.equal(first, one)


@pytest.mark.filterwarnings("ignore:Passing `generation_config`")
def test_assisted_generation_is_greedy():
    model, tokens = model_of(), torch.tensor([PROMPTS[0]])
    other = AttnResForCausalLM.from_decoder(Decoder(replace(SHAPE, num_layers=2)).eval(), pad_token_id=0)
    greedy = model.generate(tokens, **GREEDY)
    for assistant in (other, model):  # one that is nearly always wrong, one that is always right
        found = model.generate(tokens, assistant_model=assistant, **GREEDY)
        assert torch.equal(found, greedy)
    assert torch.equal(model.generate(tokens, prompt_lookup_num_tokens=2, **GREEDY), greedy)


def test_generation_stops_at_the_end_of_a_text():
    model, tokens = model_of(), torch.tensor([PROMPTS[0]])
    greedy = model.generate(tokens, **GREEDY)[0].tolist()
    stopping = AttnResForCausalLM.from_decoder(model.decoder, eos_token_id=greedy[9], pad_token_id=0)
    found = stopping.generate(tokens, **GREEDY)[0].tolist()
    assert found == greedy[: greedy.index(greedy[9], 6) + 1]


def test_a_tap_follows_generation():
    model, tokens = model_of(), torch.tensor([PROMPTS[0]])
    tap = Watching()
    found = model.generate(tokens, tap=tap, return_dict_in_generate=True, output_hidden_states=True, **GREEDY)
    assert len(tap.passes) == 8
    assert torch.equal(found.sequences, model.generate(tokens, **GREEDY))
    assert [len(states) for states in found.hidden_states] == [SHAPE.num_layers + 1] * 8


# Checkpointed activations


@some_rules
def test_gradients_are_the_same_when_activations_are_computed_again(residual):
    model, tokens = model_of(residual, dtype=torch.float64).train(), some_tokens()
    runs = []
    model.decoder.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    gradients = []
    for enable in (False, True):
        if enable:
            model.activation_checkpointing_enable()
        assert model.is_activation_checkpointing == model.decoder.checkpoint_activations == enable
        model.zero_grad()
        model(tokens).logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(runs) == 1 + 2
    for plain, again in zip(*gradients, strict=True):
        assert_close(again, plain)
    model.activation_checkpointing_disable()
    assert not model.decoder.checkpoint_activations


def test_the_old_name_of_checkpointing_works_while_transformers_has_it():
    model = model_of()
    with pytest.warns(FutureWarning, match="gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.decoder.checkpoint_activations


@pytest.mark.parametrize(
    "options",
    [
        {"every_n_layers": 2},
        {"offload": True},
        {"activation_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=str,
)
def test_other_kinds_of_checkpointing_are_refused(options):
    model = model_of()
    with pytest.raises(ConfigError, match="non-reentrant"):
        model.activation_checkpointing_enable(**options)
    assert not model.decoder.checkpoint_activations
