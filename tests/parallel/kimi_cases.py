"""Tiny Kimi Linear models in stages, and what ranks find out about them beside one process alone."""

import signal

import torch
import torch.distributed as dist
from closeness import distance
from models.hf.kimi_linear_models import smallest
from parallel import pipeline_cases
from parallel.pipeline_cases import RULES
from parallel.run_cases import config_of

from attention_residuals.data import Corpus
from attention_residuals.models import build
from attention_residuals.parallel.config import Parallel
from attention_residuals.parallel.launch import joined
from attention_residuals.parallel.pipeline import Pipeline, mean_loss
from attention_residuals.parallel.training import executes
from attention_residuals.train import Saving, train

BIAS = "e_score_correction_bias"
SAVING = Saving(every=2, keep=3, evaluate_every=2, evaluate_batches=2, log_every=1)


def model_of(num_layers, rule="block", **options):
    torch.manual_seed(0)
    model = build(smallest(num_layers, RULES[rule], 24), **options)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 2
    return model


def batch_of(num_sequences, length=12, seed=1):
    """Tokens, targets, and the mask of two documents in each sequence."""
    tokens, targets = pipeline_cases.batch_of(num_sequences, length, seed)
    starts = torch.randint(1, length, (num_sequences, 1), generator=torch.Generator().manual_seed(seed))
    document = torch.arange(length) >= starts
    return tokens, targets, document[:, :, None] == document[:, None]


def case(schedule, layers, rule="block", microbatches=4, masked=True, **options):
    return {
        "schedule": schedule,
        "layers": layers,
        "rule": rule,
        "microbatches": microbatches,
        "masked": masked,
        "options": options,
    }


def trained(case, num_steps=3):
    """Trains in stages, and alone on whole batches; notes how far apart both are."""
    rule, options, size = case["rule"], case["options"], case["microbatches"]
    model, whole = (model_of(sum(case["layers"]), rule, **options) for _ in range(2))
    pipeline = Pipeline(model, case["layers"], schedule=case["schedule"], num_microbatches=size)
    named, expected = dict(pipeline.named_parameters()), dict(whole.named_parameters())
    optimizers = [torch.optim.SGD(parameters, lr=0.02) for parameters in (named.values(), expected.values())]
    losses, found = [], {}
    tokens, _, mask = batch_of(2 * size)
    given = {"mask": mask} if case["masked"] else {}
    logits = pipeline.logits(tokens, **given)  # of which no choice of experts counts
    with torch.no_grad():
        wanted = whole(tokens, **given)
    pipeline.bytes_sent.clear()
    for step in range(num_steps):
        tokens, targets, mask = batch_of(2 * size, seed=step)
        given = {"mask": mask} if case["masked"] else {}
        loss = mean_loss(whole(tokens, **given), targets)
        loss.backward()
        losses.append(abs(pipeline.step(tokens, targets, **given) / loss.item() - 1))
        found = found or of_gradients(named, expected)  # of the first step, where weights are the same
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.settle()
        whole.settle()
    ours = {k: v for stage in pipeline.modules.values() for k, v in stage.state_dict().items()}
    theirs = whole.state_dict()
    step_bytes = num_steps * 4 * tokens.numel() * model.config.width
    return {
        **found,
        "losses": max(losses),
        "logits": None if logits is None else distance(logits, wanted),
        "weights": max(distance(ours[name], theirs[name]) for name in ours if BIAS not in name),
        "biases": {name: ours[name].tolist() for name in ours if BIAS in name},
        "expected biases": {name: theirs[name].tolist() for name in ours if BIAS in name},
        "sent": [pipeline.bytes_sent[way] for way in ("forward", "backward")],
        "planned": [count * step_bytes for count in pipeline.plan.num_sent_by(pipeline.rank)],
        "names": sorted(ours),
        "parameters": sorted(named),
    }


def of_gradients(named, expected):
    """Compares a rank's gradients with those of one process: together, and the one that is furthest off."""
    pairs = [(p.grad, expected[name].grad) for name, p in named.items()]
    assert all((ours is None) == (theirs is None) for ours, theirs in pairs)
    pairs = [pair for pair in pairs if pair[0] is not None]
    ours, theirs = (torch.cat([pair[side].flatten() for pair in pairs]) for side in (0, 1))
    return {"gradients": distance(ours, theirs), "furthest": max(distance(*pair) for pair in pairs)}


def run_config():
    """A run whose sequences hold several documents."""
    return config_of(model=smallest(4, RULES["block"], 300))


def run(rank, group):
    """Trains a run's folder up to a step, as one rank of a pipeline."""
    parallel = Parallel(**group["parallel"])
    store = dist.FileStore(group["at"].removeprefix("file://"), parallel.num_ranks)

    def monitor(step, model):
        if step == group["until"]:
            signal.raise_signal(signal.SIGTERM)

    with joined(parallel, "cpu", store, rank) as ranks:
        result = train(
            run_config(),
            Corpus.load(group["corpus"]),
            group["run folder"],
            saving=SAVING,
            progress=False,
            monitor=monitor,
            executes=executes(ranks),
        )
    return {"step": result.step, "loss": result.loss}
