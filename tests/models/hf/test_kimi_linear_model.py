"""Kimi Linear around a residual rule: what must hold of it in training, in caches and with several documents."""

import pytest
import torch
import transformers
from closeness import assert_close, distance
from models.hf.kimi_linear_models import TOKENS, made, run, small
from torch.nn import functional as F

from attention_residuals.errors import ConfigError, ShapeError
from attention_residuals.inference import Engine, KVCache, Sampling, prefill
from attention_residuals.layers.residual import AttnRes, SlidingWindow, StandardResidual, TwoPhaseRule
from attention_residuals.models import build, load_model, save_model
from attention_residuals.models.hf import convert
from attention_residuals.models.hf.kimi_linear import BalancedRouter, ChunkedDeltaAttention


def loss_of(model, tokens=TOKENS, **options):
    logits = model(tokens, **options)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_with_queries_of_zero_it_is_the_standard_kimi_linear_of_transformers(size):
    model = made(AttnRes(sublayers_per_block=size), trained=False)
    fields = {name: value for name, value in model.config.original.items() if name != "model_type"}
    standard = transformers.KimiLinearForCausalLM(transformers.KimiLinearConfig(**fields)).eval()
    own = {name: t for name, t in model.state_dict().items() if not name.startswith("attention_residuals.")}
    standard.load_state_dict(own)
    expected = standard(input_ids=TOKENS, use_cache=False).logits
    assert_close(run(model), expected.detach())
    F.cross_entropy(expected[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    loss_of(model).backward()
    for name, parameter in standard.named_parameters():
        found = model.transformers.get_parameter(name).grad
        assert distance(found, parameter.grad) < 1e-4, name


def test_the_standard_residual_has_the_eps_of_kimi_linear():
    assert set(small(StandardResidual()).eps) == {1e-5}
    assert small(AttnRes(sublayers_per_block=4)).eps[-1] == pytest.approx(1e-5 / 5**2)


@pytest.mark.parametrize("chunk", [1, 2, 7, 32])
def test_cached_is_the_full_forward(chunk):
    model, cache = made(), KVCache()
    expected = run(model)
    found = [run(model, piece, cache=cache) for piece in TOKENS.split(chunk, 1)]
    assert_close(torch.cat(found, 1), expected)


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_padded_prompts_in_a_batch_are_those_prompts_alone(chunk):
    model = made()
    mask = torch.ones_like(TOKENS, dtype=torch.bool)
    mask[1, :9] = False
    alone = run(model, TOKENS[1:, 9:])
    assert_close(run(model, mask=mask)[1:, 9:], alone)
    filled = prefill(model, TOKENS, mask=mask, chunk=chunk)
    assert_close(filled.logits[1:], alone[:, -1])
    assert_close(filled.logits[:1], run(model, TOKENS[:1])[:, -1])
    newest = torch.tensor([[5], [6]])
    after = run(model, newest, cache=filled.cache, mask=filled.cache.mask(1))
    assert_close(after[1:, 0], run(model, torch.cat([TOKENS[1:, 9:], newest[1:]], 1))[:, -1])


def test_the_engine_generates_what_transformers_generates_while_sequences_come_and_go():
    model = made()
    prompts = [TOKENS[0, :20].tolist(), TOKENS[1, :7].tolist(), TOKENS[1, :30].tolist()]
    found = Engine(model, chunk=8).generate(
        prompts, max_new_tokens=6, sampling=Sampling(temperature=0.0), batch_size=2
    )
    for prompt, completion in zip(prompts, found, strict=True):
        ids = model.transformers.generate(
            torch.tensor([prompt]), max_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert completion.tokens == ids[0, len(prompt) :].tolist()


def test_sequences_leave_and_join_a_cache_with_their_memories():
    model = made()
    cache = prefill(model, TOKENS[:, :12]).cache
    cache.keep([1])
    cache.join(prefill(model, TOKENS[:1, :7]).cache)
    newest, texts = TOKENS[:, 20:21], (TOKENS[1:, :12], TOKENS[:1, :7])
    logits = run(model, newest, cache=cache, mask=cache.mask(1))
    for row, text in enumerate(texts):
        assert_close(logits[row, 0], run(model, torch.cat([text, newest[row : row + 1]], 1))[0, -1])
    cache.keep([])  # of no sequences, and one that joins is padded to the length of those that left
    cache.join(prefill(model, TOKENS[:1, :7]).cache)
    found = run(model, TOKENS[:1, 7:8], cache=cache, mask=cache.mask(1))
    assert_close(found[:, 0], run(model, TOKENS[:1, :8])[:, -1])


def test_a_prompt_that_fails_leaves_the_cache_as_it_was():
    model = made()
    cache = prefill(model, TOKENS[:, :12]).cache
    calls = []

    def failing():
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prefill(model, TOKENS[:, 12:30], chunk=5, cache=cache, tap=failing)
    assert cache.num_tokens == 12
    assert_close(prefill(model, TOKENS[:, 12:], cache=cache).logits, run(model)[:, -1])


def test_two_phases_give_what_one_gives():
    model = made(AttnRes(sublayers_per_block=3))
    assert_close(run(model, residual=TwoPhaseRule(model.residual)), run(model))


def test_documents_are_kept_apart_in_either_attention():
    model = made()
    documents = torch.zeros_like(TOKENS)
    documents[0, 5:] = 1
    documents[0, 6:] = 2
    documents[1, 33:] = 1
    together = run(model, mask=documents[:, :, None] == documents[:, None, :])
    for row, start, end in ((0, 0, 5), (0, 5, 6), (0, 6, 41), (1, 0, 33), (1, 33, 41)):
        assert_close(together[row : row + 1, start:end], run(model, TOKENS[row : row + 1, start:end]))
    loss_of(model, mask=documents[:, :, None] == documents[:, None, :]).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_masks_that_linear_attention_cannot_honour_are_refused():
    model, pairs = made(), torch.ones(2, 41, 41, dtype=torch.bool)
    pairs[0, 7, 3] = False
    with pytest.raises(ConfigError, match="pairs of tokens of the same document"):
        run(model, mask=pairs)
    cache = prefill(model, TOKENS[:, :12]).cache
    with pytest.raises(ConfigError, match="without a cache"):
        run(model, TOKENS[:, 12:], cache=cache, mask=pairs[:, 12:])
    with pytest.raises(ShapeError, match="the same sequences"):
        run(model, TOKENS[:1, 12:], cache=cache)
    with pytest.raises(ConfigError, match="require a gradient"):
        model(TOKENS, cache=KVCache())


def test_gradients_reach_every_parameter_once_queries_have_learned():
    model = made()
    loss_of(model).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name
    still = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert {name.split(".")[-1] for name in still} == {"pseudo_query", "key_gain"}
    assert all("L0_attention" in name for name in still)


def test_checkpointed_activations_change_no_gradient():
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = build(small(), checkpoint_activations=checkpointed)
        loss_of(model).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_a_saved_model_comes_back_with_the_same_bits(tmp_path):
    model = made()
    for module in model.modules():
        if isinstance(module, BalancedRouter):
            module.e_score_correction_bias.normal_()
    save_model(model, tmp_path)
    again = load_model(tmp_path)
    kept, found = model.state_dict(), again.state_dict()
    assert kept.keys() == found.keys()
    assert all(torch.equal(found[name], kept[name]) for name in kept)
    assert_close(run(again), run(model))  # a file's tensors are not aligned, for which some kernels differ
    other = build(model.config)
    other.load_state_dict(found)
    assert torch.equal(run(other), run(model))
    assert sum(isinstance(module, ChunkedDeltaAttention) for module in again.modules()) == 6


def test_a_step_makes_experts_that_were_chosen_too_rarely_more_likely():
    model = made()
    router = next(module for module in model.modules() if isinstance(module, BalancedRouter))
    run(model)  # a pass without gradients is no training
    model.settle()
    assert not router.e_score_correction_bias.any()
    router.e_score_correction_bias[3] = -9.0  # never chosen
    for _ in range(2):  # two micro-batches
        loss_of(model).backward()
    counts = router.counts
    assert counts.sum() == 2 * TOKENS.numel() * 2
    assert counts[3] == 0
    model.settle()
    moved = router.e_score_correction_bias.clone()
    moved[3] += 9.0
    assert torch.equal(moved.sign(), (counts.float().mean() - counts).sign())
    assert moved.abs().max().item() == pytest.approx(1e-3, rel=1e-3)
    before = router.e_score_correction_bias.clone()
    model.settle()  # nothing since
    assert torch.equal(router.e_score_correction_bias, before)


def test_frozen_routers_are_not_balanced():
    model = made()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in model.residual.parameters():
        parameter.requires_grad_(True)
    loss_of(model).backward()
    model.settle()
    assert not any(m.e_score_correction_bias.any() for m in model.modules() if isinstance(m, BalancedRouter))


def test_a_conversion_runs_on_the_same_modules_and_a_refused_one_gives_them_back():
    config = transformers.KimiLinearConfig(**{k: v for k, v in small().original.items() if k != "model_type"})
    model = transformers.KimiLinearForCausalLM(config)
    with pytest.raises(ValueError, match="at most 1e-05"):
        convert(model, SlidingWindow(window=2))
    assert not any(isinstance(module, ChunkedDeltaAttention) for module in model.modules())
    convert(model, AttnRes(sublayers_per_block=4))
    assert sum(isinstance(module, ChunkedDeltaAttention) for module in model.modules()) == 6


IMPOSSIBLE = {
    "none of full_attention": {"layer_types": ["linear_attention"] * 8},
    "layer_types with 7 entries": {"layer_types": ["full_attention"] * 7},
    "layer_types with 8 entries: attention": {"layer_types": ["attention"] * 8},
    "4 layers of linear_attention": {  # what Transformers makes of nothing
        "num_hidden_layers": 4,
        "layer_types": None,
        "mlp_layer_types": None,
    },
    "mlp_layer_types with 1 entries": {"mlp_layer_types": ["dense"]},
    "8 experts in 3 groups": {"n_group": 3},
    "of which 3 are chosen": {"n_group": 2, "topk_group": 3},
    "9 experts for each token": {"num_experts_per_tok": 9},
    "from 1 of 8 groups of 1": {"n_group": 8, "num_experts_per_tok": 1},
    "0 experts in 1 groups": {"num_local_experts": 0},
}


def test_a_model_without_full_attention_is_not_converted():
    fields = {name: value for name, value in small().original.items() if name != "model_type"}
    config = transformers.KimiLinearConfig(**{**fields, "layer_types": ["linear_attention"] * 8})
    with pytest.raises(ConfigError, match="every fourth layer, and the last"):
        convert(transformers.KimiLinearForCausalLM(config), AttnRes(sublayers_per_block=4))


@pytest.mark.parametrize("message", IMPOSSIBLE)
def test_impossible_shapes_are_refused_with_what_to_do(message):
    with pytest.raises(ConfigError, match=message):
        build(small(**IMPOSSIBLE[message]))
