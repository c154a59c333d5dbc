"""What may go wrong on one rank of a run."""

import os
import time

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from attention_residuals.parallel import shards


def nothing(model):
    """Lives on."""


def dies(model):
    os._exit(9)


def hangs(model):
    time.sleep(600)


def dies_in_a_forward(model):
    """In the step that comes next; stages of a pipeline have layers of their own."""
    register_module_forward_pre_hook(lambda *_: os._exit(9))


def hangs_in_a_forward(model):
    register_module_forward_pre_hook(lambda *_: time.sleep(600))


def breaks_a_weight(model):
    with torch.no_grad():
        weight = next(iter(model.layers)).mlp.up.weight
        getattr(weight, "to_local", lambda: weight)().fill_(float("inf"))


def fails(model):
    raise KeyError("a bug of somebody's own")


def dies_while_saving(model):
    """Of the second checkpoint: half of this rank's part is there."""
    write, calls = shards._Writer.write_data, []

    def half(self, plan, planner):
        calls.append(1)
        result = write(self, plan, planner)
        if len(calls) == 2:
            (path,) = self.partial.glob(f"shard-{plan.storage_data['shard_index']:05d}-*")
            path.write_bytes(path.read_bytes()[:100])
            os._exit(9)
        return result

    shards._Writer.write_data = half


FAULTS = {
    fault.__name__: fault
    for fault in (
        dies,
        hangs,
        dies_in_a_forward,
        hangs_in_a_forward,
        breaks_a_weight,
        fails,
        dies_while_saving,
    )
}
