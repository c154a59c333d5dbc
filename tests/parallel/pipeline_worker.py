"""One rank of a pipeline; runs the cases of task.json and notes how far each is from one process alone."""

import json

import torch
import torch.distributed as dist
from closeness import distance
from parallel.pipeline_cases import alone, batch_of, fork_ranks, model_of

from attention_residuals.parallel.pipeline import Pipeline
from attention_residuals.parallel.schedules import most_held, orders


def measure(case, rank):
    model = model_of(sum(case["layers"]), **case["model"])
    tokens, targets = batch_of(case["batch"])
    loss, logits, gradients = alone(model, tokens, targets)
    pipeline = Pipeline(
        model,
        case["layers"],
        schedule=case["schedule"],
        num_microbatches=case["microbatches"],
        transport=case.get("transport", "cached"),
    )
    steps = case.get("steps", 1)
    for _ in range(steps):  # a second one finds buffers and store as the first left them
        found = pipeline.step(tokens, targets, share=1 / steps)
    named = dict(pipeline.named_parameters())
    both = [(p.grad, gradients[name]) for name, p in named.items() if gradients[name] is not None]
    worst = max(distance(*pair) for pair in both)
    whole = distance(*(torch.cat([tensor.flatten() for tensor in side]) for side in zip(*both, strict=True)))
    missing = [
        name for name, parameter in named.items() if (parameter.grad is None) != (gradients[name] is None)
    ]
    layout = pipeline.plan.layout
    order = orders(
        case["schedule"],
        num_ranks=layout.num_ranks,
        stages_per_rank=layout.stages_per_rank,
        num_microbatches=case["microbatches"],
    )
    sent, most = dict(pipeline.bytes_sent), pipeline.store.most
    tokens_sent = steps * tokens.numel() * model.config.width * torch.finfo(pipeline.dtype).bits // 8
    forward = pipeline.logits(tokens)
    return {
        "loss": abs(found - loss) / abs(loss),
        "gradients": worst,
        "whole gradient": whole,
        "missing": missing,
        "sent": [sent.get("forward", 0), sent.get("backward", 0)],
        "planned": [count * tokens_sent for count in pipeline.plan.num_sent_by(rank)],
        "most": [most, most_held(pipeline.plan, order[rank])],
        "left": len(pipeline.store),
        "names": sorted(named),
        "logits": None if forward is None else distance(forward, logits),
        "logits without gradient": forward is None or not forward.requires_grad,
    }


def main(rank, num_ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=num_ranks)
    task = json.loads((folder / "task.json").read_text())
    found = [measure(case, rank) for case in task]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(main)
