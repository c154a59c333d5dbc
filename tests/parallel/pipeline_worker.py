"""What the ranks of a pipeline do in tests; each function is called in every rank's own process."""

import copy
import os
import signal
import time
from collections import Counter
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from closeness import distance
from parallel.pipeline_cases import alone, batch_of, bits, model_of
from parallel.rank_processes import fork_groups
from torch._dynamo.utils import counters

from attention_residuals.errors import AttentionResidualsError, NonFiniteError
from attention_residuals.parallel import watch
from attention_residuals.parallel.pipeline import Pipeline, mean_loss
from attention_residuals.parallel.ranks import fingerprint
from attention_residuals.parallel.schedules import most_held, orders


def meet(rank, group):
    dist.init_process_group(
        "gloo",
        init_method=group["at"],
        rank=rank,
        world_size=group["num_ranks"],
        timeout=timedelta(seconds=group.get("seconds", 240)),
    )


def cases(rank, group):
    """Runs pipelines and notes how far each is from one process alone."""
    meet(rank, group)
    return [measured(case, rank) for case in group["cases"]]


def measured(case, rank):
    begin = time.monotonic()
    model = model_of(sum(case["layers"]), **case["model"])
    tokens, targets = batch_of(case["batch"])
    loss, logits, gradients = one_process(case, model, tokens, targets)
    pipeline = pipeline_of(case, model)
    counters.clear()
    steps = case["steps"]
    for _ in range(steps):  # a second one finds buffers and store as the first left them
        found = pipeline.step(tokens, targets, share=1 / steps)
    layout = pipeline.plan.layout
    order = orders(
        case["schedule"],
        num_ranks=layout.num_ranks,
        stages_per_rank=layout.stages_per_rank,
        num_microbatches=case["microbatches"],
    )
    sent, most = dict(pipeline.bytes_sent), pipeline.store.most
    piece_bytes = tokens.numel() * model.config.width * torch.finfo(pipeline.dtype).bits // 8
    forward = pipeline.logits(tokens)
    result = {
        "loss": abs(found - loss) / abs(loss),
        "sent": [sent.get("forward", 0), sent.get("backward", 0)],
        "planned": [count * steps * piece_bytes for count in pipeline.plan.num_sent_by(rank)],
        "most": most,
        "predicted": most_held(pipeline.plan, order[rank]),
        "left": len(pipeline.store),
        "names": sorted(name for name, _ in pipeline.named_parameters()),
        "logits": None if forward is None else distance(forward, logits),
        "logits without gradient": forward is None or not forward.requires_grad,
        "compiled": counters["stats"]["unique_graphs"] > 0,
        **of_gradients(case, pipeline, gradients, tokens, targets),
    }
    torch._dynamo.reset()
    return {**result, "seconds": time.monotonic() - begin}


def pipeline_of(case, model):
    pipeline = Pipeline(
        model,
        case["layers"],
        schedule=case["schedule"],
        num_microbatches=case["microbatches"],
        transport=case.get("transport", "cached"),
        precision=case.get("precision", "float32"),
    )
    if case.get("compile"):
        for module in pipeline.modules.values():
            module.compile(backend=case["compile"])
    return pipeline


def one_process(case, model, tokens, targets):
    """Runs the batch at once, in coarse numbers in the same parts: their rounding depends on the shape."""
    rough = bits(case) == 16
    parts = case["microbatches"] if rough else 1
    return alone(model, tokens, targets, parts, autocast=case.get("precision") == "bfloat16")


def of_gradients(case, pipeline, gradients, tokens, targets):
    named = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
    there = [name for name in named if gradients[name] is not None]
    missing = [name for name in named if (named[name] is None) != (gradients[name] is None)]
    if missing:
        return {"missing": missing, "gradients": None, "whole gradient": None, "error to one process's": None}

    def whole(side):
        return torch.cat([side[name].double().flatten() for name in there])

    found = {
        "missing": missing,
        "gradients": max(distance(named[name], gradients[name]) for name in there),
        "whole gradient": distance(whole(named), whole(gradients)),
    }
    if bits(case) == 16:
        options = {**case["model"], "dtype": "float32", "source_dtype": None}
        exact = model_of(sum(case["layers"]), **options)
        weights = model_of(sum(case["layers"]), **case["model"])
        exact.load_state_dict(weights.state_dict())
        truth = whole(alone(exact, tokens, targets)[2])
        found["error to one process's"] = distance(whole(named), truth) / distance(whole(gradients), truth)
    return found


