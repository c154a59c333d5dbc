"""Models, batches and cases for the tests of pipelines, and what must be true of each case."""

import copy

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


def model_of(num_layers, rule="block", dtype="float64", tied=False, source_dtype=None, **options):
    torch.manual_seed(0)
    residual = RULES[rule]
    if source_dtype is not None:
        residual = AttnRes(sublayers_per_block=residual.sublayers_per_block, source_dtype=source_dtype)
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
        residual=residual,
    )
    model = Decoder(config, **options)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 2
    return model.to(getattr(torch, dtype))


def batch_of(num_sequences, length=6, seed=1):
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(24, (num_sequences, length + 1), generator=made)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def alone(model, tokens, targets, parts=1, autocast=False, **kwargs):
    """Loss, logits and gradients of the whole model in one process, part by part of the batch."""
    model, total, logits = copy.deepcopy(model), 0.0, []
    given = {name: tensor.chunk(parts) for name, tensor in kwargs.items()}
    for number, pair in enumerate(zip(tokens.chunk(parts), targets.chunk(parts), strict=True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits.append(model(pair[0], **{name: chunks[number] for name, chunks in given.items()}))
        loss = mean_loss(logits[-1], pair[1]) / parts
        loss.backward()
        total += loss.item()
    return total, torch.cat(logits).detach(), {name: p.grad for name, p in model.named_parameters()}


def case(schedule, layers, rule="block", transport="cached", steps=1, microbatches=4, **options):
    """Describes a pipeline, its model and its batch; other options are the model's."""
    beside = {name: options.pop(name) for name in ("precision", "compile") if name in options}
    return {
        "schedule": schedule,
        "layers": layers,
        "model": {"rule": rule, **options},
        "transport": transport,
        "steps": steps,
        "batch": microbatches,
        "microbatches": microbatches,
        **beside,
    }


def bits(task):
    """Tells in how many bits a case computes, at its roughest."""
    rough = "bfloat16" in (task.get("precision"), task["model"].get("dtype"))
    return 16 if rough else 32 if task["model"].get("dtype") == "float32" else 64


def problems(task, ranks):
    """Compares what ranks found with one process alone, and what they sent and held with the plan."""
    found = []
    names = [name for rank in ranks for name in rank["names"]]
    shared = {"embedding.weight"} if task["model"].get("tied") else set()
    if not {name for name in names if names.count(name) > 1} <= shared:
        found.append(f"parameters on two ranks: {sorted(names)}")
    if set(names) != {name for name, _ in model_of(sum(task["layers"]), **task["model"]).named_parameters()}:
        found.append(f"parameters {sorted(names)}")
    limits = {
        64: {"loss": 1e-10, "whole gradient": 1e-10, "gradients": 1e-10, "logits": 1e-10},
        # "gradients" is the parameter that is furthest off.
        32: {"loss": 1e-6, "whole gradient": 1e-6, "gradients": 1e-4, "logits": 1e-6},
        # Forward computes the same numbers; gradients are rounded elsewhere, and judged by their error.
        16: {"loss": 1e-6, "logits": 1e-6, "error to one process's": 1.25},
    }[bits(task)]
    for number, rank in enumerate(ranks):
        for name, limit in limits.items():
            if rank[name] is not None and not rank[name] <= limit:
                found.append(f"rank {number}: {name} {rank[name]}")
        if rank["missing"] or rank["left"] or not rank["logits without gradient"]:
            found.append(f"rank {number}: {rank['missing']} missing, {rank['left']} left in the store")
        for name, predicted in (("sent", "planned"), ("most", "predicted")):
            if rank[name] != rank[predicted]:
                found.append(f"rank {number}: {name} {rank[name]}, {predicted} {rank[predicted]}")
        if rank["compiled"] != bool(task.get("compile")):
            found.append(f"rank {number}: compiled {rank['compiled']}")
    if sum(rank["logits"] is not None for rank in ranks) != 1:
        found.append("logits on more or fewer than one rank")
    return found
