"""What takes a Transformers model takes a converted one: PEFT, Trainer, beam search, assisted decoding."""

import json
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from closeness import assert_close, distance
from models.hf.small_models import PRE_NORM, TOKENS, made, trained
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments, XGLMConfig

from attention_residuals.errors import ConfigError, ConversionError
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import load_model
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


def test_the_trainer_resumes_a_converted_model_with_its_weights(model, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in TOKENS.repeat(5, 1)]
    options = {"per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True}
    options |= {"output_dir": str(tmp_path / "out"), "max_steps": 2, "save_steps": 2, "disable_tqdm": True}
    Trainer(model=model, args=TrainingArguments(**options), train_dataset=rows).train()
    fresh = convert(made(PRE_NORM["llama"]), BLOCK)
    again = Trainer(model=fresh, args=TrainingArguments(**options), train_dataset=rows)
    again.train(resume_from_checkpoint=True)
    with torch.no_grad():
        assert torch.equal(fresh.eval()(TOKENS).logits, model.eval()(TOKENS).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_what_is_new_trains_beside_an_adapter(model):
    config = peft.LoraConfig(
        target_modules=["q_proj"], r=2, task_type="CAUSAL_LM", modules_to_save=["attention_residuals"]
    )
    adapted = peft.get_peft_model(model, config)
    before = adapted(TOKENS).logits
    adapted(TOKENS, labels=TOKENS).loss.backward()
    new = {
        name: parameter
        for name, parameter in adapted.named_parameters()
        if "attention_residuals.modules_to_save" in name and "L0_attention" not in name
    }
    assert new
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in new.values())
    with torch.no_grad():
        for parameter in new.values():
            parameter += torch.randn_like(parameter)
        assert distance(adapted(TOKENS).logits, before) > 1e-3
        with adapted.disable_adapter():
            assert_close(adapted(TOKENS).logits, before, 1e-6)
    assert is_converted(model)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_not_saved_as_a_converted_model(model, tmp_path):
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(ConversionError, match="merge_and_unload"):
        model.save_pretrained(tmp_path / "model")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "model")
    assert is_converted(AutoModelForCausalLM.from_pretrained(tmp_path / "model"))


def test_saving_honours_the_process_and_the_tensors_it_is_given(model, tmp_path):
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "zeros", state_dict=zeros)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "zeros")
    assert not any(parameter.any() for parameter in loaded.parameters())


def test_checkpointing_that_loses_gradients_is_refused(model):
    with pytest.raises(ConfigError, match="use_reentrant=True"):
        model.activation_checkpointing_enable({"use_reentrant": True})
    other = made(PRE_NORM["llama"])
    other.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ConversionError, match="reentrant activation checkpointing"):
        convert(other, BLOCK)


COMPILED = """
import torch
from models.hf.small_models import PRE_NORM, TOKENS, made, trained
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models.hf import convert

model = trained(convert(made(PRE_NORM["llama"]), AttnRes(sublayers_per_block=3)))
with torch.no_grad():
    expected = model(TOKENS, use_cache=False).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    difference = (compiled(TOKENS, use_cache=False).logits - expected).norm() / expected.norm()
assert difference < 1e-5, difference
"""


def test_a_converted_model_compiles_in_one_graph():
    """In a process of its own, since the shape checker of the tests cannot be compiled."""
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, cwd=tests, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            XGLMConfig(vocab_size=64, d_model=32, ffn_dim=48, num_layers=2, attention_heads=4, layerdrop=0.5),
            "at random",
        ),
        (
            GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True),
            "cross-attention",
        ),
    ],
)
def test_what_the_proof_would_not_see_is_refused(config, what):
    with pytest.raises(ConversionError, match=what):
        convert(made(config), AttnRes())
    with pytest.raises(ConversionError, match="no head"):
        convert(made(PRE_NORM["llama"]).model, AttnRes())


def test_a_proof_that_is_interrupted_leaves_the_model_as_it_was(monkeypatch):
    original = made(PRE_NORM["llama"])
    passes = []

    def hook(module, args, output):
        passes.append(1)
        if len(passes) == 3:  # survey, before, after
            raise MemoryError

    handle = original.lm_head.register_forward_hook(hook)
    with pytest.raises(MemoryError):
        convert(original, BLOCK)
    handle.remove()
    assert not is_converted(original)
    assert is_converted(convert(original, BLOCK))


def test_a_kernel_from_elsewhere_is_neither_kept_nor_run(model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    description = json.loads(path.read_text())
    own = json.loads(description["model"]["transformers"])
    assert not {"attn_implementation", "_attn_implementation"} & own.keys()
    description["model"]["transformers"] = json.dumps({**own, "attn_implementation": "someone/kernel"})
    path.write_text(json.dumps(description))
    assert load_model(tmp_path / "model").transformers.config._attn_implementation == "sdpa"
