"""A study from its texts to its report: prepared, priced, queued, and written up."""

from collections.abc import Callable
from pathlib import Path

from attention_residuals.data import Corpus, prepare
from attention_residuals.errors import ConfigError
from attention_residuals.experiments.cost import UTILISATION, Cost, Hardware, cost_of
from attention_residuals.experiments.experiment import Experiment
from attention_residuals.experiments.launchers import Launcher, Torchrun
from attention_residuals.experiments.queue import QueueEnd, run_queue
from attention_residuals.experiments.results import Results
from attention_residuals.experiments.worker import corpus_folder

__all__ = ["foreseen_cost", "opened_texts", "price", "run_experiment"]

USUAL_VOCABULARY = 163_840
"""Of the paper's family of models, for what a study costs before its text is known."""


def opened_texts(experiment: Experiment, folder: Path, brought: Path | None = None) -> dict[str, Corpus]:
    """Prepares the texts of a study, or opens them.

    Args:
        experiment: The study.
        folder: Receives corpora/.
        brought: The folder of a prepared corpus, for studies that do not bring their own text.

    Raises:
        ConfigError: The study needs a corpus and there is none, or brings its own and there is one.
    """
    found = {}
    for name, text in experiment.texts().items():
        if (text.source is None) != (brought is not None):
            needs = (
                "a prepared corpus" if text.source is None else "no corpus: this scale brings its own text"
            )
            raise ConfigError(
                got=f"--corpus {brought}" if brought else "no --corpus",
                expected=needs,
                do="prepare one with attention_residuals.data.prepare, and pass its folder as --corpus"
                if text.source is None
                else "leave --corpus out",
            )
        if text.source is None:
            assert brought is not None
            found[name] = Corpus.load(brought)
        else:
            place = corpus_folder(folder, name)
            found[name] = prepare(
                text.source, place, vocab_size=text.vocab_size, tokenizer=text.tokenizer, valid_fraction=0.05
            )
    return found


def foreseen_cost(experiment: Experiment) -> Cost:
    """Says what all runs of a study cost, as far as can be foreseen.

    Args:
        experiment: The study. Vocabularies are as large as its texts ask for, or as that of the paper's models.
    """
    vocab_sizes = {
        name: text.vocab_size or (text.tokenizer.vocab_size if text.tokenizer else USUAL_VOCABULARY)
        for name, text in experiment.texts().items()
    }
    return cost_of(cell.train for cell in experiment.foreseen(vocab_sizes))


def price(cost: Cost, hardware: Hardware) -> str:
    """Says in words what runs cost.

    Example:
        >>> print(price(Cost(2, 1_000_000, 3.6e15), Hardware("1 x chip", 1e12)))
        2 runs, 1.00e+06 tokens, 3.60e+15 FLOP; 2.5 hours on what is visible here (1 x chip: 1 TFLOP/s measured on a
        large matrix product, of which training is taken to reach 40 %; small models reach less)
    """
    hours = cost.hours(hardware)
    told = f"{hours:,.0f} hours ({hours / 24 / 365.25:,.1f} years)" if hours > 5000 else f"{hours:.1f} hours"
    return (
        f"{cost.num_runs} runs, {cost.tokens:.2e} tokens, {cost.flops:.2e} FLOP; {told} on what is visible here "
        f"({hardware.name}: {hardware.speed / 1e12:.3g} TFLOP/s measured on a large matrix product, of which training "
        f"is taken to reach {100 * UTILISATION:.0f} %; small models reach less)"
    )


def run_experiment(
    experiment: Experiment,
    folder: Path,
    results: Path,
    *,
    corpus: Path | None = None,
    workers: int = 2,
    launcher: Launcher | None = None,
    note: Callable[[str], None] = lambda _: None,
    again: bool = False,
) -> QueueEnd:
    """Does all runs of a study that have no outcome yet.

    Args:
        experiment: The study.
        folder: Receives corpora/, cells/, locks/, logs/ and runs/.
        results: The CSV file of outcomes.
        corpus: See ``opened_texts``.
        workers: See ``run_queue``, as the rest.
        launcher: Starts runs.
        note: Is told what happens.
        again: Try those once more that ended without numbers.

    Raises:
        ConfigError: An outcome is of another config or text, or a run cannot be spread as the launcher would.
    """
    corpora = opened_texts(experiment, folder, corpus)
    sizes = {name: one.vocab_size for name, one in corpora.items()}
    if isinstance(launcher, Torchrun):
        for cell in experiment.foreseen(sizes):
            launcher.parallel.check(cell.train)
    return run_queue(
        lambda table: experiment.cells(sizes, table),
        corpora,
        folder,
        Results(results),
        workers=workers,
        launcher=launcher,
        note=note,
        again=again,
    )
