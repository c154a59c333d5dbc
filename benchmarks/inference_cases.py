"""Cases of inference: prefill, decoding, memory, each against the standard model."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from attention_residuals import AttnRes, Decoder, StandardResidual, presets
from attention_residuals.inference import KVCache, prefill
from attention_residuals.layers.residual import TwoPhaseRule
from benchmarks.measures import Line, peak
from benchmarks.timing import paired_times, ratio

__all__ = ["INFERENCE_CASES"]

NUM_LAYERS, WIDTH = 24, 1024


def _model(sublayers_per_block: int | None, max_tokens: int = 32_768) -> Decoder:
    """Makes a model of 24 layers and width 1024 with random queries; without a block size, the standard one."""
    base = presets.scaled(NUM_LAYERS, vocab_size=4096, max_tokens=max_tokens)
    shape = replace(base, width=WIDTH, num_heads=16, num_kv_heads=8, head_width=64, mlp_width=2816)
    rule = (
        StandardResidual()
        if sublayers_per_block is None
        else AttnRes(sublayers_per_block=sublayers_per_block)
    )
    torch.manual_seed(0)
    model = Decoder(replace(shape, residual=rule)).requires_grad_(False)
    for name, parameter in model.residual.named_parameters():
        if name.endswith("pseudo_query"):
            parameter.normal_(std=0.05)
    return model


def _ratio_line(case: str, name: str, times: dict[str, list[float]], base: str, most: float | None) -> Line:
    middle, low, high = ratio(times[name], times[base])
    return Line(
        case,
        f"{name} / {base}",
        f"{middle:.3f} [{low:.3f}, {high:.3f}]",
        "reported" if most is None else f"<= {most}",
        most is None or middle <= most,
    )


def prefill_2048() -> Iterator[Line]:
    """Prefill of 2048 tokens, 24 layers, d 1024, 8 blocks of 6 sublayers, float32."""
    standard, block = _model(None), _model(6)
    tokens = torch.randint(4096, (1, 2048))
    two = TwoPhaseRule(block.residual)
    arms: dict[str, Callable[[], object]] = {
        "standard": lambda: prefill(standard, tokens),
        "one phase": lambda: prefill(block, tokens),
        "two phases": lambda: prefill(block, tokens, residual=two),
    }
    times = paired_times(arms, 3)
    case = "prefill, 2048 tokens, 24 layers, d 1024, 8 blocks"
    yield Line(case, "standard", f"{statistics.median(times['standard']):.2f} s")
    yield _ratio_line(case, "one phase", times, "standard", 1.02)
    yield _ratio_line(case, "two phases", times, "standard", 1.02)


def decode() -> Iterator[Line]:
    """One token after 256, batch 1 and 8, 24 layers, d 1024; schedules at several block sizes."""
    for batch, most in ((1, 1.05), (8, 1.03)):
        models = {"standard": (_model(None), None)}
        for size in (4, 6, 8, 16, 32):
            model = _model(size)
            models[f"one phase, blocks of {size}"] = (model, None)
            models[f"two phases, blocks of {size}"] = (model, TwoPhaseRule(model.residual))
            if batch == 8 and size == 6:
                break
        arms = {name: _decoding(model, residual, batch) for name, (model, residual) in models.items()}
        times = paired_times(arms, 25)
        case = f"decode, batch {batch}, 24 layers, d 1024"
        yield Line(case, "standard", f"{1e3 * statistics.median(times['standard']):.1f} ms a token")
        for name in arms:
            if name != "standard":
                yield _ratio_line(case, name, times, "standard", most if name.endswith("of 6") else None)


def _decoding(model: Decoder, residual: TwoPhaseRule | None, batch: int) -> Callable[[], object]:
    tokens = torch.randint(4096, (batch, 256))
    cache = prefill(model, tokens).cache
    newest = tokens[:, :1]

    def step() -> None:
        with torch.no_grad():
            model(newest, cache=cache, residual=residual)
        cache.advance(-1)  # the same step again

    return step


def prefill_memory() -> Iterator[Line]:
    """Peak live memory of a prefill in chunks of 2048, of 4096 and of 32,768 tokens (many minutes)."""
    case, chunk = "peak live memory of a prefill in chunks of 2048, 24 layers, d 1024", 2048
    budget = 8 * chunk * WIDTH * 4
    for num_tokens in (4096, 32_768):
        tokens = torch.randint(4096, (1, num_tokens))
        peaks = {}
        for name, size in (("standard", None), ("8 blocks", 6)):
            model = _model(size)
            peaks[name] = peak(
                lambda model=model, tokens=tokens: prefill(model, tokens, chunk=chunk, cache=KVCache())
            )
            yield Line(case, f"{name}, {num_tokens} tokens", f"{peaks[name] / 2**20:.0f} MiB")
        most = 1.05 * peaks["standard"] + budget
        yield Line(
            case,
            f"8 blocks, {num_tokens} tokens, over 1.05 x standard + N x chunk x d",
            f"{peaks['8 blocks'] / most:.3f}",
            "<= 1",
            peaks["8 blocks"] <= most,
        )


INFERENCE_CASES: dict[str, Callable[[], Iterator[Line]]] = {
    "prefill": prefill_2048,
    "decode": decode,
    "prefill-memory": prefill_memory,
}
"""Every case of inference by the name that the runner takes."""
