"""What the documents say is run, and what they list exists."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from closeness import assert_close

from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import Decoder, presets
from attention_residuals.trace import record

ROOT = Path(__file__).parent.parent
TOKENS = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(0))


def python_of(document: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL))


@pytest.fixture(scope="module")
def sketches():
    names: dict[str, object] = {}
    exec(compile(python_of("ARCHITECTURE.md"), "ARCHITECTURE.md", "exec"), names)
    return names


class WritesToo:
    def __init__(self):
        self.reads, self.outputs = [], {}

    def begin(self, run):
        pass

    def read(self, read):
        self.reads.append(read)
        return read

    def write(self, write):
        self.outputs[write.writer] = write.output
        return write


@pytest.mark.parametrize("name", ["DenseFormer", "HyperConnections", "ThreeReads"])
def test_sketched_rules_run_train_and_account_for_every_writer(sketches, name):
    model = Decoder(presets.scaled(3, vocab_size=40, residual=sketches[name]())).double()
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    tap = WritesToo()
    logits = model(TOKENS, tap=tap)
    assert torch.equal(logits, model(TOKENS))
    logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.residual.parameters() if parameter.numel() > 1)
    for read in tap.reads:
        outputs = torch.stack([tap.outputs[writer] for writer in read.writers])
        pattern = "sw,wbtd->sbtd" if read.membership.ndim == 2 else "swbt,wbtd->sbtd"
        assert_close(torch.einsum(pattern, read.membership.double(), outputs), torch.stack(read.values))
    parts = [read.part for read in tap.reads[:4]]
    assert parts == (["q", "k", "v", "in"] if name == "ThreeReads" else ["in"] * 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 99])
def test_sketched_two_phase_reads_equal_one_phase_reads(sketches, size):
    config = presets.scaled(4, vocab_size=40, residual=AttnRes(sublayers_per_block=size))
    one = Decoder(config).double()
    for parameter in one.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    two = Decoder(replace(config, residual=sketches["TwoPhase"](sublayers_per_block=size))).double()
    two.load_state_dict(one.state_dict())
    assert_close(two(TOKENS), one(TOKENS))
    assert record(one, TOKENS)["output"].source_names[0] == "embedding"
