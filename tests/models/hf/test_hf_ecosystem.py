import json
from dataclasses import replace

import peft
import pytest
import torch
from closeness import assert_close, distance
from models.hf.wrapped_models import SHAPE, VOCAB, some_rules, some_tokens
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from attention_residuals.data import Tokenizer
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import Decoder
from attention_residuals.models.hf.causal_lm import AttnResForCausalLM

BLOCK = AttnRes(sublayers_per_block=2)
TEXTS = ["the cat sat on the mat and the dog sat on the log"] * 4

# PEFT asks Transformers for it by its old name.
old_name_in_peft = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def new_model(residual=BLOCK, **fields):
    config = replace(SHAPE, residual=residual, **fields)
    return AttnResForCausalLM.from_decoder(Decoder(config), eos_token_id=0, pad_token_id=0).eval()


# PEFT


def with_lora(model, **options):
    config = peft.LoraConfig(target_modules=["query", "value"], r=2, task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(model, config)


@old_name_in_peft
@some_rules
def test_only_the_adapter_is_trained_and_it_starts_as_no_change(residual):
    model, tokens = new_model(residual), some_tokens()
    before = model(tokens).logits
    frozen = {name: tensor.clone() for name, tensor in model.decoder.state_dict().items()}
    adapted = with_lora(model)
    assert torch.equal(adapted(tokens).logits, before)
    names = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(names) == 2 * 2 * SHAPE.num_layers
    assert all("lora" in name for name in names)
    optimizer = torch.optim.Adam(adapted.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        loss = adapted(tokens, labels=tokens).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.05
    after = adapted.unload().decoder.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in frozen.items())


@old_name_in_peft
def test_a_saved_adapter_comes_back_on_the_same_model(tmp_path):
    new_model().save_pretrained(tmp_path / "model")
    tokens = some_tokens()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    plain = base(tokens).logits
    adapted = with_lora(base, init_lora_weights=False).eval()
    expected = adapted(tokens).logits
    assert distance(expected, plain) > 1e-3
    adapted.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(loaded(tokens).logits, expected)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(found(tokens).logits, expected)
    with pytest.raises(AssertionError):
        assert_close(plain, expected)
    options = {"max_new_tokens": 5, "do_sample": False}
    generated = loaded.generate(input_ids=tokens, **options)
    merged = loaded.merge_and_unload()
    assert_close(merged(tokens).logits, expected)
    assert torch.equal(merged.generate(tokens, **options), generated)
    assert_close(merged.decoder(tokens), expected)


@old_name_in_peft
def test_an_adapter_gets_gradients_through_checkpointed_layers():
    tokens, gradients = some_tokens(), []
    for enable in (False, True):
        torch.manual_seed(1)
        adapted = with_lora(new_model(), init_lora_weights=False).train()
        if enable:
            adapted.base_model.model.activation_checkpointing_enable()
        adapted(tokens, labels=tokens).loss.backward()
        gradients.append([p.grad for p in adapted.parameters() if p.requires_grad])
    for plain, again in zip(*gradients, strict=True):
        assert plain.norm() > 0
        assert_close(again, plain)


# Trainer


def examples(count):
    """Texts of several lengths, of the same few tokens, padded on the right."""
    rows = []
    for number in range(count):
        tokens = torch.arange(1, 17) % 7 + 1
        labels, mask = tokens.clone(), torch.ones_like(tokens)
        labels[16 - number % 5 :], mask[16 - number % 5 :] = -100, 0
        rows.append({"input_ids": tokens, "labels": labels, "attention_mask": mask})
    return rows


def trainer_of(folder, model, *, batch_size=4, **options):
    arguments = TrainingArguments(
        str(folder),
        max_steps=5,
        per_device_train_batch_size=batch_size,
        learning_rate=1e-2,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=examples(20), eval_dataset=examples(4))


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@some_rules
def test_the_trainer_trains_evaluates_and_saves(tmp_path, residual):
    model = new_model(residual)
    trainer = trainer_of(tmp_path / "run", model)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    losses = logged(trainer, "loss")
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 0.5
    assert trainer.evaluate()["eval_loss"] < before - 0.5
    assert trainer.predict(examples(4)).predictions.shape == (4, 16, VOCAB)
    trainer.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = some_tokens()
    assert torch.equal(loaded.decoder(tokens), model.eval().decoder(tokens))


def test_accumulated_gradients_weigh_tokens_rather_than_batches(tmp_path):
    runs = []
    for batch_size, steps in ((4, 1), (2, 2), (1, 4)):
        torch.manual_seed(1)
        trainer = trainer_of(
            tmp_path / str(batch_size), new_model(), batch_size=batch_size, gradient_accumulation_steps=steps
        )
        trainer.train()
        runs.append(torch.tensor([logged(trainer, "loss"), logged(trainer, "grad_norm")]))
    assert_close(runs[1], runs[0], 1e-4)
    assert_close(runs[2], runs[0], 1e-4)


def test_the_trainer_switches_checkpointing_on(tmp_path):
    runs = []
    for enable in (False, True):
        torch.manual_seed(1)
        model = new_model()
        trainer = trainer_of(tmp_path / str(enable), model, activation_checkpointing=enable)
        trainer.train()
        assert model.decoder.checkpoint_activations == enable
        runs.append(torch.tensor(logged(trainer, "loss")))
    assert_close(runs[1], runs[0])


# A tokenizer, and lm-evaluation-harness


def wrapped_tokenizer(folder):
    tokenizer = Tokenizer.train(TEXTS, vocab_size=280)
    tokenizer.save(folder / "tokenizer.json")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        padding_side="left",
    )
    return tokenizer, wrapped


