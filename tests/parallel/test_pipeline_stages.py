"""Stages of a decoder, and pipelines whose stages are all on one rank: no other processes."""

import copy
import itertools
import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close
from parallel.pipeline_cases import RULES, alone, batch_of, model_of
from torch.distributed.pipelining import PipelineStage

from attention_residuals.data.batches import UNSCORED
from attention_residuals.errors import BackendError, ConfigError, DataError, RankError, ShapeError
from attention_residuals.layers.residual import HyperConnections, SlidingWindow
from attention_residuals.models import Decoder, presets
from attention_residuals.parallel import exchange
from attention_residuals.parallel.activations import activation_bytes
from attention_residuals.parallel.pipeline import Pipeline, mean_loss
from attention_residuals.parallel.plan import Piece
from attention_residuals.parallel.ranks import fingerprint
from attention_residuals.parallel.schedules import SCHEDULES, most_held, orders
from attention_residuals.parallel.stages import DecoderStage, cut, layout_of
from attention_residuals.parallel.store import Store


@pytest.fixture
def one_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # PyTorch puts its own in front for each group
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def flow(stages, tokens, **kwargs):
    state = (tokens,)
    for stage in stages[:-1]:
        state = stage(*state, **kwargs)
    return stages[-1](*state, **kwargs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layers", [(5,), (1, 4), (2, 1, 2), (1, 1, 1, 1, 1)])
def test_stages_in_a_row_are_the_decoder_and_have_its_parameters(rule, layers):
    model = model_of(5, rule, tied=True)
    tokens, _ = batch_of(3)
    stages = cut(model, layers)
    assert torch.equal(flow(stages, tokens), model(tokens))
    mask = torch.arange(6) >= torch.tensor([0, 2, 3])[:, None]
    positions = torch.arange(6).expand(3, 6) + 4
    both = flow(stages, tokens, mask=mask, positions=positions)
    assert torch.equal(both, model(tokens, mask=mask, positions=positions))
    named = {name: p for stage in stages for name, p in stage.named_parameters()}
    assert named == dict(model.named_parameters())
    layout = layout_of(model, layers, num_ranks=1)
    state = (tokens,)
    for stage in range(len(layers) - 1):
        state = stages[stage](*state)
        assert len(state) == len(layout.state_after(layout.written_before(stage + 1)))


def test_only_the_ends_have_embedding_norm_and_head():
    first, middle, last = cut(model_of(3), (1, 1, 1))
    assert middle.embedding is middle.norm is middle.head is None
    assert first.head is None
    assert last.embedding is None
    assert sorted(middle.residual.readers) == ["L1_attention", "L1_mlp"]
    assert sorted(last.residual.readers) == ["L2_attention", "L2_mlp", "output"]
    assert sorted(cut(model_of(3, tied=True), (1, 2))[1].state_dict())[0] == "embedding.weight"


def test_cutting_leaves_the_model_as_it_was():
    model = model_of(3)
    before = copy.deepcopy(model.state_dict())
    cut(model, (1, 2))
    assert list(before) == list(model.state_dict())
    model(batch_of(1)[0])


def test_rules_that_keep_sources_alike_are_cut_and_others_refused():
    config = presets.scaled(4, vocab_size=24, residual=SlidingWindow(sublayers_per_block=2, window=2))
    model, (tokens, _) = Decoder(config), batch_of(2)
    assert torch.equal(flow(cut(model, (1, 3)), tokens), model(tokens))
    other = Decoder(presets.scaled(2, vocab_size=24, residual=HyperConnections()))
    with pytest.raises(ConfigError, match="rule that keeps sources as AttnRes does"):
        cut(other, (1, 1))


@pytest.mark.parametrize("layers", [(1, 2), (0, 4), (), (2, 2, 2)])
def test_layers_that_are_not_the_models_are_refused(layers):
    with pytest.raises(ConfigError, match="for a model of 4"):
        cut(model_of(4), layers)


@pytest.mark.parametrize("transport", ["cached", "paper", "naive"])
@pytest.mark.parametrize("name", [name for name in SCHEDULES if SCHEDULES[name].stages_per_rank != 1])
def test_stages_on_one_rank_make_the_gradients_of_the_whole(name, transport, one_rank):
    model, (tokens, targets) = model_of(4, "straddling", tied=True), batch_of(4)
    loss, logits, gradients = alone(model, tokens, targets)
    layers = (2, 2) if SCHEDULES[name].stages_per_rank else (1, 2, 1)
    pipeline = Pipeline(model, layers, schedule=name, num_microbatches=4, transport=transport)
    for step in (1, 2):
        assert pipeline.step(tokens, targets, share=0.5) == pytest.approx(loss, rel=1e-12)
        assert len(pipeline.store) == 0, step
    for parameter_name, parameter in pipeline.named_parameters():
        if gradients[parameter_name] is None:
            assert parameter.grad is None
        else:
            assert_close(parameter.grad, gradients[parameter_name])
    (order,) = orders(name, num_ranks=1, stages_per_rank=len(layers), num_microbatches=4)
    assert pipeline.store.most == most_held(pipeline.plan, order)
    assert (pipeline.store.most > 0) == (transport != "naive")
    assert not pipeline.bytes_sent.total()
    assert_close(pipeline.logits(tokens), logits)
    assert len(pipeline.store) == 0


def test_masks_and_positions_reach_every_stage(one_rank):
    model, (tokens, targets) = model_of(3), batch_of(4)
    kwargs = {
        "mask": torch.arange(6) >= torch.tensor([0, 2, 3, 1])[:, None],
        "positions": torch.arange(6).expand(4, 6) + torch.arange(4)[:, None],
    }
    loss, logits, gradients = alone(model, tokens, targets, **kwargs)
    pipeline = Pipeline(model, (1, 1, 1), schedule="LoopedBFS", num_microbatches=2)
    assert pipeline.step(tokens, targets, **kwargs) == pytest.approx(loss, rel=1e-12)
    assert_close(model.embedding.weight.grad, gradients["embedding.weight"])
    assert_close(pipeline.logits(tokens, **kwargs), logits)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_checkpointed_activations_give_the_same_gradients(name, one_rank):
    model, (tokens, targets) = model_of(3, checkpoint_activations=True), batch_of(4)
    _, _, gradients = alone(model, tokens, targets)
    Pipeline(model, (1, 1, 1), schedule=name, num_microbatches=2).step(tokens, targets)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert_close(parameter.grad, gradients[parameter_name])


def runs_of(model, schedule):
    """How often each layer ran forward in a step of two microbatches."""
    runs = Counter()
    for layer in model.layers:
        layer.attention.register_forward_pre_hook(lambda *_, number=layer.number: runs.update([number]))
    Pipeline(model, (1, 1, 1), schedule=schedule, num_microbatches=2).step(*batch_of(2))
    return runs


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_checkpointed_layer_runs_twice_and_any_other_once(checkpointed, one_rank):
    model = model_of(3, checkpoint_activations=checkpointed)
    assert runs_of(model, "Interleaved1F1B") == dict.fromkeys(range(3), 4 if checkpointed else 2)


def test_a_schedule_that_splits_backward_computes_checkpointed_layers_many_times(one_rank):
    # Each gradient that torch asks for by itself starts a backward of its own, which computes the layer again.
    assert runs_of(model_of(3), "InterleavedZeroBubble") == dict.fromkeys(range(3), 2)
    runs = runs_of(model_of(3, checkpoint_activations=True), "InterleavedZeroBubble")
    assert min(runs[1], runs[2]) > 4


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize("source_dtype", [None, "bfloat16"])
def test_autocast_computes_what_it_computes_in_one_process(name, source_dtype, one_rank):
    model, (tokens, targets) = model_of(3, dtype="float32", source_dtype=source_dtype), batch_of(4)
    loss, _, gradients = alone(model, tokens, targets, parts=2, autocast=True)
    pipeline = Pipeline(model, (1, 1, 1), schedule=name, num_microbatches=2, precision="bfloat16")
    assert pipeline.dtype == (torch.bfloat16 if source_dtype else torch.float32)
    assert pipeline.step(tokens, targets) == pytest.approx(loss, rel=1e-7)
    assert loss != pytest.approx(alone(model, tokens, targets)[0], rel=1e-7)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert_close(parameter.grad, gradients[parameter_name], 2e-2 if source_dtype else 1e-4)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_kernels_that_gather_gradients_of_a_source_do_so_in_stages(name, one_rank):
    """In float32 the CPU kernels run, and sources are views, which PyTorch could not detach."""
    model, (tokens, targets) = model_of(3, "full", dtype="float32"), batch_of(4)
    loss, _, gradients = alone(model, tokens, targets)
    pipeline = Pipeline(model, (1, 1, 1), schedule=name, num_microbatches=2)
    assert pipeline.step(tokens, targets) == pytest.approx(loss, rel=1e-6)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert_close(parameter.grad, gradients[parameter_name])


def test_another_shape_in_a_later_step_is_taken(one_rank):
    model = model_of(3)
    pipeline = Pipeline(model, (1, 1, 1), schedule="Interleaved1F1B", num_microbatches=2)
    for num_sequences, length in ((4, 6), (2, 6), (4, 3), (4, 6)):
        tokens, targets = batch_of(num_sequences, length)
        model.zero_grad()
        loss, _, gradients = alone(model, tokens, targets)
        assert pipeline.step(tokens, targets) == pytest.approx(loss, rel=1e-12)
        assert_close(model.embedding.weight.grad, gradients["embedding.weight"])


def test_gradients_of_unlike_batches_add_up(one_rank):
    model = model_of(3, tied=True)
    pipeline = Pipeline(model, (1, 2), schedule="LoopedBFS", num_microbatches=2)
    first, second = batch_of(2, 6), batch_of(4, 3, seed=2)
    expected = [alone(model, *batch)[2]["embedding.weight"] for batch in (first, second)]
    for batch, share in ((first, 0.25), (second, 0.75)):
        assert pipeline.step(*batch, share=share) == pytest.approx(alone(model, *batch)[0], rel=1e-12)
    assert_close(model.embedding.weight.grad, 0.25 * expected[0] + 0.75 * expected[1])


def test_a_failed_step_leaves_nothing_and_the_next_one_works(one_rank):
    model, (tokens, targets) = model_of(3), batch_of(4)
    calls = itertools.count()

    def loss(logits, expected):
        if next(calls) == 1:
            raise RuntimeError("out of luck")
        return mean_loss(logits, expected)

    pipeline = Pipeline(model, (1, 1, 1), schedule="Interleaved1F1B", num_microbatches=4, loss=loss)
    with pytest.raises(
        RankError, match="rank 0 failed in step 1 in the loss of a microbatch: RuntimeError: out of luck"
    ):
        pipeline.step(tokens, targets)
    assert len(pipeline.store) == 0
    model.zero_grad()
    expected, _, gradients = alone(model, tokens, targets)
    assert pipeline.step(tokens, targets) == pytest.approx(expected, rel=1e-12)
    assert_close(model.embedding.weight.grad, gradients["embedding.weight"])


def test_a_batch_that_cannot_be_run_is_refused_before_anything_is_sent(one_rank):
    pipeline = Pipeline(model_of(3), (1, 1, 1), schedule="LoopedBFS", num_microbatches=4)
    tokens, targets = batch_of(6)
    with pytest.raises(ShapeError, match=r"(?s)6 sequences for 4 microbatches.*batch of 8"):
        pipeline.step(tokens, targets)
    with pytest.raises(DataError, match="token ids"):
        pipeline.step(tokens[:4] + 100, targets[:4])
    with pytest.raises(ShapeError, match="at most 16"):
        pipeline.step(*batch_of(4, 17))
    unscored = targets[:4].clone()
    unscored[0, 0] = UNSCORED
    with pytest.raises(ShapeError, match="under mean_loss"):
        pipeline.step(tokens[:4], unscored)
    with pytest.raises(ShapeError, match=r"(?s)targets of shape \[4, 5\].*\[4, 6\]"):
        # Without the hints that tests check and users do not.
        getattr(Pipeline.step, "__wrapped__", Pipeline.step)(pipeline, tokens[:4], targets[:4, 1:])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if SCHEDULES[name].splits_backward])
