"""One optimizer step: a model with its optimizer and its data."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from attention_residuals.data import Batches, Corpus, bits_per_byte
from attention_residuals.errors import DataError, NonFiniteError
from attention_residuals.models import LanguageModel, build
from attention_residuals.models.weights import load_weights
from attention_residuals.train.checkpoint import last_saved
from attention_residuals.train.config import TrainConfig
from attention_residuals.train.evaluation import Evaluation, measure
from attention_residuals.train.execution import Executes, InProcess
from attention_residuals.train.metrics import Extent
from attention_residuals.train.optimizer import Optimizer, local

__all__ = ["Step", "Trainer", "deterministic", "initial_model"]


class Step(NamedTuple):
    """What one optimizer step measured, on its own batch and before its update."""

    loss: float
    """Nats per token."""
    bits_per_byte: float | None
    """None where the targets stand for no byte."""
    learning_rate: float
    grad_norm: float
    """Of all gradients together, before clipping."""
    seconds: float


def _check_one_pass(config: TrainConfig, num_windows: int) -> None:
    """Refuses to go back to the first texts of a course at the end of it: what was learnt since is soon lost."""
    visited = config.num_steps * config.batch_size
    if config.shuffled_within is not None and visited > num_windows:
        raise DataError(
            got=f"{visited} sequences from a corpus of {num_windows} with shuffled_within={config.shuffled_within}",
            expected="one pass at most, since the order of the corpus is one to learn in",
            do=f"prepare more text, or train for {num_windows // config.batch_size} steps",
        )


def initial_model(config: TrainConfig) -> LanguageModel:
    """Makes the model that a run begins with, unless it is given other weights.

    Args:
        config: Of the run; its seed decides every weight.

    Example:
        >>> from attention_residuals.models import presets
        >>> config = TrainConfig(model=presets.scaled(2, vocab_size=260), num_steps=9, seed=7)
        >>> one, same = initial_model(config), initial_model(config)
        >>> torch.equal(one.embedding.weight, same.embedding.weight)
        True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return build(config.model, checkpoint_activations=config.checkpoint_activations)


class Trainer:
    """A new model, what steps it, and the order of its data: all of them functions of the config.

    Args:
        config: What to compute.
        corpus: What to learn from.
        folder: Of the run, where ``save`` writes.
        device: Where to train.
        start: The folder of a saved model with the weights to begin with; drawn at random by default.
        executes: Who computes the passes: this process alone by default.

    Raises:
        DataError: There are too few tokens for one sequence, or for one pass in an order to learn in.
    """

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        folder: Path,
        device: str,
        start: Path | None = None,
        executes: Executes = InProcess,
    ) -> None:
        self.config, self.corpus, self.folder = config, corpus, folder
        self.bytes_per_token = corpus.tokenizer.bytes_per_token
        self.batches = Batches(
            corpus.train,
            sequence_length=config.sequence_length,
            batch_size=config.batch_size,
            seed=config.seed,
            device=device,
            end_of_text=corpus.tokenizer.end_of_text,
            scored=corpus.train_scored,
            shuffled_within=config.shuffled_within,
        )
        _check_one_pass(config, self.batches.num_windows)
        model = initial_model(config)
        if start is not None:
            load_weights(model.float(), start)
        if config.optimizer.trains == "residual":
            _freeze_all_but_the_rule(model)
        self.execution = executes(model, config, device)
        self.model = self.execution.model
        named = self.execution.named_parameters()
        self.optimizer = Optimizer(named, config.optimizer, muon=self.execution.muon)

    def step(self, step: int) -> Step:
        """Makes one optimizer step; 1 is the first.

        Raises:
            NonFiniteError: Loss or gradients are not finite; no weight was changed.
        """
        begin = time.perf_counter()
        self.execution.begin(step)
        batch = self.batches.at(step - 1)
        with self._finite(step):
            nats = self.execution.backward(batch)
        parameters = self.optimizer.parameters
        norm = self.execution.gradient_norm(parameters)
        if not math.isfinite(nats) or not math.isfinite(norm.item()):
            raise self._broken(step, f"a loss of {nats} nats and a gradient norm of {norm.item()}")
        if self.config.optimizer.clip_norm is not None:
            self.execution.clip(parameters, self.config.optimizer.clip_norm, norm)
        learning_rate = self.config.learning_rate(step)
        self.optimizer.step(learning_rate)
        self.model.settle()
        num_bytes = int(self.bytes_per_token[batch.scored_ids].sum())
        return Step(
            loss=nats / max(1, batch.num_scored),
            bits_per_byte=bits_per_byte(nats, num_bytes) if num_bytes else None,
            learning_rate=learning_rate,
            grad_norm=norm.item(),
            seconds=time.perf_counter() - begin,
        )

    def evaluate(self, step: int, max_batches: int | None) -> Evaluation:
        """Evaluates on the validation split.

        Raises:
            NonFiniteError: The loss is not finite.
        """
        with self._finite(step):
            found = measure(
                self.execution.nats,
                self.corpus.valid,
                bytes_per_token=self.bytes_per_token,
                sequence_length=self.config.sequence_length,
                batch_size=self.config.sequences_per_pass,
                max_batches=max_batches,
                device=self.batches.device,
                end_of_text=self.corpus.tokenizer.end_of_text,
                scored=self.corpus.valid_scored,
            )
        if not math.isfinite(found.loss):
            raise self._broken(step, f"a validation loss of {found.loss}")
        return found

    def save(self, step: int, *, metrics: Extent, keep: int) -> None:
        """Writes a checkpoint, which remembers the rows of metrics that belong to it.

        Raises:
            NonFiniteError: A weight is not finite; nothing is written.
            CheckpointError: It cannot be written.
        """
        named = self.execution.named_parameters()
        broken = [name for name, value in named if not local(value).isfinite().all()]
        if self.execution.any(bool(broken)):
            where = broken[0] if broken else "another rank"
            raise self._broken(step, f"a weight of {where} that is not finite")
        self.execution.save(
            self.folder,
            step=step,
            optimizer=self.optimizer,
            config=self.config,
            metrics=metrics,
            keep=keep,
        )

    @contextmanager
    def _finite(self, step: int) -> Iterator[None]:
        """Adds the step to what a depth read says about its sources."""
        try:
            yield
        except NonFiniteError as error:
            raise self._broken(step, error.got) from error

    def _broken(self, step: int, what: str) -> NonFiniteError:
        self.execution.settle()  # so that what is being written counts as saved
        rate = self.config.learning_rate(step)
        return NonFiniteError(
            got=f"{what}, at step {step} with learning rate {rate:.3g}",
            expected=f"finite numbers; the step was not saved, {last_saved(self.folder)}",
            do="the same run would break again: lower learning_rate or clip_norm and name another folder",
        )


def _freeze_all_but_the_rule(model: LanguageModel) -> None:
    own = set(model.residual.parameters())
    for parameter in model.parameters():
        if parameter not in own:
            parameter.requires_grad_(False)


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """Takes deterministic algorithms; elsewhere than on the CPU, warns where there is none."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=device != "cpu")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
