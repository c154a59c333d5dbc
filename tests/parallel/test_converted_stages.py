"""Models of Transformers are cut into stages, which are parts of the same forward pass."""

import copy
import gc
import re
import weakref

import jaxtyping
import pytest
import torch
from models.hf.small_models import PRE_NORM, TOKENS, made, trained
from parallel import kimi_cases

from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import build, presets
from attention_residuals.models.costs import costs
from attention_residuals.models.hf.conversion import convert
from attention_residuals.models.hf.converted_model import ConvertedModel
from attention_residuals.models.language_model import LanguageModel
from attention_residuals.parallel.activations import activation_bytes, activation_formula
from attention_residuals.parallel.config import Parallel
from attention_residuals.parallel.estimate import estimate, operations
from attention_residuals.parallel.pipeline import mean_loss
from attention_residuals.parallel.stages import cut

KIMI = ["kimi-linear-tiny", "kimi-linear-436m", "kimi-linear-48b"]
CUT = [name for name in PRE_NORM if name not in ("gpt2", "bloom")]


def converted(name, rule=None):
    return ConvertedModel(
        trained(convert(made(PRE_NORM[name]), rule or AttnRes(sublayers_per_block=3))),
    )


def flow(stages, tokens, **given):
    state = (tokens,)
    for stage in stages[:-1]:
        state = stage(*state, **given)
    return stages[-1](*state, **given)


@pytest.mark.parametrize("name", CUT)
def test_stages_in_a_row_are_the_model_and_have_its_parameters(name):
    model = converted(name)
    stages = cut(model, (1, 2, 1))
    found, expected = flow(stages, TOKENS), model(TOKENS)
    assert torch.equal(found, expected)
    named = {name: p for stage in stages for name, p in stage.named_parameters()}
    assert named == dict(model.named_parameters())
    names = [name for stage in stages for name in stage.state_dict()]
    assert set(names) == set(model.state_dict())
    twice = {name for name in names if names.count(name) > 1}
    tied = model.transformers.config.tie_word_embeddings
    assert len(twice) == tied
    assert [stage.table() is not None for stage in stages] == [True, False, tied]


@pytest.mark.parametrize("rule", kimi_cases.RULES)
@pytest.mark.parametrize("layers", [(4,), (1, 3), (1, 1, 2)])
def test_kimi_linear_is_cut_and_every_stage_is_told_of_documents(rule, layers):
    model = kimi_cases.model_of(4, rule)
    tokens, _, mask = kimi_cases.batch_of(3)
    stages = cut(model, layers)
    assert torch.equal(flow(stages, tokens, mask=mask), model(tokens, mask=mask))
    assert not torch.equal(flow(stages, tokens), model(tokens, mask=mask))
    padding = torch.arange(12) >= torch.tensor([0, 2, 3])[:, None]
    assert torch.equal(flow(stages, tokens, mask=padding), model(tokens, mask=padding))
    assert sum(len(list(stage.parameters())) for stage in stages) == len(list(model.parameters()))


def test_a_model_with_the_standard_residual_hands_on_its_stream():
    model = converted("llama", StandardResidual())
    first, last = cut(model, (3, 1))
    assert len(first(TOKENS)) == 1
    assert torch.equal(flow((first, last), TOKENS), model(TOKENS))


