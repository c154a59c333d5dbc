"""One rank of tiny runs; notes how far each is from one process alone, or how it ended."""

import importlib
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from parallel.rank_processes import fork_groups
from parallel.run_cases import SAVING, config_of
from parallel.run_faults import FAULTS, nothing
from torch.distributed.tensor import DTensor

from attention_residuals.data import Corpus
from attention_residuals.errors import AttentionResidualsError
from attention_residuals.parallel.config import Parallel
from attention_residuals.parallel.launch import joined
from attention_residuals.parallel.training import executes
from attention_residuals.train import Saving, loop, train
from attention_residuals.train.checkpoint import checkpoints
from attention_residuals.train.trainer import Trainer

MOMENTS = [time.monotonic()]
"""When this process and its training began, and when each step was done."""


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def first_step(ranks, corpus, case):
    """Compares the gradients of a first step, and an evaluation, with those of one process."""
    config, nowhere = config_of(**case["config"]), Path("nowhere")
    if "scored" in case:  # in some sequences nearly all tokens count, in others nearly none
        scored = (np.arange(len(split)) % 97 < case["scored"] for split in (corpus.train, corpus.valid))
        corpus = replace(corpus, train_scored=next(scored), valid_scored=next(scored))
    alone = Trainer(config, corpus, nowhere, "cpu")
    here = Trainer(config, corpus, nowhere, "cpu", executes=executes(ranks))
    valid = [one.evaluate(1, 3).loss for one in (here, alone)]
    batch = alone.batches.at(0)
    expected, found = alone.execution.backward(batch), here.execution.backward(batch)
    norm, whole_norm = (one.execution.gradient_norm(one.optimizer.parameters) for one in (here, alone))
    wanted = {name: p.grad for name, p in alone.execution.named_parameters()}
    apart, length, names, worst = 0.0, 0.0, [], 0.0
    for name, parameter in here.execution.named_parameters():
        names.append(name)
        gradient = None if parameter.grad is None else whole(parameter.grad)
        if wanted[name] is None:
            assert gradient is None or not gradient.any(), name
            continue
        square = (gradient - wanted[name]).square().sum().item()
        apart, length = apart + square, length + wanted[name].square().sum().item()
        worst = max(worst, (square / max(wanted[name].square().sum().item(), 1e-12)) ** 0.5)
    before = {name: p.detach().clone() for name, p in alone.execution.named_parameters()}
    for one in (here, alone):
        one.optimizer.step(config.optimizer.learning_rate)
    after = dict(alone.execution.named_parameters())
    stepped, way = 0.0, 0.0
    for name, parameter in here.execution.named_parameters():
        stepped += (whole(parameter) - after[name]).square().sum().item()
        way += (after[name] - before[name]).square().sum().item()
    held = sum(
        p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in here.optimizer.parameters
    )
    return {
        "loss": abs(found / expected - 1),
        "gradients": (apart / length) ** 0.5,
        "worst": worst,
        "norm": abs((norm / whole_norm).item() - 1),
        "stepped": (stepped / way) ** 0.5,
        "valid": abs(valid[0] / valid[1] - 1),
        "names": names,
        "held": held,
        "all": sum(p.numel() for p in alone.optimizer.parameters),
    }


def training(ranks, corpus, case):
    """Trains, or goes on; is asked to stop on one rank only, and may meet a fault there."""
    saving = Saving(**case["saving"]) if "saving" in case else SAVING
    config = config_of(**(case["config"] | (case.get("other", {}) if ranks.rank else {})))
    MOMENTS.append(time.monotonic())
    steps, is_last = [], ranks.rank == ranks.parallel.num_ranks - 1
    fault = FAULTS[case["fault"]] if "fault" in case and is_last else nothing

    def monitor(step, model):
        steps.append(step)
        MOMENTS.append(time.monotonic())
        if step == case.get("until") and is_last:
            signal.raise_signal(signal.SIGTERM)
        if step == case.get("fault in step"):
            fault(model)

    if case.get("fault in step") is None:
        fault(None)
    result = train(
        config,
        corpus,
        case["folder"] + ("-elsewhere" if ranks.rank and case.get("has another disk") else ""),
        saving=saving,
        progress=False,
        executes=executes(ranks),
        monitor=monitor,
    )
    return {"step": result.step, "interrupted": result.interrupted, "loss": result.loss, "steps": steps}


def run(case, corpus, rank, store):
    parallel = Parallel(**(case["parallel"] | (case.get("other parallel", {}) if rank else {})))
    if rank and case.get("sees an older checkpoint"):
        loop.checkpoints = lambda folder: checkpoints(folder)[:-1]
    if rank >= parallel.num_ranks:
        return None
    work = {"first step": first_step, "training": training}[case["what"]]
    with joined(parallel, "cpu", dist.FileStore(store, parallel.num_ranks), rank) as ranks:
        return work(ranks, corpus, case)


def cases(rank, group):
    """Runs one case after the other; the first that breaks what the ranks hear of one another is the last."""
    torch.set_num_threads(1)
    corpus, found = Corpus.load(group["corpus"]), {}
    for number, (name, case) in enumerate(group["cases"].items()):
        try:
            found[name] = run(case, corpus, rank, f"{group['folder']}/store-{number}")
        except AttentionResidualsError as error:
            seconds = time.monotonic() - MOMENTS[-1]
            found[name] = {"error": f"{type(error).__name__}: {error}", "seconds": seconds}
            if dist.is_initialized():
                break
    return found


WORK = {"cases": cases}

if __name__ == "__main__":
    importlib.import_module("attention_residuals.ops.cpu")  # once, by the process that forks
    fork_groups(WORK)