def test_our_tokenizer_serves_transformers(tmp_path):
    tokenizer, wrapped = wrapped_tokenizer(tmp_path)
    model = new_model(vocab_size=tokenizer.vocab_size)
    batch = wrapped(["the cat", "the dog sat on the log"], padding=True, return_tensors="pt")
    assert batch["input_ids"][1].tolist() == tokenizer.encode("the dog sat on the log").tolist()
    found = model.generate(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        max_new_tokens=4,
        do_sample=False,
    )
    alone = model.generate(
        wrapped(["the cat"], return_tensors="pt")["input_ids"], max_new_tokens=4, do_sample=False
    )
    assert wrapped.decode(found[0], skip_special_tokens=True) == tokenizer.decode(alone[0].tolist())


TASK = """
task: animals
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
QUESTIONS = [
    {"question": "the cat sat on the", "choices": ["mat", "dog"], "answer": 0},
    {"question": "the dog sat on the", "choices": ["cat", "log"], "answer": 1},
    {"question": "the cat sat", "choices": ["on the mat", "log"], "answer": 0},
]


@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
def test_the_evaluation_harness_runs_a_local_task(tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tokenizer, wrapped = wrapped_tokenizer(tmp_path)
    model = new_model(vocab_size=tokenizer.vocab_size)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "animals.yaml").write_text(TASK.format(questions=questions))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    result = lm_eval.simple_evaluate(
        # Its cache of logits mixes up requests that have all tokens but the last in common, as two here have.
        model=HFLM(pretrained=model, tokenizer=wrapped, batch_size=2, device="cpu", logits_cache=False),
        tasks=["animals"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    right = 0
    for sample in result["samples"]["animals"]:
        question, found = sample["doc"], [response[0][0] for response in sample["resps"]]
        own = [
            log_likelihood(model.decoder, tokenizer, question["question"], choice)
            for choice in question["choices"]
        ]
        assert_close(torch.tensor(found), torch.tensor(own), 1e-5)
        right += own.index(max(own)) == question["answer"]
    assert result["results"]["animals"]["acc,none"] == pytest.approx(right / len(QUESTIONS))


@torch.no_grad()
def log_likelihood(decoder, tokenizer, question, choice):
    """Adds up what the decoder alone gives the tokens of a choice."""
    start = len(tokenizer.encode(question))
    tokens = torch.tensor(tokenizer.encode(f"{question} {choice}"))
    log_probabilities = decoder(tokens[None])[0, :-1].log_softmax(-1)
    return log_probabilities.gather(-1, tokens[1:, None])[start - 1 :].sum().item()
