"""The model that comes with the package."""

import inspect
import re
import textwrap

import pytest
import torch

from attention_residuals.cli import main
from attention_residuals.cli.names import BUNDLED, folder_and_text, opened
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes
from attention_residuals.train import evaluate


@pytest.fixture(scope="module")
def bundled():
    return opened(BUNDLED, "cpu")


def test_it_is_a_block_model_of_eight_layers_within_ten_megabytes(bundled):
    config = bundled.model.config
    assert config.num_layers >= 8
    assert isinstance(config.residual, AttnRes)
    assert 1 < config.residual.sublayers_per_block < 2 * config.num_layers
    assert sum(path.stat().st_size for path in BUNDLED.iterdir()) <= 10_000_000


def test_it_is_trained_and_reads_unevenly(bundled):
    source = inspect.getsource(textwrap)
    tokens = bundled.tokenizer.encode(source)
    found = evaluate(
        bundled.model,
        tokens,
        bytes_per_token=bundled.tokenizer.bytes_per_token,
        sequence_length=128,
        batch_size=4,
        max_batches=1,
    )
    assert found.bits_per_byte < 2  # 8 without any knowledge
    queries = [p for name, p in bundled.model.residual.named_parameters() if name.endswith("pseudo_query")]
    assert torch.stack(queries)[1:].norm(dim=1).min() > 0.01


def test_its_card_says_what_it_is(bundled):
    card = (BUNDLED / "README.md").read_text(encoding="utf-8")
    assert f"{bundled.model.config.num_layers} layers, width {bundled.model.config.width}" in card
    count = sum(parameter.numel() for parameter in bundled.model.parameters())
    assert f"{count:,} parameters" in card
    assert 0.3 < float(re.search(r"([\d.]+) bits per byte", card)[1]) < 1.5
    for word in ("PSF-2.0", "Apache-2.0", "scripts/bundle_model.py", "seed 0"):
        assert word in card


def test_a_text_alone_is_for_it(capsys):
    assert main(["trace", "def add(a, b):"]) == 0
    alone = capsys.readouterr().out
    assert "output " in alone
    assert main(["trace", str(BUNDLED), "def add(a, b):"]) == 0
    assert capsys.readouterr().out == alone
    assert main(["generate", "import ", "--max-new-tokens", "3", "--sampling.temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("import ")


def test_bundled_is_its_name_unless_there_is_such_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["freedom", "bundled", "x = 1", "--site", "L7.mlp", "--num-steps", "1"]) == 0
    assert "L7.mlp" in capsys.readouterr().out
    (tmp_path / "bundled").mkdir()
    assert main(["freedom", "bundled", "x = 1", "--site", "L7.mlp", "--num-steps", "1"]) == 1
    assert "bundled" in capsys.readouterr().err


@pytest.mark.parametrize("words", [(), ("a", "b", "c"), (str(BUNDLED),)])
def test_other_words_are_refused(words):
    with pytest.raises(ConfigError, match=r"a folder, then a text|FOLDER"):
        folder_and_text(words)
