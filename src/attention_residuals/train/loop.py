"""The training loop: step, log, evaluate, save."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attention_residuals.configs import encode
from attention_residuals.data import Corpus
from attention_residuals.errors import ConfigError
from attention_residuals.models import LanguageModel
from attention_residuals.train.checkpoint import checkpoints, newest_checkpoint
from attention_residuals.train.config import Saving, TrainConfig
from attention_residuals.train.execution import Executes, InProcess
from attention_residuals.train.metrics import NO_ROWS, Metrics, Rows
from attention_residuals.train.progress import Reporter
from attention_residuals.train.run_folder import check_folder, claim, identity, record_start
from attention_residuals.train.signals import StopSignals
from attention_residuals.train.trainer import Trainer, deterministic

__all__ = ["Monitor", "Result", "train"]

Monitor = Callable[[int, LanguageModel], None]
"""Is called with the step, 1 for the first, and the model as that step left it."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended.

    Args:
        folder: Of the run.
        step: Steps that are done and saved.
        interrupted: SIGINT or SIGTERM stopped it early; the same command goes on.
        loss: Of the last evaluation, nats per token; None where none was reached.
        bits_per_byte: Of the last evaluation.
    """

    folder: Path
    step: int
    interrupted: bool
    loss: float | None
    bits_per_byte: float | None


def train(
    config: TrainConfig,
    corpus: Corpus,
    folder: Path | str,
    *,
    saving: Saving | None = None,
    progress: bool = True,
    monitor: Monitor | None = None,
    device: str = "cpu",
    start: Path | str | None = None,
    executes: Executes = InProcess,
) -> Result:
    r"""Trains a model, or goes on where the same command stopped.

    On the CPU with the same number of threads, a run that was killed at any moment and started again ends
    with the same weights and the same metrics, bit for bit (times apart), as one that was not. SIGINT and
    SIGTERM finish the step, save and return; a second SIGINT raises KeyboardInterrupt at once.

    Args:
        config: What to compute.
        corpus: What to learn from.
        folder: Of the run: new, empty, or of this very run. Receives config.json, environment.json,
            tokenizer.json, metrics.jsonl and checkpoints/.
        saving: When to save, evaluate and log; default ``Saving()``.
        progress: Show progress on stderr.
        monitor: Is called after each step and before the step is saved, so a resumed run calls it again
            for the steps that it repeats. Must not change the model.
        device: Where to train, such as ``"cuda"``.
        start: The folder of a saved model of the same config, whose weights the run begins with; needed
            again to resume, and drawn at random by default.
        executes: Who computes the passes: this process alone, or it as one of several ranks, each of which
            calls this function with the same arguments (``parallel.launch`` makes it).

    Returns:
        How it ended; a finished run returns its result without training.

    Raises:
        CheckpointError: The folder holds something else, a checkpoint or metrics.jsonl is damaged, or the
            disk is full.
        ConfigError: The corpus does not fit the model.
        DataError: The corpus is damaged or too short.
        NonFiniteError: Loss or gradients are not finite; the last good checkpoint stays.

    Example:
        >>> import tempfile
        >>> from attention_residuals.data import TextFiles, prepare
        >>> from attention_residuals.models import presets
        >>> place = Path(tempfile.mkdtemp())
        >>> _ = (place / "tale.txt").write_text("\n".join(f"Once {n} ducks swam." for n in range(99)))
        >>> source = TextFiles(path=str(place / "tale.txt"), separator="\n")
        >>> corpus = prepare(source, place / "corpus", vocab_size=260, valid_fraction=0.2)
        >>> model = presets.scaled(2, vocab_size=260)
        >>> config = TrainConfig(model=model, num_steps=2, batch_size=2, sequence_length=16)
        >>> result = train(config, corpus, place / "run", progress=False)
        >>> result.step, result.interrupted
        (2, False)
    """
    saving, folder = saving or Saving(), Path(folder)
    _check_vocabulary(config, corpus)
    begin = None if start is None else Path(start)
    trainer = Trainer(config, corpus, folder, device, begin, executes)
    ranks = trainer.execution
    ours = identity(config, corpus, begin)
    ranks.agree({**ours, "saving": encode(saving)})
    if ranks.is_lead:
        check_folder(folder, ours)
    corpus.verify()
    shown = progress and ranks.is_lead
    with (
        Metrics(folder) if ranks.is_lead else Rows(folder) as metrics,
        Reporter(num_steps=config.num_steps, shown=shown) as reporter,
    ):
        if ranks.is_lead:
            claim(folder, ours)
            newest_checkpoint(folder, config)  # verifies it; the other ranks wait for that
        ranks.any(False)
        step, extent, newest = 0, NO_ROWS, checkpoints(folder)[-1:]
        sees = {"the run's config.json is there": (folder / "config.json").exists()}
        ranks.agree({**sees, "newest checkpoint": [one.name for one in newest]})
        for checkpoint in newest:
            step, extent = ranks.restore(checkpoint, trainer.optimizer)
        metrics.cut(extent)
        if step == config.num_steps:
            reporter.note(f"{folder} is finished: all {step} steps are done")
            return _result(folder, step, config, metrics)
        changed = []
        if ranks.is_lead:
            changed = record_start(
                folder, corpus, step=step, seed=config.seed, device=device, ranks=ranks.describe()
            )
        reporter.begin(step)
        if changed:
            reporter.note(f"the last bits may differ, since the run began with {'; '.join(changed)}")
        try:
            with deterministic(device), StopSignals() as stop:
                step = _run(trainer, step, saving, metrics, reporter, monitor, stop)
                ranks.settle()
        finally:
            ranks.abandon()  # the folder stays locked as long as something is written there
        result = _result(folder, step, config, metrics)
        if result.interrupted:
            reporter.note(f"stopped and saved at step {step}; the same command goes on")
        return result


def _run(
    trainer: Trainer,
    start: int,
    saving: Saving,
    metrics: Rows,
    reporter: Reporter,
    monitor: Monitor | None,
    stop: StopSignals,
) -> int:
    """Runs until the end or until asked to stop, and returns the last step."""
    config, num_steps = trainer.config, trainer.config.num_steps
    seconds = metrics.last("train", "seconds") or 0.0
    seconds_at_row, step_at_row = seconds, start
    for step in range(start + 1, num_steps + 1):
        done = trainer.step(step)
        seconds += done.seconds
        speed = (step - step_at_row) * config.tokens_per_step / (seconds - seconds_at_row)
        reporter.step(step, loss=done.loss, bits_per_byte=done.bits_per_byte, tokens_per_second=speed)
        is_last, tokens = step == num_steps, step * config.tokens_per_step
        if is_last or step % saving.log_every == 0:
            times = {"tokens_per_second": speed, "seconds": seconds}
            metrics.append({"split": "train", "step": step, "tokens": tokens, **done._asdict(), **times})
            seconds_at_row, step_at_row = seconds, step
        if monitor is not None:
            monitor(step, trainer.model)
        if is_last or step % saving.evaluate_every == 0:
            found = trainer.evaluate(step, saving.evaluate_batches)
            numbers = {"loss": found.loss, "bits_per_byte": found.bits_per_byte}
            metrics.append({"split": "valid", "step": step, "tokens": tokens, **numbers})
        stopping = trainer.execution.any(stop.requested)
        if is_last or stopping or step % saving.every == 0:
            # Before the checkpoint, so that no checkpoint is ever ahead of its rows.
            extent = metrics.sync()
            trainer.save(step, metrics=extent, keep=saving.keep)
        if stopping:
            return step
    return num_steps


def _result(folder: Path, step: int, config: TrainConfig, metrics: Rows) -> Result:
    return Result(
        folder=folder,
        step=step,
        interrupted=step < config.num_steps,
        loss=metrics.last("valid", "loss"),
        bits_per_byte=metrics.last("valid", "bits_per_byte"),
    )


def _check_vocabulary(config: TrainConfig, corpus: Corpus) -> None:
    if config.model.vocab_size < corpus.vocab_size:
        raise ConfigError(
            got=f"a model with vocab_size={config.model.vocab_size} for a corpus of {corpus.vocab_size} ids",
            expected="a vocabulary that holds every id",
            do=f"make the model with vocab_size={corpus.vocab_size}",
        )
