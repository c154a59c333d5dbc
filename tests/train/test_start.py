"""A run that begins with the weights of a saved model, its own kind or a converted one."""

import pytest
import torch
from models.hf.small_models import PRE_NORM, made
from run_checks import Killed, stop_after
from safetensors.torch import load_file
from tiny_run import NUM_STEPS, SAVING, model_config, train_config

from attention_residuals.configs import decode
from attention_residuals.errors import CheckpointError, ConfigError
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import Decoder, load_model, save_model
from attention_residuals.models.hf import ConvertedModel, convert
from attention_residuals.train import (
    TRAIN_CONFIGS,
    AdamW,
    Saving,
    evaluate,
    load_checkpoint_model,
    load_run,
    train,
)
from attention_residuals.train.optimizer import kind_of


def saved(model, folder):
    save_model(model, folder)
    return folder


@pytest.fixture
def start(tmp_path):
    torch.manual_seed(4)
    return saved(Decoder(model_config()), tmp_path / "start")


@pytest.fixture
def converted(tmp_path):
    shape = PRE_NORM["llama"]
    shape = type(shape)(**{**shape.to_dict(), "vocab_size": 300, "tie_word_embeddings": True})
    return saved(ConvertedModel(convert(made(shape), AttnRes(sublayers_per_block=3))), tmp_path / "converted")


def run(corpus, folder, start, saving=SAVING, monitor=None, **changes):
    config = train_config(**changes)
    return train(config, corpus, folder, saving=saving, progress=False, start=start, monitor=monitor)


def tensors_of(folder):
    return load_file(next(folder.rglob("model.safetensors")))


def test_the_first_step_sees_the_given_weights(corpus, start, tmp_path):
    run(corpus, tmp_path / "given", start)
    run(corpus, tmp_path / "drawn", None)
    losses = [load_run(tmp_path / name).metrics[0]["loss"] for name in ("given", "drawn")]
    assert losses[0] != losses[1]
    still = AdamW(learning_rate=1e-30, weight_decay=0.0)
    run(corpus, tmp_path / "still", start, saving=Saving(every=100, keep=1), optimizer=still)
    trained, begun = tensors_of(tmp_path / "still"), tensors_of(start)
    assert all(torch.allclose(trained[name], begun[name], rtol=0, atol=1e-20) for name in begun)


def test_a_converted_model_trains_and_is_read_back(corpus, converted, tmp_path):
    model = load_model(converted)
    result = run(corpus, tmp_path / "run", converted, model=model.config, cross_documents=True)
    assert result.step == NUM_STEPS
    trained = load_checkpoint_model(tmp_path / "run")
    found = evaluate(
        trained,
        corpus.valid,
        bytes_per_token=corpus.tokenizer.bytes_per_token,
        sequence_length=24,
        batch_size=2,
        max_batches=2,
        cross_documents=True,
    )
    assert found.loss == pytest.approx(result.loss, rel=1e-5)
    assert trained.transformers.lm_head.weight is trained.transformers.model.embed_tokens.weight


@pytest.mark.parametrize("which", ["start", "converted"])
def test_only_the_rule_trains_where_that_is_asked(corpus, which, tmp_path, request):
    begin = request.getfixturevalue(which)
    optimizer = AdamW(learning_rate=1e-2, trains="residual")
    changes = {"model": load_model(begin).config, "optimizer": optimizer, "cross_documents": True}
    run(corpus, tmp_path / "run", begin, saving=Saving(every=100, keep=1), **changes)
    before, after = tensors_of(begin), tensors_of(tmp_path / "run")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith(("residual.readers.", "attention_residuals.readers.")) for name in changed)


def test_a_stopped_run_goes_on_to_the_same_bits(corpus, start, tmp_path):
    run(corpus, tmp_path / "whole", start)
    with pytest.raises(Killed):
        run(corpus, tmp_path / "run", start, monitor=stop_after(3))
    run(corpus, tmp_path / "run", start)
    whole, other = (load_checkpoint_model(tmp_path / name).state_dict() for name in ("whole", "run"))
    assert all(torch.equal(whole[name], other[name]) for name in whole)


def test_a_run_does_not_go_on_from_other_weights(corpus, start, tmp_path):
    run(corpus, tmp_path / "run", start)
    other = saved(Decoder(model_config()), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"another run: start\.sha256"):
        run(corpus, tmp_path / "run", other)
    with pytest.raises(CheckpointError, match="another run: start"):
        run(corpus, tmp_path / "run", None)


def test_weights_of_another_shape_are_refused(corpus, start, tmp_path):
    with pytest.raises(CheckpointError, match="do not fit the model"):
        run(corpus, tmp_path / "run", start, model=model_config(width=16))
    with pytest.raises(CheckpointError, match="no file"):
        run(corpus, tmp_path / "run", tmp_path / "none")
    with pytest.raises(ConfigError, match="trains='some'"):
        decode({"type": "AdamW", "trains": "some"}, TRAIN_CONFIGS)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("transformers.model.embed_tokens.weight", (4, 2), "table"),
        ("transformers.lm_head.weight", (4, 2), "table"),
        ("transformers.transformer.wpe.weight", (4, 2), "table"),
        ("transformers.model.layers.0.mlp.up_proj.weight", (4, 2), "matrix"),
        ("transformers.model.layers.0.input_layernorm.weight", (4,), "vector"),
        ("residual.readers.L0_mlp.projection.weight", (4, 4), "vector"),
    ],
)
def test_parameters_of_converted_models_are_told_apart(name, shape, kind):
    assert kind_of(name, torch.zeros(shape)) == kind
