"""How a training run is spread over processes."""

import math
from dataclasses import dataclass

from attention_residuals.errors import ConfigError, is_count, is_finite
from attention_residuals.models import DecoderConfig
from attention_residuals.parallel.plan import even_layers
from attention_residuals.parallel.schedules import schedule_named
from attention_residuals.train.config import TrainConfig

__all__ = ["Parallel"]

_COUNTS = ("replicate", "shard", "pipeline", "tensor", "stages_per_rank", "microbatches")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How many processes train together, and how; changes no weight beyond rounding.

    replicate x shard x pipeline x tensor processes (ranks) are needed. The sequences of a batch are spread over
    replicate x shard of them.

    Args:
        replicate: Copies of the model, each with its share of the batch (DDP, or the outer axis of FSDP2).
        shard: Ranks over which one copy's weights, gradients and optimizer are spread (FSDP2).
        pipeline: Ranks of one pipeline, each with some of the layers.
        tensor: Ranks over which the matrices of attention and MLP are spread; divides heads, key/value heads
            and MLP width.
        schedule: Of the pipeline: GPipe, 1F1B, LoopedBFS, Interleaved1F1B, ...
        stages_per_rank: Stages of the pipeline on each rank.
        microbatches: Into which a pipeline cuts what it is given at once; divides micro_batch_size.
        timeout_seconds: How long a rank may keep the others waiting before the run ends.

    Raises:
        ConfigError: A number out of range.

    Example:
        >>> Parallel(shard=2, pipeline=2, microbatches=4).num_ranks
        4
    """

    replicate: int = 1
    shard: int = 1
    pipeline: int = 1
    tensor: int = 1
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    microbatches: int = 1
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            if not is_count(getattr(self, name)):
                raise ConfigError(
                    got=f"{name}={getattr(self, name)!r}",
                    expected="a whole number, 1 or more",
                    do="1 is: not at all",
                )
        if not is_finite(self.timeout_seconds) or self.timeout_seconds <= 0:
            raise ConfigError(
                got=f"timeout_seconds={self.timeout_seconds!r}",
                expected="a number above 0",
                do="take more than the slowest step, with the first one's start",
            )
        schedule_named(self.schedule)

    @property
    def num_ranks(self) -> int:
        """Processes in all."""
        return math.prod((self.replicate, self.shard, self.pipeline, self.tensor))

    @property
    def num_data(self) -> int:
        """Over how many ranks a batch's sequences are spread."""
        return self.replicate * self.shard

    def check(self, config: TrainConfig) -> None:
        """Checks that a run can be spread so.

        Raises:
            ConfigError: Batch, layers or heads do not divide, or a kind of model or of training that one process
                has to do alone.
        """
        if self.num_ranks == 1:
            return
        if config.compile:
            raise _refused("compile=True with several ranks", "leave compile out, or train in one process")
        if config.batch_size % self.num_data:
            raise ConfigError(
                got=f"batch_size={config.batch_size} for replicate x shard = {self.num_data} ranks",
                expected="a multiple, so that all have the same share",
                do=f"use a batch of {-(-config.batch_size // self.num_data) * self.num_data}",
            )
        if isinstance(config.model, DecoderConfig):
            self._check_tensor(config.model)
        elif self.num_ranks > self.pipeline:
            # A stage has all of its experts' tokens; copies and shards would have to count them together.
            raise _refused(
                "replicate, shard or tensor for a model of Transformers", "use pipeline alone, or a Decoder"
            )
        if self.pipeline > 1:
            self._check_pipeline(config)

    def per_pass(self, config: TrainConfig) -> int:
        """Returns how many sequences a rank is given at once."""
        return min(config.sequences_per_pass, config.batch_size // self.num_data)

    def _check_tensor(self, model: DecoderConfig) -> None:
        for name in ("num_heads", "num_kv_heads", "mlp_width"):
            if getattr(model, name) % self.tensor:
                raise ConfigError(
                    got=f"tensor={self.tensor} with {name}={getattr(model, name)}",
                    expected=f"a divisor of {name}",
                    do="use fewer ranks for tensor, and more for shard",
                )

    def _check_pipeline(self, config: TrainConfig) -> None:
        if self.tensor > 1:
            raise _refused("pipeline together with tensor", "use shard together with either of them")
        if self.num_data > 1 and schedule_named(self.schedule).splits_backward:
            # Under FSDP2 of PyTorch 2.13, the split backward of a stage loses gradients without a word.
            raise _refused(
                f"{self.schedule} together with shard or replicate", "use 1F1B, Interleaved1F1B or LoopedBFS"
            )
        even_layers(config.model.num_layers, self.pipeline * self.stages_per_rank)
        schedule_named(self.schedule).check(self.stages_per_rank, self.pipeline, self.microbatches)
        share, size = config.batch_size // self.num_data, self.per_pass(config)
        if share % size or size % self.microbatches:
            raise ConfigError(
                got=f"a share of {share} sequences, {size} at once, for {self.microbatches} microbatches",
                expected="a share of whole passes, and passes of microbatches of the same size",
                do="choose batch_size and micro_batch_size so that they divide, or other microbatches",
            )


def _refused(what: str, do: str) -> ConfigError:
    return ConfigError(got=what, expected="what has been tested", do=do)
