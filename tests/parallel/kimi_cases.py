"""Tiny Kimi Linear models in stages, and what ranks find out about them beside one process alone."""

import json
import signal
from dataclasses import replace

import torch
import torch.distributed as dist
from closeness import distance

from attention_residuals.data import Corpus
from attention_residuals.layers.residual import AttnRes, StandardResidual
from attention_residuals.models import build, presets
from attention_residuals.parallel.config import Parallel
from attention_residuals.parallel.launch import joined
from attention_residuals.parallel.pipeline import Pipeline, mean_loss
from attention_residuals.parallel.training import executes
from attention_residuals.train import AdamW, Cosine, Saving, TrainConfig, train

RULES = {
    "standard": StandardResidual(),
    "full": AttnRes(),
    "block": AttnRes(sublayers_per_block=2),
    "straddling": AttnRes(sublayers_per_block=3),
}
SMALL = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_local_experts": 4,
}
BIAS = "e_score_correction_bias"
SAVING = Saving(every=2, keep=3, evaluate_every=2, evaluate_batches=2, log_every=1)


def config_of(num_layers, rule, vocab_size=24):
    """Every second layer, and the last, is MLA; every layer but the first has experts."""
    config = presets.kimi_linear("kimi-linear-tiny", vocab_size=vocab_size, residual=AttnRes())
    kinds = ["full_attention" if layer % 2 else "linear_attention" for layer in range(num_layers)]
    fields = {
        **config.original,
        **SMALL,
        "num_hidden_layers": num_layers,
        "layer_types": [*kinds[:-1], "full_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * (num_layers - 1)],
    }
    return replace(
        config,
        transformers=json.dumps(fields),
        width=16,
        residual=RULES[rule],
        norms=(*config.norms[: 2 * num_layers], config.norms[-1]),
        eps=config.eps[: 2 * num_layers + 1],
    )


def model_of(num_layers, rule="block", **options):
    torch.manual_seed(0)
    model = build(config_of(num_layers, rule), **options)
    for parameter in model.residual.parameters():
        parameter.data += torch.randn_like(parameter) / 2
    return model


def batch_of(num_sequences, length=12, seed=1):
    """Tokens, targets, and the mask of two documents in each sequence."""
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(24, (num_sequences, length + 1), generator=made)
    starts = torch.randint(1, length, (num_sequences, 1), generator=made)
    document = torch.arange(length) >= starts
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), document[:, :, None] == document[:, None]


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
    return {
        **found,
        "losses": max(losses),
        "logits": None if logits is None else distance(logits, wanted),
        "weights": max(distance(ours[name], theirs[name]) for name in ours if BIAS not in name),
        "biases": {name: ours[name].tolist() for name in ours if BIAS in name},
        "expected biases": {name: theirs[name].tolist() for name in ours if BIAS in name},
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


def run_config(**changes):
    """A run whose sequences hold several documents."""
    values = {
        "model": config_of(4, "block", vocab_size=300),
        "optimizer": AdamW(learning_rate=3e-3),
        "schedule": Cosine(warmup_steps=2),
        "num_steps": 6,
        "batch_size": 8,
        "sequence_length": 24,
        "seed": 3,
    }
    return TrainConfig(**(values | changes))


def run(rank, group):
    """Trains a run's folder up to a step, as one rank of a pipeline."""
    parallel = Parallel(**group["parallel"])
    store = dist.FileStore(group["at"].removeprefix("file://"), parallel.num_ranks)

    def monitor(step, model):
        if step == group["until"]:
            signal.raise_signal(signal.SIGTERM)

    with joined(parallel, "cpu", store, rank) as ranks:
        result = train(
            run_config(**group["config"]),
            Corpus.load(group["corpus"]),
            group["run folder"],
            saving=SAVING,
            progress=False,
            monitor=monitor,
            executes=executes(ranks),
        )
    return {"step": result.step, "loss": result.loss}