def test_cutting_leaves_the_model_as_it_was():
    model = converted("kimi-linear")
    before, expected = copy.deepcopy(model.state_dict()), model(TOKENS)
    modules = list(model.modules())
    stages = cut(model, (1, 1, 2))
    flow(stages, TOKENS)
    assert all(ours is theirs for ours, theirs in zip(model.modules(), modules, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(TOKENS), expected)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_stage_holds_no_layer_of_another(place):
    model = kimi_cases.model_of(3)
    layers = [weakref.ref(layer) for layer in model.transformers.model.layers]
    stage = cut(model, (1, 1, 1))[place]
    del model
    gc.collect()
    # The first stage has a copy of its layer, which shares all that is in it.
    assert [layer() is not None for layer in layers] == [number == place > 0 for number in range(3)]
    assert len(stage.state_dict()) > 10


@pytest.mark.parametrize(("name", "beside"), [("gpt2", "wpe"), ("bloom", "word_embeddings_layernorm")])
def test_a_model_with_parameters_beside_its_layers_is_refused(name, beside):
    with pytest.raises(ConfigError, match=beside):
        cut(converted(name), (2, 2))


def test_what_convert_returns_has_to_be_wrapped(monkeypatch):
    bare = converted("llama").transformers
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users have no checked hints
    with pytest.raises(ConfigError, match=r"ConvertedModel\(convert\(model, ...\)\)"):
        cut(bare, (2, 2))


def test_a_model_of_another_kind_is_refused():
    class Other(LanguageModel):
        def __init__(self):
            super().__init__()
            self.config = presets.scaled(4, vocab_size=300)

        def forward(self, tokens, **kwargs):
            return tokens

        def unembed(self, state):
            return state

    with pytest.raises(ConfigError, match="stages of a Other"):
        cut(Other(), (2, 2))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_experts_are_counted_once_for_each_token_and_not_without_gradients(checkpointed):
    model = kimi_cases.model_of(3, checkpoint_activations=checkpointed)
    tokens, targets, _ = kimi_cases.batch_of(2)
    stages = cut(model, (1, 2))
    with torch.no_grad():
        flow(stages, tokens)
    routers = [layer.mlp.gate for layer in list(model.transformers.model.layers)[1:]]
    assert all(router.counts is None for router in routers)
    for passes in (1, 2):
        mean_loss(flow(stages, tokens), targets).backward()  # which computes checkpointed layers again
        assert [int(router.counts.sum()) for router in routers] == [passes * 2 * tokens.numel()] * 2


def test_a_run_of_such_a_model_takes_a_pipeline_and_nothing_else():
    config = kimi_cases.run_config()
    Parallel(pipeline=2, microbatches=2).check(config)
    for other in ({"shard": 2}, {"replicate": 2}, {"tensor": 2}, {"pipeline": 2, "shard": 2}):
        with pytest.raises(ConfigError, match="use pipeline alone"):
            Parallel(**other, microbatches=2).check(config)
    with pytest.raises(ConfigError, match="4 layers for 8 stages"):
        Parallel(pipeline=8, microbatches=8).check(config)


@pytest.mark.parametrize("name", KIMI)
@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(2, 2), (4, 1)])
def test_parameters_of_all_ranks_are_those_that_are_counted(name, num_ranks, stages_per_rank):
    config = presets.kimi_linear(name)
    found = estimate(
        config,
        num_ranks=num_ranks,
        stages_per_rank=stages_per_rank,
        num_microbatches=8,
        num_tokens=64,
        schedule="1F1B" if stages_per_rank == 1 else "Interleaved1F1B",
    )
    assert sum(rank.num_parameters for rank in found.ranks) == costs(config).total
    assert sum(sum(rank.layers) for rank in found.ranks) == config.num_layers
    assert operations(config).model == costs(config).operations
    assert operations(config).vectors == round(
        costs(config).vectors, 1
    )  # which runs the rule and counts bytes


def test_kept_activations_are_about_what_the_formula_says():
    config = presets.kimi_linear("kimi-linear-tiny", vocab_size=300)
    model = build(config)
    tokens = torch.randint(300, (2, 64))
    for number, stage in enumerate(cut(model, (1,) * 8)[:7]):
        state = flow(cut(model, (*(1,) * number, 8 - number))[:-1], tokens) if number else (tokens,)
        state = tuple(one.detach().requires_grad_() for one in state) if number else state
        kept = {}
        own = {p.data_ptr() for p in model.parameters()} | {one.data_ptr() for one in state}

        def note(tensor, kept=kept, own=own):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            stage(*state)
        predicted = tokens.numel() * activation_bytes(config, [number], itemsize=4)
        assert 0.85 <= sum(storage.nbytes() for storage in kept.values()) / predicted <= 1.25, number


def test_the_formula_in_words_is_the_one_that_is_counted():
    config = presets.kimi_linear("kimi-linear-48b")
    lines = " ".join(activation_formula(config))
    numbers = {name: int(value) for name, value in re.findall(r"\b([A-Z]) (\d+)(?=[, ;]|$)", lines)}

    def worth(term):
        return eval(re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", term), numbers)

    terms = (r"KDA: (.+?), and in float32 (.+?), C ", r"MLA: (.+?), Q ", r"MLP: (.+?), F ", r"MoE: (.+?), E ")
    found = [worth(term) for pattern in terms for term in re.search(pattern, lines).groups()]
    kda, in_float32, mla, mlp, moe = found
    ends = worth("4 D")
    for layer, kept in {0: kda + mlp, 1: kda + moe, 3: mla + moe}.items():
        expected = 2 * (ends + kept) + 4 * (in_float32 if layer < 3 else 0)
        assert activation_bytes(config, [layer], itemsize=2) == expected


def test_a_model_whose_activations_nobody_has_counted_is_refused():
    config = converted("llama").config
    with pytest.raises(ConfigError, match="'llama'"):
        activation_bytes(config, [0], itemsize=2)
