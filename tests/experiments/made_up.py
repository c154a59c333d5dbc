"""Studies for tests: a tiny text, cells of a tiny run, and outcomes that nobody has trained."""

from dataclasses import replace

from attention_residuals.data import StepDocuments, prepare, step_tokenizer
from attention_residuals.experiments import Cell, Number, Outcome, Table
from attention_residuals.experiments.measures import FinalLoss
from attention_residuals.experiments.recipes import SMOKE
from attention_residuals.experiments.results import DONE
from attention_residuals.layers.residual import AttnRes, StandardResidual

ARMS = {"standard": StandardResidual(), "block": AttnRes(sublayers_per_block=2)}
VOCABULARY = step_tokenizer().vocab_size


def small_corpus(folder):
    return prepare(StepDocuments(num_documents=300), folder, tokenizer=step_tokenizer())


def cell(arm="block", seed=0, *, measure=None, stage="main", setting="", **changes):
    recipe = replace(SMOKE, **changes)
    return Cell(
        stage=stage,
        arm=arm,
        setting=setting,
        text="text",
        train=recipe.train_config(ARMS[arm], seed=seed, vocab_size=VOCABULARY),
        measure=measure or FinalLoss(),
    )


def outcome(of, loss, *more, config="c0", flops=1e9):
    """Is what a run would have found, with the loss falling to ``loss`` from twice that."""
    steps = of.train.num_steps
    numbers = (
        Number("parameters", 1000.0),
        Number("parameters of the rule", 10.0),
        Number("training FLOP", flops),
        Number("validation loss", 2 * loss, max(1, steps // 2)),
        Number("validation loss", loss, steps),
    )
    return Outcome(key=of.key, config=config, status=DONE, numbers=(*numbers, *more))


def table(outcomes):
    return Table({one.key: one for one in outcomes})
