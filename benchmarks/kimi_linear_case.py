"""The case of Kimi Linear: a training step, with our linear attention and with Transformers' own."""

import statistics
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from attention_residuals import StandardResidual, presets
from attention_residuals.layers.residual import ResidualConfig
from attention_residuals.models import LanguageModel, build
from attention_residuals.models.hf.kimi_linear import ChunkedDeltaAttention
from attention_residuals.train import AdamW
from attention_residuals.train.optimizer import Optimizer
from benchmarks.measures import Line
from benchmarks.timing import paired_times, ratio

__all__ = ["kimi_linear_step"]

BATCH, LENGTH, VOCABULARY = 8, 256, 4096


def kimi_linear_step() -> Iterator[Line]:
    """A training step of kimi-linear-tiny (2.6 M parameters), 8 x 256 tokens, AdamW, float32."""
    case = "training step, kimi-linear-tiny"
    arms = {"standard": _step(_model(StandardResidual())), "Block (4)": _step(_model(None))}
    slow = _model(None)
    for module in slow.modules():
        if isinstance(module, ChunkedDeltaAttention):
            module.__class__ = KimiLinearDeltaAttention
    times = paired_times(arms, 5) | paired_times({"Transformers' delta rule": _step(slow)}, 1)
    for name, seconds in times.items():
        rates = [BATCH * LENGTH / seconds for seconds in (statistics.median(seconds), min(seconds))]
        wanted = {"wanted": ">= 3000", "holds": rates[0] >= 3000} if name == "Block (4)" else {}
        yield Line(case, name, f"{rates[0]:,.0f} tokens/s, best {rates[1]:,.0f}", **wanted)
    middle, low, high = ratio(times["Block (4)"], times["standard"])
    yield Line(
        case, "Block (4) / standard", f"{middle:.3f} [{low:.3f}, {high:.3f}]", "<= 1.05", middle <= 1.05
    )


def _model(residual: ResidualConfig | None) -> LanguageModel:
    torch.manual_seed(0)
    return build(presets.kimi_linear("kimi-linear-tiny", vocab_size=VOCABULARY, residual=residual))


def _step(model: LanguageModel) -> Callable[[], object]:
    optimizer = Optimizer(model.named_parameters(), AdamW())
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step(1e-4)
        model.settle()

    return step
