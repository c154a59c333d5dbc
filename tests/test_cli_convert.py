"""A pretrained model, converted and used as a person types it."""

import json
import sys

import pytest
import torch
from data.foreign import byte_level_step, trained
from models.hf.small_models import OTHERS, PRE_NORM, made
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from attention_residuals.cli import main
from attention_residuals.data import Tokenizer
from attention_residuals.models import load_model

TEXT = "the cat sat on the mat, 12 or 123 cats' hats?\n\n"


def pretrained(folder, config):
    """A folder as the hub has them."""
    bpe = trained(byte_level_step())
    config = type(config)(**{**config.to_dict(), "vocab_size": 350})
    made(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return pretrained(tmp_path_factory.mktemp("hub") / "model", PRE_NORM["llama"])


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "model"
    assert main(["convert", str(source), str(folder)]) == 0
    return folder


def test_both_models_compute_the_same(source, converted, capsys):
    tokens = torch.randint(350, (2, 9))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source).eval()(tokens).logits
        assert torch.allclose(load_model(converted)(tokens), expected, atol=1e-5)
        again = AutoModelForCausalLM.from_pretrained(converted).eval()
        assert torch.allclose(again(tokens).logits, expected, atol=1e-5)
    assert load_model(converted).config.residual.sublayers_per_block == 1  # 8 sublayers in 8 blocks
    ids = AutoTokenizer.from_pretrained(source)(TEXT, add_special_tokens=False).input_ids
    assert Tokenizer.load(converted / "tokenizer.json").encode(TEXT).tolist() == ids
    assert AutoTokenizer.from_pretrained(converted)(TEXT, add_special_tokens=False).input_ids == ids


def test_it_is_generated_from_evaluated_and_traced(converted, tmp_path, capsys):
    assert main(["generate", str(converted), "the cat", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("the cat")
    (tmp_path / "text.txt").write_text(TEXT * 9)
    assert (
        main(["eval", str(converted), "--text", str(tmp_path / "text.txt"), "--sequence-length", "16"]) == 0
    )
    assert "bits per byte on" in capsys.readouterr().out
    assert main(["trace", str(converted), "the cat", "--out", str(tmp_path / "trace")]) == 0
    assert "L3.mlp" in capsys.readouterr().out
    assert (tmp_path / "trace" / "routing.png").exists()


def test_it_trains_on_and_is_resumed_and_started_from_again(converted, tmp_path, capsys):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(TEXT.replace("12", str(number)) * 4)
    options = ["--source", str(texts), "--sequence-length", "16", "--batch-size", "2"]
    only = [*options, "--num-steps", "2", "--trains", "residual"]
    command = ["train", str(tmp_path / "tuned"), "--start", str(converted), *only]
    assert main(command) == 0
    assert "2 steps done" in capsys.readouterr().out
    assert main(command) == 0
    assert "2 steps done" in capsys.readouterr().out
    begun, tuned = load_model(converted), load_model(next((tmp_path / "tuned").rglob("step-*")))
    assert torch.equal(begun.transformers.lm_head.weight, tuned.transformers.lm_head.weight)
    assert not torch.equal(
        begun.residual.readers["L3_mlp"].pseudo_query, tuned.residual.readers["L3_mlp"].pseudo_query
    )
    start = ["--start", str(tmp_path / "tuned"), *options, "--num-steps", "1"]
    assert main(["train", str(tmp_path / "again"), *start]) == 0
    assert main(["generate", str(tmp_path / "again"), "the cat", "--max-new-tokens", "2"]) == 0


def remote_code(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "model_type": "mystery",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    path.write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('their code ran')")


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def without_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def foreign_kernel(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_attn_implementation": "someone/kernel"}))


def incomplete(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("change", [foreign_kernel, incomplete])
def test_a_folder_that_would_run_code_or_lacks_weights_is_refused(tmp_path, capsys, change):
    folder = pretrained(tmp_path / "model", PRE_NORM["llama"])
    change(folder)
    assert main(["convert", str(folder), str(tmp_path / "new")]) == 1
    error = capsys.readouterr().err
    assert "someone/kernel" in error or "the first is model.layers.2.mlp.up_proj.weight" in error
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", [remote_code, pickled, truncated, without_tokenizer])
def test_a_folder_that_cannot_be_read_is_told_and_nothing_is_written(tmp_path, capsys, change):
    folder = pretrained(tmp_path / "model", PRE_NORM["llama"])
    change(folder)
    assert main(["convert", str(folder), str(tmp_path / "new")]) == 1
    error = capsys.readouterr().err
    assert "\nexpected: a causal language model as safetensors or GGUF" in error
    assert "their code ran" not in error
    assert not (tmp_path / "new").exists()


def test_what_cannot_convert_is_told(source, converted, tmp_path, capsys):
    olmo = pretrained(tmp_path / "olmo", OTHERS["olmo2"][0])
    new = str(tmp_path / "new")
    for arguments, code, message in (
        ([str(olmo), new], 1, "linear of the residual stream"),
        ([str(tmp_path / "none"), new], 2, "does not use the network"),
        ([str(source), str(converted)], 2, "which holds a model"),
        ([str(source), new, "--residual", "cumulative"], 1, "logits that Cumulative changes"),
        ([str(source), new, "--residual", "fulll"], 2, "did you mean 'full'"),
    ):
        assert main(["convert", *arguments]) == code
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_options_that_the_start_decides_are_refused(converted, tmp_path, capsys):
    command = ["train", str(tmp_path / "run"), "--start", str(converted)]
    assert main([*command, "--depth", "4"]) == 2
    assert "--depth together with --start" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "run"), "--start", str(tmp_path)]) == 2
    assert "without a model" in capsys.readouterr().err
    assert main(["eval", str(converted)]) == 2
    assert "pass --text" in capsys.readouterr().err


def test_without_transformers_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "attention_residuals.models.hf", None)
    assert main(["convert", "a", str(tmp_path / "b")]) == 2
    assert "pip install 'attention-residuals[hf]'" in capsys.readouterr().err
