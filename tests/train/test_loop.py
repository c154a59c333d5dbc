import itertools
import math

import numpy as np
import pytest
import torch
from tiny_run import NUM_STEPS, SAVING, model_config, train_config

from attention_residuals.data import Batches
from attention_residuals.errors import DataError
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import Decoder
from attention_residuals.train import AdamW, Cosine, Saving, evaluate, load_checkpoint_model, load_run
from attention_residuals.train.trainer import Trainer, deterministic, initial_model


@pytest.mark.parametrize("residual", [StandardResidual(), AttnRes(sublayers_per_block=2)])
def test_training_learns(go, tmp_path, residual):
    saving = Saving(every=60, evaluate_every=60, evaluate_batches=None, log_every=1)
    result = go(
        saving=saving,
        model=model_config(residual),
        optimizer=AdamW(learning_rate=1e-2),
        schedule=Cosine(warmup_steps=5),
        num_steps=60,
    )
    first = load_run(tmp_path / "run").metrics[0]
    assert first["loss"] > 4.0
    assert result.loss < 2.5
    assert result.bits_per_byte < 1.3


def test_bits_per_byte_of_a_step_are_those_of_its_own_targets(corpus, uninterrupted):
    config = train_config()
    batches = Batches(corpus.train, sequence_length=24, batch_size=4, seed=config.seed)
    for row in (row for row in load_run(uninterrupted).metrics if row["split"] == "train"):
        targets = batches.at(row["step"] - 1).targets_BT.numpy()
        num_bytes = corpus.tokenizer.bytes_per_token[targets].sum()
        assert row["bits_per_byte"] == pytest.approx(row["loss"] * 96 / math.log(2) / num_bytes)


def test_a_run_is_evaluated_as_it_is_trained(corpus, go, tmp_path):
    how = {"precision": "bfloat16", "cross_documents": True}
    result = go(**how)
    found = evaluate(
        load_checkpoint_model(tmp_path / "run"),
        corpus.valid,
        bytes_per_token=corpus.tokenizer.bytes_per_token,
        sequence_length=24,
        batch_size=2,
        max_batches=SAVING.evaluate_batches,
        **how,
    )
    assert (result.loss, result.bits_per_byte) == (found.loss, found.bits_per_byte)


def test_the_monitor_sees_every_step_and_the_model_that_it_left(go, tmp_path):
    seen = []
    go(monitor=lambda step, model: seen.append((step, model.embedding.weight.detach().clone())))
    assert [step for step, _ in seen] == list(range(1, NUM_STEPS + 1))
    assert all(not torch.equal(a, b) for (_, a), (_, b) in itertools.pairwise(seen))


@pytest.mark.parametrize(("clip_norm", "longest"), [(None, 1.0), (1e9, 1.0), (1e-3, 1e-3)])
def test_clipping_bounds_the_update_but_not_the_norm_that_is_told(corpus, tmp_path, clip_norm, longest):
    # With an eps this large, an update is about as long as the gradient times the learning rate.
    optimizer = AdamW(clip_norm=clip_norm, eps=1.0, weight_decay=0.0)
    trainer = Trainer(train_config(optimizer=optimizer), corpus, tmp_path, "cpu")
    before = [parameter.detach().clone() for parameter in trainer.optimizer.parameters]
    done = trainer.step(1)
    assert done.grad_norm > 1.0
    moved = [new - old for new, old in zip(trainer.optimizer.parameters, before, strict=True)]
    update = torch.nn.utils.get_total_norm(moved).item() / done.learning_rate
    assert 0.9 * longest < update < (2 if clip_norm != 1e-3 else 1.01 * longest)


def test_a_last_row_and_evaluation_are_written_even_for_the_shortest_run(go, tmp_path):
    go(num_steps=1, schedule=Cosine(), saving=Saving())
    assert [(row["split"], row["step"]) for row in load_run(tmp_path / "run").metrics] == [
        ("train", 1),
        ("valid", 1),
    ]


def test_the_model_that_a_run_begins_with_is_drawn_from_its_seed_and_from_nothing_else(corpus, tmp_path):
    config = train_config(checkpoint_activations=True)
    torch.manual_seed(config.seed)
    drawn = Decoder(config.model).state_dict()
    before = torch.get_rng_state()
    initial = initial_model(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert initial.checkpoint_activations
    trained = Trainer(config, corpus, tmp_path, "cpu").model.state_dict()
    assert drawn.keys() == trained.keys() == initial.state_dict().keys()
    for name, value in initial.state_dict().items():
        assert torch.equal(value, trained[name])
        assert torch.equal(value, drawn[name])
    other = initial_model(train_config(seed=config.seed + 1))
    assert not torch.equal(other.embedding.weight, initial.embedding.weight)


@pytest.mark.parametrize("within", [None, 0, 3])
def test_a_run_visits_the_corpus_in_the_order_that_its_config_asks_for(corpus, tmp_path, within):
    config = train_config(shuffled_within=within)
    batches = Trainer(config, corpus, tmp_path, "cpu").batches
    own = Batches(
        corpus.train,
        sequence_length=config.sequence_length,
        batch_size=config.batch_size,
        seed=config.seed,
        shuffled_within=within,
    )
    assert all(torch.equal(batches.at(step).tokens_BT, own.at(step).tokens_BT) for step in range(5))
    begins = torch.cat([batches.at(step).tokens_BT[:, 0] for step in range(2)])
    in_order = torch.from_numpy(corpus.train[:: config.sequence_length].astype(int))[: len(begins)]
    assert torch.equal(begins, in_order) == (within == 0)


def test_texts_in_an_order_to_learn_in_are_not_begun_again(corpus, tmp_path):
    tokens = train_config().sequence_length * train_config().batch_size
    most = (len(corpus.train) - 1) // tokens
    Trainer(train_config(shuffled_within=8, num_steps=most), corpus, tmp_path, "cpu")
    with pytest.raises(DataError, match=rf"one pass at most.*\n.*train for {most} steps"):
        Trainer(train_config(shuffled_within=8, num_steps=most + 1), corpus, tmp_path, "cpu")
    Trainer(train_config(num_steps=most + 1), corpus, tmp_path, "cpu")


def test_targets_that_stand_for_no_byte_have_no_bits_per_byte(corpus, tmp_path):
    trainer = Trainer(train_config(), corpus, tmp_path, "cpu")
    trainer.bytes_per_token = np.zeros_like(trainer.bytes_per_token)
    done = trainer.step(1)
    assert done.bits_per_byte is None
    assert done.loss > 5.0


@pytest.mark.parametrize("before", [(False, False), (True, True)])
def test_determinism_is_asked_for_and_given_back(before):
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        with deterministic("cpu"):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        with deterministic("cuda"):
            assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.are_deterministic_algorithms_enabled() == before[0]
        assert torch.is_deterministic_algorithms_warn_only_enabled() == before[1]
    finally:
        torch.use_deterministic_algorithms(False)
