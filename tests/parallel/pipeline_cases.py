"""Models and batches for the tests of pipelines, and the runner of their processes."""

import copy
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import torch

from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import Decoder, DecoderConfig
from attention_residuals.parallel.pipeline import mean_loss

RULES = {
    "standard": StandardResidual(),
    "full": AttnRes(),
    "block": AttnRes(sublayers_per_block=2),
    "straddling": AttnRes(sublayers_per_block=5),
}


def model_of(num_layers, rule="block", dtype="float64", tied=False, checkpoint_activations=False):
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=24,
        num_layers=num_layers,
        width=16,
        num_heads=2,
        num_kv_heads=1,
        head_width=8,
        mlp_width=24,
        max_tokens=16,
        tied=tied,
        residual=RULES[rule],
    )
    model = Decoder(config, checkpoint_activations=checkpoint_activations)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 2
    return model.to(getattr(torch, dtype))


def batch_of(num_sequences, length=6, seed=1):
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(24, (num_sequences, length + 1), generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def alone(model, tokens, targets, **kwargs):
    """Loss, logits and gradients of the whole model in one process."""
    model = copy.deepcopy(model)
    logits = model(tokens, **kwargs)
    loss = mean_loss(logits, targets)
    loss.backward()
    return loss.item(), logits.detach(), {name: p.grad for name, p in model.named_parameters()}


def run_ranks(folder, num_ranks, task, worker="pipeline_worker.py", timeout=300):
    """Runs a worker on each rank and returns what each found, or its exit code where it found nothing."""
    (folder / "task.json").write_text(json.dumps(task))
    command = [sys.executable, str(Path(__file__).parent / worker), str(folder), str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = [folder / f"{rank}.json" for rank in range(num_ranks)]
    codes = json.loads((folder / "codes.json").read_text())
    return [
        json.loads(path.read_text()) if path.exists() else code
        for path, code in zip(found, codes, strict=True)
    ]


def fork_ranks(main):
    """Runs ``main(rank, num_ranks, folder)`` in a process for each rank, which import everything once."""
    folder, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                main(rank, num_ranks, folder)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "codes.json").write_text(json.dumps(codes))


def check(task, ranks):
    """Compares what ranks found with one process alone, and what they sent and held with the plan."""
    names = [name for rank in ranks for name in rank["names"]]
    shared = {"embedding.weight"} if task["model"].get("tied") else set()
    assert {name for name in names if names.count(name) > 1} <= shared
    whole = model_of(sum(task["layers"]), **task["model"])
    assert set(names) == {name for name, _ in whole.named_parameters()}
    exact = task["model"].get("dtype", "float64") == "float64"
    for rank in ranks:
        assert rank["loss"] <= (1e-10 if exact else 1e-6)
        assert rank["whole gradient"] <= (1e-10 if exact else 1e-6)
        assert rank["gradients"] <= (1e-10 if exact else 1e-4)  # of the parameter that is furthest off
        assert not rank["missing"]
        assert rank["sent"] == rank["planned"]
        assert rank["most"][0] == rank["most"][1]
        assert rank["left"] == 0
        assert rank["logits without gradient"]
    (logits,) = [rank["logits"] for rank in ranks if rank["logits"] is not None]
    assert logits <= (1e-10 if exact else 1e-6)
