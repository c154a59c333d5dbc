"""What a run costs: floating point operations, and hours on the hardware that is visible."""

import time
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch

from attention_residuals.models import ConvertedConfig, DecoderConfig
from attention_residuals.models.costs import costs
from attention_residuals.parallel.estimate import operations
from attention_residuals.train import TrainConfig

__all__ = ["UTILISATION", "Cost", "Hardware", "cost_of", "training_flops", "visible_hardware"]

UTILISATION = 0.4
"""Share of the measured speed of a large matrix product that training is taken to reach. A guess, and stated."""


class Hardware(NamedTuple):
    """What is here to compute with."""

    name: str
    speed: float
    """Operations a second of a large matrix product, all devices together."""


class Cost(NamedTuple):
    """What runs cost together."""

    num_runs: int
    tokens: int
    flops: float

    def hours(self, hardware: Hardware) -> float:
        """Says how long they take there, at ``UTILISATION`` of its speed."""
        return self.flops / (hardware.speed * UTILISATION) / 3600


def training_flops(config: TrainConfig, num_steps: int | None = None) -> float:
    """Counts the operations of a run: three times those of forward passes over all its tokens.

    A forward pass counts, for each token, twice the weights of the matrices of layers and head; depth reads of
    source rules, 6 D for each source; and causal attention over half of the sequence, 2 A (T + 1) for each layer,
    where A is the width of all its heads. Of Kimi Linear it counts what ``models.costs`` does, with the same half of
    the sequence. Norms, the gates of hyper-connections and the optimizer are not counted. How the paper counts is not
    published.

    Args:
        config: Of the run.
        num_steps: Of it; all by default.

    Raises:
        ConfigError: A converted model that is no Kimi Linear, whose layers are not ours to count.

    Example:
        >>> from attention_residuals.models import presets
        >>> config = TrainConfig(model=presets.scaled(8, vocab_size=300), num_steps=10, batch_size=2)
        >>> f"{training_flops(config):.2e}"
        '5.52e+10'
    """
    tokens = config.tokens_per_step * (config.num_steps if num_steps is None else num_steps)
    return 3.0 * tokens * _forward_flops(config.model, config.sequence_length)


@lru_cache(maxsize=1000)
def _forward_flops(model: DecoderConfig | ConvertedConfig, sequence_length: int) -> int:
    """Of one token."""
    if isinstance(model, ConvertedConfig):
        counted = costs(model, context=(sequence_length + 1) / 2)
        return counted.operations + counted.reads
    found = operations(model)
    attention = 2 * model.num_layers * model.num_heads * model.head_width * (sequence_length + 1)
    return found.model + found.reads + attention


def cost_of(configs: Iterable[TrainConfig]) -> Cost:
    """Adds up what runs cost."""
    runs = list(configs)
    tokens = sum(config.num_steps * config.tokens_per_step for config in runs)
    return Cost(len(runs), tokens, sum(training_flops(config) for config in runs))


def visible_hardware(*, seconds: float = 0.3, gpus: int | None = None) -> Hardware:
    """Measures the matrix products of what is here: all GPUs in bfloat16, or else the CPU's cores in float32.

    Args:
        seconds: To spend on it; one GPU is measured and counted as often as there are GPUs.
        gpus: How many of them are used, where there are any; all by default.

    Example:
        >>> visible_hardware(seconds=0.01).speed > 1e6
        True
    """
    visible = torch.cuda.device_count()
    count = visible if gpus is None else min(gpus, visible)
    if count:  # pragma: no cover  no GPU where tests run
        return Hardware(f"{count} x {torch.cuda.get_device_name(0)}", count * _speed("cuda", 8192, seconds))
    return Hardware(f"{torch.get_num_threads()} CPU thread(s)", _speed("cpu", 512, seconds))


def _speed(device: str, size: int, seconds: float) -> float:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    count, begin = 0, 0.0
    while True:
        product = matrix @ matrix
        product[0, 0].item()  # waits for it
        if not count:
            begin = time.perf_counter()  # the first one warms up
        count += 1
        spent = time.perf_counter() - begin
        if count > 1 and spent >= seconds:
            return (count - 1) * 2 * size**3 / spent
