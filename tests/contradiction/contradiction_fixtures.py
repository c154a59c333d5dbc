"""A study that takes seconds, and measurements with an effect that was put there."""

from dataclasses import replace

import numpy as np
import torch

from attention_residuals.contradiction import Evidence, Measured, Study
from attention_residuals.contradiction.passes import ROUTING, SHARES
from attention_residuals.data.synthetic import StepDocuments, step_tokenizer
from attention_residuals.layers.residual import AttnRes
from attention_residuals.models import DecoderConfig
from attention_residuals.models.building import build
from attention_residuals.train import Cosine, TrainConfig

MODEL = DecoderConfig(
    vocab_size=step_tokenizer().vocab_size,
    num_layers=3,
    width=16,
    num_heads=1,
    num_kv_heads=1,
    head_width=16,
    mlp_width=32,
    max_tokens=96,
    residual=AttnRes(sublayers_per_block=2),
)
STUDY = Study(
    train=TrainConfig(
        model=MODEL, schedule=Cosine(warmup_steps=1), num_steps=3, batch_size=2, sequence_length=64
    ),
    documents=StepDocuments(num_documents=200, families=("variables",)),
    seeds=(0, 1),
    num_steps=3,
    pilot_items=16,
    confirm_items=16,
    control_items=16,
    causal_items=16,
    num_routes=2,
    num_random=3,
    num_draws=300,
)
SMALL = replace(STUDY, seeds=(0,))


def model_with(residual=None, *, queries=True, seed=0):
    """Makes a small model, with pseudo-queries at random unless it should route every text alike."""
    torch.manual_seed(seed)
    model = build(replace(MODEL, residual=residual or MODEL.residual)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.mul_(8)  # fresh models attend to so little that texts hardly differ
        if queries and name.endswith("pseudo_query"):
            parameter.normal_()
    return model


def made_up(
    *, effect=0.0, per_nat=0.0, cost=4.0, knows=True, items=64, clusters=16, seed=0, rare=4.0, layers=6
) -> Measured:
    """Numbers of a model whose clr shifts by ``effect`` after a contradiction, and by ``per_nat`` for surprise."""
    rng = np.random.default_rng(seed)
    sites = tuple(f"L{layer}.{kind}" for layer in range(layers) for kind in ("attention", "mlp"))[1:]
    cells = tuple(f"{site} < {source}" for site in (*sites, "output") for source in ("embedding", "B1"))
    sites = (*sites, "output")
    wrong = np.array([[0.0, 1.0], [1.0, 0.0]])
    size, near = (items, 2, 2), rng.normal(size=(items, 2, 2, 1, 1))
    surprisal = 1 + wrong * cost + rng.normal(size=size) * 0.3
    remark = np.array([1.0, 1.0 + rare]) + rng.normal(size=size) * 0.3
    shift = (effect * wrong + per_nat * surprisal)[..., None, None]
    arrays = {
        name: rng.normal(size=(*size, 4, len(sites))) * 0.3 + 0.3 * near for name in (*ROUTING, *SHARES)
    }
    arrays["clr"] = arrays["clr"] + shift
    arrays["remark clr"] = rng.normal(size=(*size, 4, len(sites))) * 0.3 + per_nat * remark[..., None, None]
    arrays |= {f"cell {name}": rng.normal(size=(*size, len(cells))) for name in ("weight", "norm share")}
    arrays["cell projection share"] = rng.normal(size=(*size, len(cells)))
    arrays["cell clr"] = rng.normal(size=(*size, len(cells))) * 0.3
    arrays["cell clr"][..., cells.index("L2.attention < embedding")] += effect * wrong
    sign = 2 * wrong - 1
    arrays |= {
        "surprisal": surprisal,
        "remark surprisal": remark,
        "verdict": (3 * sign if knows else 0) + rng.normal(size=size),
        "answer": 3 - wrong + rng.normal(size=size) * 0.1,
        "right": np.ones(size) if knows else rng.integers(0, 2, size=size) * 1.0,
        "misled": np.zeros(size),
        "state": (2 * sign[None, ..., None] if knows else 0) * np.eye(5)[0] + rng.normal(size=(*size, 5)),
    }
    return Measured(
        items=tuple(f"item {number}" for number in range(items)),
        clusters=tuple(
            f"family{number % clusters % 2}/template{number % clusters}" for number in range(items)
        ),
        sites=sites,
        cells=cells,
        arrays={name: np.asarray(array, np.float32) for name, array in arrays.items()},
        about={
            "model": "m",
            "items": "i",
            "code": "c",
            "tokens_before_plant": 9,
        },
    )


def evidence(main, **others):
    """Makes what controls of one seed look at, around a main set."""
    names = ("distance 1", "distance 3", "copied", "copied, distance 1", "copied, distance 3")
    sets = {name: made_up(seed=number + 1) for number, name in enumerate((*names, "irrelevant"))}
    sets |= {"main": main, "corrected": made_up(seed=21), "held out": made_up(effect=0.3, seed=22)}
    still = made_up(seed=31)
    still.arrays["cell clr"] = np.zeros_like(still.arrays["cell clr"])
    models = {"zero-query": still, "untrained": still, "static": still, "standard": made_up(seed=32)}
    return Evidence({**sets, **others}, models, 2000)
