"""What decides a training run, and what is mere housekeeping."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from attention_residuals.errors import ConfigError
from attention_residuals.models import MODEL_CONFIGS, ConvertedConfig, DecoderConfig
from attention_residuals.train.optimizer import AdamW, Muon
from attention_residuals.train.schedule import WSD, Cosine, Segment, Segments

__all__ = ["TRAIN_CONFIGS", "Precision", "Saving", "TrainConfig", "first_difference"]

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides what a run computes, but for the corpus and the number of threads.

    Args:
        model: The model's shape and residual rule.
        optimizer: ``AdamW`` or ``Muon``.
        schedule: ``Cosine``, ``WSD`` or ``Segments``: the learning rate as a share of the optimizer's.
        num_steps: Optimizer steps, >= 1.
        batch_size: Sequences per step, >= 1.
        micro_batch_size: Sequences per forward pass, a divisor of ``batch_size``; None takes all at once.
        sequence_length: Tokens per sequence, 1 to the model's ``max_tokens``.
        seed: Of the initial weights and the order of the data, 0 to 2**63 - 1.
        shuffled_within: Sequences are visited fewer places than this from their own in the corpus, whose order
            is one to learn in, >= 0; None shuffles all of them.
        precision: ``"bfloat16"`` runs matrix products under autocast; weights stay float32.
        compile: Compile the model's training pass.
        cross_documents: Let tokens attend to the documents before theirs in the same sequence.
        checkpoint_activations: Keep less for backward and compute it again.

    Raises:
        ConfigError: A value out of range, or values that contradict each other.

    Example:
        >>> from attention_residuals.models import presets
        >>> config = TrainConfig(model=presets.scaled(2, vocab_size=300), num_steps=10)
        >>> config.learning_rate(10)
        0.0001
    """

    model: DecoderConfig | ConvertedConfig
    optimizer: AdamW | Muon = field(default_factory=AdamW)
    schedule: Cosine | WSD | Segments = field(default_factory=Cosine)
    num_steps: int
    batch_size: int = 16
    micro_batch_size: int | None = None
    sequence_length: int = 256
    seed: int = 0
    shuffled_within: int | None = None
    precision: Precision = "float32"
    compile: bool = False
    cross_documents: bool = False
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        self._check_types()
        given = () if self.micro_batch_size is None else ("micro_batch_size",)
        _check_at_least(1, self, "num_steps", "batch_size", "sequence_length", *given)
        _check_at_least(0, self, "seed", *(() if self.shuffled_within is None else ("shuffled_within",)))
        if self.seed >= 2**63:
            raise ConfigError(got=f"seed={self.seed}", expected="at most 2**63 - 1", do="take a smaller seed")
        micro = self.sequences_per_pass
        if self.batch_size % micro:
            raise ConfigError(
                got=f"micro_batch_size={micro} with batch_size={self.batch_size}",
                expected="a divisor of batch_size",
                do=f"use one of {[n for n in range(1, self.batch_size + 1) if self.batch_size % n == 0]}",
            )
        if self.sequence_length > self.model.max_tokens:
            raise ConfigError(
                got=f"sequence_length={self.sequence_length} with max_tokens={self.model.max_tokens}",
                expected="sequences that the model accepts",
                do="shorten the sequences, or raise the model's max_tokens",
            )
        if self.num_steps < self.schedule.least_steps:
            raise ConfigError(
                got=f"num_steps={self.num_steps} with {self.schedule}",
                expected=f"at least {self.schedule.least_steps} steps, the warm-up and decay",
                do="train longer, or shorten warm-up and decay",
            )

    @property
    def sequences_per_pass(self) -> int:
        """The micro-batch size in use."""
        return self.batch_size if self.micro_batch_size is None else self.micro_batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees."""
        return self.batch_size * self.sequence_length

    def learning_rate(self, step: int) -> float:
        """Returns the learning rate of an optimizer step, 1 to ``num_steps``."""
        return self.optimizer.learning_rate * self.schedule.fraction(step, self.num_steps)

    def _check_types(self) -> None:
        for name, accepted in {
            "model": (DecoderConfig, ConvertedConfig),
            "optimizer": (AdamW, Muon),
            "schedule": (Cosine, WSD, Segments),
        }.items():
            if not isinstance(getattr(self, name), accepted):
                raise ConfigError(
                    got=f"{name}={getattr(self, name)!r}",
                    expected=" or ".join(choice.__name__ for choice in accepted),
                    do=f"pass a config of that type as {name}",
                )
        if self.precision not in ("float32", "bfloat16"):
            raise ConfigError(
                got=f"precision={self.precision!r}",
                expected="'float32' or 'bfloat16'",
                do="float32 suits most CPUs",
            )


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Housekeeping of a run, which changes no weight: when to save, to evaluate and to log.

    Args:
        every: Steps between checkpoints, >= 1; the last step is always saved.
        keep: Checkpoints to keep, >= 1; older ones are removed once a new one is safe.
        evaluate_every: Steps between evaluations on the validation split, >= 1; the last step always is.
        evaluate_batches: Batches of the validation split to use, from its beginning, of as many sequences as a
            forward pass has (micro_batch_size); None uses all.
        log_every: Steps between rows of metrics, >= 1; the last step always has one.

    Raises:
        ConfigError: A value out of range.

    Example:
        >>> Saving(every=500).keep
        2
    """

    every: int = 100
    keep: int = 2
    evaluate_every: int = 100
    evaluate_batches: int | None = 32
    log_every: int = 10

    def __post_init__(self) -> None:
        limited = () if self.evaluate_batches is None else ("evaluate_batches",)
        _check_at_least(1, self, "every", "keep", "evaluate_every", "log_every", *limited)


TRAIN_CONFIGS: dict[str, type] = {
    **MODEL_CONFIGS,
    **{config.__name__: config for config in (TrainConfig, AdamW, Muon, Cosine, WSD, Segment, Segments)},
}
"""The types that a run's config.json may hold."""


def first_difference(there: Any, here: Any, name: str = "") -> str | None:
    """Names the first value in which two encoded configs differ, or returns None.

    Example:
        >>> first_difference({"model": {"width": 32}}, {"model": {"width": 64}})
        'model.width is 32 there and 64 here'
    """
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        return None if there == here else f"{name} is {there!r} there and {here!r} here"
    for key in [*here, *(key for key in there if key not in here)]:
        inner = f"{name}.{key}" if name else str(key)
        found = first_difference(there.get(key), here.get(key), inner)
        if found is not None:
            return found
    return None


def _check_at_least(least: int, config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < least:  # True is an int, and no number
            raise ConfigError(
                got=f"{name}={value!r}",
                expected=f"a whole number, {least} or more",
                do=f"pass such a number as {name}",
            )