def training(rank, group):
    """Trains with accumulated batches of two shapes, in stages and in one process."""
    meet(rank, group)
    return [trained(case) for case in group["cases"]]


def trained(case):
    model = model_of(sum(case["layers"]), **case["model"])
    whole = copy.deepcopy(model)
    pipeline = pipeline_of(case, model)
    named = dict(pipeline.named_parameters())
    optimizers = [
        torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)
        for parameters in (named.values(), whole.parameters())
    ]
    off = []
    for step in range(3):
        for (tokens, targets), share in ((batch_of(4, 6, step), 1 / 3), (batch_of(8, 5, step + 9), 2 / 3)):
            loss = mean_loss(whole(tokens), targets)
            (loss * share).backward()
            off.append(abs(pipeline.step(tokens, targets, share=share) - loss.item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(whole.named_parameters())
    return {
        "losses": max(off),
        "parameters": max(distance(parameter, expected[name]) for name, parameter in named.items()),
        "embedding": fingerprint([named["embedding.weight"]]) if "embedding.weight" in named else None,
    }


def told(work):
    """Runs something that must be refused, and returns the error in words."""
    try:
        work()
    except AttentionResidualsError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refusals(rank, group):
    """What all ranks must refuse, each by itself or together, and go on."""
    meet(rank, group)
    model = model_of(4)
    pipeline = Pipeline(model, (2, 2), schedule="1F1B", num_microbatches=2)
    tokens, targets = batch_of(4)

    def other(*layers, **options):
        return told(
            lambda: Pipeline(options.pop("model", model), layers, **{"num_microbatches": 2, **options})
        )

    other_weights = copy.deepcopy(model)
    other_weights.norm.gain.data += rank
    found = {
        "other shapes": told(lambda: pipeline.step(*batch_of(4, 6 - rank))),
        "other tokens": told(lambda: pipeline.step(*batch_of(4, seed=rank))),
        "other options": other(*((1, 3) if rank else (3, 1)), schedule="GPipe"),
        "other weights": other(2, 2, model=other_weights),
        "world size": other(1, 2, 1, schedule="LoopedBFS"),
        "too many stages": other(1, 1, 1, 1, 0, 0),
        "one refuses its options": other(2, 2, num_microbatches=2 - rank),
        "odd batch": told(lambda: pipeline.step(tokens[:3], targets[:3])),
        "one refuses its batch": told(lambda: pipeline.step(tokens + 30 * rank, targets)),
        "one compiled": one_compiled(rank, model),
        "losses": [pipeline.step(*batch_of(4, length)) for length in (6, 4, 6)],
    }
    return {**found, "left": len(pipeline.store)}


def one_compiled(rank, model):
    pipeline = Pipeline(model, (1,) * 4, schedule="ZBVZeroBubble", num_microbatches=4)
    if rank:
        pipeline.modules[1].compile(backend="eager")
    return told(lambda: pipeline.step(*batch_of(4)))


def fault(rank, group):
    """The victim fails in its second step, in one way or another; the others must name it.

    A slow rank looks for what others found every 3 seconds only.
    """
    meet(rank, group)
    if rank == group.get("slow"):
        watch.time = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(3))
    pipeline = Pipeline(model_of(3), (1, 1, 1), schedule="1F1B", num_microbatches=3)
    calls = Counter()

    def fail(*_):
        calls.update(["forward"])
        if calls["forward"] == 5:  # the second microbatch of the second step
            FAULTS[group["how"]]()

    if rank == group["victim"]:
        pipeline.modules[rank].register_forward_pre_hook(fail)
    pipeline.step(*batch_of(3))
    if rank == group["victim"] and group["how"] == "leaves":
        os._exit(9)
    begin = time.monotonic()
    error = told(lambda: pipeline.step(*batch_of(3)))
    return {"error": error, "seconds": time.monotonic() - begin, "left": len(pipeline.store)}


def raises():
    raise NonFiniteError(got="a source of NaN", expected="finite numbers", do="lower the learning rate")


FAULTS = {
    "leaves": lambda: None,
    "dies": lambda: os._exit(9),
    "hangs": lambda: time.sleep(600),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raises": raises,
}

WORK = {"cases": cases, "training": training, "refusals": refusals, "fault": fault}

if __name__ == "__main__":
    fork_groups(WORK)