def test_compiled_stages_are_refused_where_backward_is_split(name, one_rank):
    for compiled in ("the stage", "a part of it"):
        pipeline = Pipeline(model_of(2), (1, 1), schedule=name, num_microbatches=2)
        stage = pipeline.modules[1]
        (stage if compiled == "the stage" else stage.layers["1"].mlp).compile(backend="eager")
        with pytest.raises(ConfigError, match=f"(?s)compiled stage under {name}.*Interleaved1F1B"):
            pipeline.step(*batch_of(2))


@pytest.mark.parametrize("share", [float("nan"), 0.0, -1.0])
def test_a_share_that_is_none_is_refused(share, one_rank):
    pipeline = Pipeline(model_of(2), (1, 1), schedule="LoopedBFS")
    assert pipeline.num_microbatches == 2
    with pytest.raises(ConfigError, match=f"share={share}"):
        pipeline.step(*batch_of(2), share=share)


def test_a_schedule_for_other_stages_is_refused(one_rank):
    with pytest.raises(ConfigError, match="2 stages on each rank for GPipe"):
        Pipeline(model_of(2), (1, 1), schedule="GPipe", num_microbatches=2)


def test_a_store_keeps_each_piece_once_and_adds_up_its_gradients():
    store, piece, kept = Store(), Piece(0, 1), torch.ones(2, requires_grad=True) * 2
    store.keep(3, piece, kept)
    with pytest.raises(AssertionError, match="kept twice"):
        store.keep(3, piece, kept)
    leaf = store.leaf(3, piece, needs_gradient=True)
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert leaf.data_ptr() == kept.data_ptr()
    given = torch.ones(2)
    for gradient in (None, given, given, None):
        store.deposit(3, piece, gradient)
    assert store.collect(3, piece).tolist() == [2, 2]
    assert given.tolist() == [1, 1]  # it may be somebody else's
    assert (len(store), store.most) == (0, 1)


