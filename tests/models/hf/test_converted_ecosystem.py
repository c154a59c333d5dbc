"""What takes a Transformers model takes a converted one: PEFT, Trainer, beam search, assisted decoding."""

import peft
import pytest
import torch
from closeness import assert_close
from models.hf.small_models import PRE_NORM, TOKENS, made, trained
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from attention_residuals.layers.residual import AttnRes
from attention_residuals.models.hf import convert
from attention_residuals.models.hf.install import is_converted

BLOCK = AttnRes(sublayers_per_block=3)


@pytest.fixture
def model():
    return trained(convert(made(PRE_NORM["llama"]), BLOCK))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter_trains_on_a_converted_model(model):
    before = model(TOKENS).logits
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    assert torch.equal(adapted(TOKENS).logits, before)
    losses, optimizer = [], torch.optim.Adam(adapted.parameters(), lr=1e-2)
    for _ in range(6):
        loss = adapted(TOKENS, labels=TOKENS).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.01
    assert not any(parameter.requires_grad for parameter in model.attention_residuals.parameters())


def test_the_trainer_trains_and_saves_a_converted_model(model, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(5, 1)]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=5,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to="none",
        save_steps=5,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    assert trainer.train().training_loss < 6
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert "attention_residuals.readers.L3_mlp.pseudo_query" in changed
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-5").eval()
    assert is_converted(loaded)
    with torch.no_grad():
        assert_close(loaded(TOKENS).logits, model.eval()(TOKENS).logits, 1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma3", "kimi-linear"])
def test_beams_are_the_same_with_and_without_a_cache(family):
    model = trained(convert(made(PRE_NORM[family]), BLOCK))
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    cached, whole = (model.generate(TOKENS, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, whole)


def test_assisted_decoding_gives_what_greedy_decoding_gives(model):
    assistant = convert(made(PRE_NORM["llama"]), AttnRes())
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    greedy = model.generate(TOKENS[:1], **options)
    assert torch.equal(model.generate(TOKENS[:1], assistant_model=assistant, **options), greedy)


def test_padding_on_the_left_changes_nothing(model):
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0
    with torch.no_grad():
        padded = model(TOKENS, attention_mask=mask).logits[1, 3:]
        assert_close(padded, model(TOKENS[1:, 3:]).logits[0])
