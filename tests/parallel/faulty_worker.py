"""One rank of a pipeline in which something goes wrong; notes how it ended."""

import json
import os
import time
from datetime import timedelta

import torch.distributed as dist
from parallel.pipeline_cases import batch_of, fork_ranks, model_of

from attention_residuals.errors import AttentionResidualsError
from attention_residuals.parallel.pipeline import Pipeline, mean_loss


def told(work):
    """Runs something that must be refused, and returns the error in words."""
    try:
        work()
    except AttentionResidualsError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals(rank):
    """What all ranks must refuse, each by itself or together, and go on."""
    model = model_of(4)
    pipeline = Pipeline(model, (2, 2), schedule="1F1B", num_microbatches=2)
    tokens, targets = batch_of(4)
    found = {
        "other batches": told(lambda: pipeline.step(*batch_of(4, 6 - rank))),
        "other options": told(
            lambda: Pipeline(model, (1, 3) if rank else (3, 1), schedule="GPipe", num_microbatches=2)
        ),
        "world size": told(lambda: Pipeline(model, (1, 2, 1), schedule="LoopedBFS", num_microbatches=2)),
        "too many stages": told(lambda: Pipeline(model, (1, 1, 1, 1, 0, 0), num_microbatches=2)),
        "odd batch": told(lambda: pipeline.step(tokens[:3], targets[:3])),
        "bad token": told(lambda: pipeline.step(tokens + 30, targets)),
    }
    losses = [pipeline.step(*batch_of(4, length)) for length in (6, 4, 6)]
    return {**found, "losses": losses}


def death(rank, how):
    """Rank 1 dies or hangs in its second step, and is what the others must name."""
    calls = []

    def loss(logits, targets):
        calls.append(1)
        if len(calls) == 4:
            if how == "dies":
                os._exit(9)
            time.sleep(30)
        return mean_loss(logits, targets)

    pipeline = Pipeline(model_of(2), (1, 1), schedule="1F1B", num_microbatches=2, loss=loss)
    pipeline.step(*batch_of(4))
    started = time.monotonic()
    return {"error": told(lambda: pipeline.step(*batch_of(4))), "seconds": time.monotonic() - started}


def main(rank, num_ranks, folder):
    task = json.loads((folder / "task.json").read_text())
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=task["seconds"]),
    )
    found = refusals(rank) if task["what"] == "refusals" else death(rank, task["what"])
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)  # there may be nobody left to say goodbye to


if __name__ == "__main__":
    fork_ranks(main)