def test_a_fingerprint_is_of_bits_and_their_order():
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])
    assert fingerprint([one, other]) == fingerprint([torch.stack([one, other])])
    rough = one.bfloat16()
    assert len({fingerprint([one]), fingerprint([other]), fingerprint([rough]), fingerprint([-one])}) == 4
    assert fingerprint([torch.tensor(True), torch.zeros(2, 3).T]) == fingerprint(
        [torch.tensor(True), torch.zeros(6)]
    )


def test_a_torch_that_was_not_tested_is_refused(monkeypatch):
    with pytest.raises(BackendError, match=r"(?s)torch 2.14.1.*torch 2.13"):
        exchange.check_torch("2.14.1")
    monkeypatch.setattr(PipelineStage, "backward_one_chunk", lambda self, chunk: None)
    with pytest.raises(BackendError, match=r"backward_one_chunk\('self', 'chunk'\)"):
        exchange.check_torch()


@pytest.mark.parametrize("rule", ["standard", "block", "full"])
def test_kept_activations_are_about_what_the_formula_says(rule):
    model = model_of(4, rule, dtype="float32")
    (stage,) = cut(model, (4,))
    kept, own = {}, {p.data_ptr() for p in model.parameters()}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, _ = batch_of(8, 16)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logits = DecoderStage.forward(stage, tokens)
    predicted = tokens.numel() * activation_bytes(model.config, range(4), itemsize=4)
    assert 0.85 <= sum(kept.values()) / predicted <= 1.25
    assert logits.requires_grad
