"""How a training run is spread over processes."""

import math
import os
from dataclasses import dataclass

from attention_residuals.errors import ConfigError, is_count, is_finite
from attention_residuals.models import DecoderConfig
from attention_residuals.models.language_model import ModelConfig
from attention_residuals.parallel.plan import even_layers
from attention_residuals.parallel.schedules import schedule_named
from attention_residuals.train.config import TrainConfig

__all__ = ["Parallel"]

_COUNTS = ("replicate", "shard", "pipeline", "tensor", "stages_per_rank")


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
        stages_per_rank: Stages of the pipeline on each rank: 1 for GPipe and 1F1B, 2 for ZBVZeroBubble and
            DualPipeV.
        microbatches: Into which a pipeline cuts what it is given at once; divides micro_batch_size. By default
            as many as the pipeline has stages.
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
    microbatches: int | None = None
    timeout_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *(() if self.microbatches is None else ("microbatches",))):
            if not is_count(getattr(self, name)):
                raise ConfigError(
                    got=f"{name}={getattr(self, name)!r}",
                    expected="a whole number, 1 or more",
                    do=f"leave {name} out, or correct it",
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

    @property
    def num_microbatches(self) -> int:
        """Of a pipeline: as many as its stages where none were asked for."""
        return self.pipeline * self.stages_per_rank if self.microbatches is None else self.microbatches

    def check_world(self) -> None:
        """Checks that torchrun, where it has started this process, has started as many as are asked for.

        Raises:
            ConfigError: It has started more or fewer, so that each would train by itself or wait for ever.
        """
        number = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
        if number is not None and int(number) != self.num_ranks:
            raise ConfigError(
                got=f"{number} processes",
                expected=f"replicate x shard x pipeline x tensor = {self.num_ranks}",
                do=f"torchrun --nproc-per-node {self.num_ranks}, or other numbers, such as "
                f"--parallel.shard {number}",
            )

    def check(self, config: TrainConfig) -> None:
        """Checks that a run can be spread so.

        Raises:
            ConfigError: Batch, layers or heads do not divide, or a kind of model or of training that one process
                has to do alone.
        """
        self.check_model(config.model)
        if self.num_ranks == 1:
            return
        if config.compile:
            raise ConfigError(
                got="compile=True with several ranks",
                expected="one process; compiled steps of several have not been tested",
                do="leave compile out, or train in one process",
            )
        if config.batch_size % self.num_data:
            raise ConfigError(
                got=f"batch_size={config.batch_size} for replicate x shard = {self.num_data} ranks",
                expected="a multiple, so that all have the same share",
                do=f"use a batch of {-(-config.batch_size // self.num_data) * self.num_data}",
            )
        if self.pipeline > 1:
            self._check_microbatches(config)

    def check_model(self, model: ModelConfig) -> None:
        """Checks that a model can be spread so, whatever its batches.

        Raises:
            ConfigError: Layers or heads do not divide, a kind of model that one process has to train alone, or
                options of a pipeline without one.
        """
        if self.pipeline > 1 and self.tensor > 1:
            raise ConfigError(
                got="pipeline together with tensor",
                expected="one of the two; together they have not been tested",
                do="use shard together with either of them",
            )
        if isinstance(model, DecoderConfig):
            self._check_tensor(model)
        elif self.num_ranks > self.pipeline:
            raise ConfigError(
                got="replicate, shard or tensor for a model of Transformers",
                expected="a pipeline alone; copies and shards would have to count their experts' tokens together",
                do="use pipeline alone, or a Decoder",
            )
        if self.pipeline > 1:
            self._check_pipeline(model)
        else:
            self._check_no_pipeline()

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

    def _check_no_pipeline(self) -> None:
        usual = Parallel()
        for name in ("microbatches", "stages_per_rank", "schedule"):
            if getattr(self, name) != getattr(usual, name):
                raise ConfigError(
                    got=f"{name}={getattr(self, name)!r} without a pipeline",
                    expected=f"pipeline, 2 or more, together with {name}",
                    do=f"give pipeline too, or leave {name} out (micro_batch_size cuts a batch without a pipeline)",
                )

    def _check_pipeline(self, model: ModelConfig) -> None:
        if self.num_data > 1 and schedule_named(self.schedule).splits_backward:
            raise ConfigError(
                got=f"{self.schedule} together with shard or replicate",
                expected="a schedule that does not split backward: under FSDP2 of PyTorch 2.13 that loses gradients",
                do="use 1F1B, Interleaved1F1B or LoopedBFS",
            )
        even_layers(model.num_layers, self.pipeline * self.stages_per_rank)
        schedule_named(self.schedule).check(self.stages_per_rank, self.pipeline, self.num_microbatches)

    def _check_microbatches(self, config: TrainConfig) -> None:
        share, size = config.batch_size // self.num_data, self.per_pass(config)
        if share % size or size % self.num_microbatches:
            raise ConfigError(
                got=f"a share of {share} sequences, {size} at once, for {self.num_microbatches} microbatches",
                expected="a share of whole passes, and passes of microbatches of the same size",
                do="choose batch_size and micro_batch_size so that they divide, "
                f"or microbatches of which {size} is a multiple",
            )
