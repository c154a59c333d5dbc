"""One process of a group that reads a prompt together; run by test_sharding.py."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from attention_residuals.errors import AttentionResidualsError
from attention_residuals.inference import prefill, sharded_prefill
from attention_residuals.layers.residual import AttnRes, TwoPhaseRule
from attention_residuals.models import Decoder, presets


class Sizes:
    """A tap that notes how many numbers the sources of the widest read hold."""

    def __init__(self):
        self.most = 0

    def begin(self, run):
        pass

    def read(self, read):
        self.most = max(self.most, sum(source.numel() for source in read.sources))
        return read

    def write(self, write):
        return write


def main() -> None:
    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    torch.manual_seed(0)
    config = presets.scaled(3, vocab_size=40, max_tokens=64, residual=AttnRes(sublayers_per_block=2))
    model = Decoder(config).double().requires_grad_(False)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 3
    tokens, group = torch.randint(40, (2, 23)), dist.group.WORLD
    worst, sizes, refused = 0.0, [], []
    # What is wrong in one shard is refused by all, before they wait for one another.
    for bad, chunk in ((torch.where(torch.arange(23) == 22, 99, tokens), 23), (tokens[0], 23), (tokens, 1)):
        try:
            sharded_prefill(model, bad, group, chunk=chunk)
        except AttentionResidualsError as error:
            refused.append(type(error).__name__)
    for chunk in (23, 7, 4):
        for residual in (None, TwoPhaseRule(model.residual)):
            together = sharded_prefill(model, tokens, group, chunk=chunk, residual=residual)
            alone = prefill(model, tokens, chunk=chunk)
            step = torch.tensor([[1], [2]])
            pairs = [
                (together.logits, alone.logits),
                (model(step, cache=together.cache), model(step, cache=alone.cache)),
            ]
            worst = max(worst, *((one - other).norm().item() / other.norm().item() for one, other in pairs))
    for read in (
        lambda tap: sharded_prefill(model, tokens[:, :20], group, tap=lambda: tap),
        lambda tap: prefill(model, tokens[:, :20], tap=lambda: tap),
    ):
        tap = Sizes()
        read(tap)
        sizes.append(tap.most)
    (folder / f"{rank}.json").write_text(json.dumps({"worst": worst, "sizes": sizes, "refused": refused}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
