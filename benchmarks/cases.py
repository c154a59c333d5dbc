"""The cases: each measures, compares with what is wanted, and says whether it holds."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_residuals import AttnRes, Decoder, Recorder, StandardResidual, depth_attention, presets
from attention_residuals.layers.residual import RULES, ResidualConfig
from attention_residuals.ops import BACKENDS
from benchmarks.arms import op_arms
from benchmarks.inference_cases import INFERENCE_CASES
from benchmarks.kimi_linear_case import kimi_linear_step
from benchmarks.measures import Line, peak
from benchmarks.timing import paired_times, ratio

__all__ = ["CASES"]


def _leaves(
    num_sources: int, tokens: int, width: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sources = [
        torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_() for _ in range(num_sources)
    ]
    query = (torch.randn(width, generator=generator) / width**0.5).requires_grad_()
    return (
        sources,
        query,
        torch.ones(width, requires_grad=True),
        torch.randn(tokens, width, generator=generator).to(dtype),
    )


def _op(
    case: str, num_sources: int, tokens: int, width: int, dtype: torch.dtype, rounds: int, compiled: bool
) -> Iterator[Line]:
    sources, query, gain, given = _leaves(num_sources, tokens, width, dtype)
    truth = (
        BACKENDS["reference"].run([s.double() for s in sources], query.double(), gain.double(), eps=1e-6).mix
    )
    arms: dict[str, Callable[[], object]] = {}
    kinds: dict[str, str] = {}
    for name, arm in op_arms(width).items():
        if arm.run is None or (arm.kind == "compiled peer" and not compiled):
            yield Line(case, name, "not run", arm.note or "compiled arms only in the main cases")
            continue

        def run(mix: Callable[..., Tensor] = arm.run) -> None:
            out = mix(sources, query, gain)
            torch.autograd.grad(out, [*sources, query], given.to(out.dtype), allow_unused=True)

        try:
            error = ((arm.run(sources, query, gain).double() - truth).norm() / truth.norm()).item()
            run()
        except (RuntimeError, TypeError, ValueError) as failure:
            yield Line(case, name, f"failed: {type(failure).__name__}: {str(failure).splitlines()[0][:60]}")
            continue
        if arm.kind != "other mathematics" and error > 0.05:
            yield Line(case, name, f"wrong: relative error {error:.1e}")
            continue
        arms[name], kinds[name] = run, arm.kind

    def floor() -> None:
        # Two passes, as forward and backward are: together the sources do not fit into a cache. What is
        # written is kept until the end, as gradients are.
        with torch.no_grad():
            for source in sources:
                source.sum()
            _ = [source.mul(2.0) for source in sources]

    arms["floor: all sources read twice, gradients written once"] = floor
    arms["one residual add"] = lambda: torch.autograd.grad(
        sources[0] + sources[1 % num_sources], sources[0], given
    )
    times = paired_times(arms, rounds)
    for name, seconds in times.items():
        kind = f" ({kinds[name]})" if name in kinds else ""
        yield Line(
            case, name + kind, f"{1e3 * statistics.median(seconds):.2f} ms, best {1e3 * min(seconds):.2f}"
        )
    yield from _op_verdicts(case, times, kinds, compiled, dtype)


def _op_verdicts(
    case: str, times: dict[str, list[float]], kinds: dict[str, str], compiled: bool, dtype: torch.dtype
) -> Iterator[Line]:
    ours = times["attention-residuals, auto"]

    def fastest(*wanted: str) -> str | None:
        names = [name for name, kind in kinds.items() if kind in wanted]
        return min(names, key=lambda name: statistics.median(times[name]), default=None)

    def verdict(name: str, most: float) -> Line:
        middle, low, high = ratio(ours, times[name])
        return Line(
            case, f"auto / {name}", f"{middle:.2f} [{low:.2f}, {high:.2f}]", f"<= {most}", middle <= most
        )

    if not compiled:
        peer = fastest("eager peer", "stacked", "compiled peer")
        if peer is not None:
            yield verdict(peer, 1.0)
        return
    if (peer := fastest("compiled peer")) is not None:
        yield verdict(peer, 0.6)
    if dtype == torch.float32:
        if (peer := fastest("stacked")) is not None:
            yield verdict(peer, 0.2)
        yield verdict("floor: all sources read twice, gradients written once", 2.0)
        middle, low, high = ratio(times["stacked reference"], times["attention-residuals, eager"])
        yield Line(
            case, "stacked reference / eager", f"{middle:.2f} [{low:.2f}, {high:.2f}]", ">= 3", middle >= 3
        )


def op_float32() -> Iterator[Line]:
    """16 sources of [4096, 512] float32, forward and backward."""
    yield from _op("op, float32, 16 x [4096, 512]", 16, 4096, 512, torch.float32, 15, True)


def op_bfloat16() -> Iterator[Line]:
    """16 sources of [4096, 512] bfloat16, forward and backward."""
    yield from _op("op, bfloat16, 16 x [4096, 512]", 16, 4096, 512, torch.bfloat16, 15, True)


def op_shapes() -> Iterator[Line]:
    """Other numbers of sources and widths, 256 MiB of sources at most."""
    for num_sources in (3, 9, 33, 129):
        for width in (60, 1000, 2048, 7168):
            tokens = min(4096, 2**26 // (num_sources * width))
            yield from _op(
                f"op, {num_sources} x [{tokens}, {width}]",
                num_sources,
                tokens,
                width,
                torch.float32,
                5,
                False,
            )


_MAIN_RULES: dict[str, ResidualConfig] = {
    "standard": StandardResidual(),
    "Block (4)": AttnRes(sublayers_per_block=4),
    "Full": AttnRes(sublayers_per_block=1),
}


def _models(rules: dict[str, ResidualConfig] = _MAIN_RULES) -> dict[str, Decoder]:
    base = presets.scaled(8, vocab_size=4096)
    base = replace(base, width=384, num_heads=6, num_kv_heads=6, head_width=64, mlp_width=1024)
    models = {}
    for name, residual in rules.items():
        torch.manual_seed(0)
        models[name] = Decoder(replace(base, residual=residual))
    return models


def _steps(rules: dict[str, ResidualConfig] = _MAIN_RULES, batch: int = 8) -> dict[str, Callable[[], object]]:
    tokens = torch.randint(4096, (batch, 513), generator=torch.Generator().manual_seed(0))

    def step_of(model: Decoder) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

        def step() -> None:
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return {name: step_of(model) for name, model in _models(rules).items()}


def training_step() -> Iterator[Line]:
    """A whole training step, 8 layers, d 384, V 4096, 8 x 512 tokens, AdamW fused, float32."""
    case = "training step, 8 layers, d 384"
    times = paired_times(_steps(), 9)
    for name, seconds in times.items():
        yield Line(case, name, f"{1e3 * statistics.median(seconds):.0f} ms, best {1e3 * min(seconds):.0f}")
    for name, most in (("Block (4)", 1.04), ("Full", 1.08)):
        middle, low, high = ratio(times[name], times["standard"])
        yield Line(
            case, f"{name} / standard", f"{middle:.3f} [{low:.3f}, {high:.3f}]", f"<= {most}", middle <= most
        )


def every_rule() -> Iterator[Line]:
    """That training step with 2 sequences, for every residual rule beside the standard one."""
    case = "training step of every rule, 8 layers, d 384"
    configs = {name: config() for name, config in RULES.items()}
    configs["attnres, blocks of 4"] = AttnRes(sublayers_per_block=4)
    times = paired_times(_steps(configs, batch=2), 7)
    for name, seconds in times.items():
        if name != "standard":
            middle, low, high = ratio(seconds, times["standard"])
            yield Line(
                case, f"{name} / standard", f"{middle:.2f} [{low:.2f}, {high:.2f}]", "<= 1.3", middle <= 1.3
            )


def memory() -> Iterator[Line]:
    """Peak of live tensor bytes in that step, from the profiler's allocation events."""
    peaks = {}
    for name, step in _steps().items():
        step()
        peaks[name] = peak(step)
        yield Line("peak live memory of that step", name, f"{peaks[name] / 2**20:.0f} MiB above the start")
    for name, most in (("Block (4)", 1.02), ("Full", 1.05)):
        share = peaks[name] / peaks["standard"]
        yield Line(
            "peak live memory of that step", f"{name} / standard", f"{share:.3f}", f"<= {most}", share <= most
        )


def one_token() -> Iterator[Line]:
    """One token, 9 sources, D 1024, inference: everything that a read costs."""
    sources, query, gain, _ = _leaves(9, 1, 1024, torch.float32)

    def reads() -> None:
        for _ in range(100):
            depth_attention(sources, query, gain, eps=1e-6, output_gain=gain, output_eps=1e-6)

    with torch.no_grad():
        seconds = paired_times({"auto": reads}, 20)["auto"]
    microseconds = 1e4 * statistics.median(seconds)
    yield Line(
        "one token, 9 sources, D 1024",
        "auto",
        f"{microseconds:.1f} microseconds a read",
        "<= 40",
        microseconds <= 40,
    )


def tap() -> Iterator[Line]:
    """A whole forward pass with a recorder, without a tap, and without a tap again."""
    model = _models()["Block (4)"]
    tokens = torch.randint(4096, (8, 512), generator=torch.Generator().manual_seed(0))
    arms = {
        "without": lambda: model(tokens),
        "recording": lambda: model(tokens, tap=Recorder()),
        "without, again": lambda: model(tokens),
    }
    with torch.no_grad():
        same = torch.equal(model(tokens), model(tokens, tap=Recorder()))
        times = paired_times(arms, 9)
    yield Line(
        "tap, whole forward",
        "logits under a recorder",
        "bitwise equal" if same else "differ",
        "bitwise equal",
        same,
    )
    for name, most in (("recording", 1.05), ("without, again", 1.005)):
        middle, low, high = ratio(times[name], times["without"])
        yield Line(
            "tap, whole forward",
            f"{name} / without",
            f"{middle:.3f} [{low:.3f}, {high:.3f}]",
            f"<= {most}",
            middle <= most,
        )


def error() -> Iterator[Line]:
    """The error against float64, beside the float32 reference's own."""
    for num_sources, width in ((3, 60), (16, 512), (33, 2048), (129, 1000)):
        sources, query, gain, given = _leaves(num_sources, 256, width, torch.float32)
        results = {}
        for name, dtype in (("truth", torch.float64), ("reference", torch.float32), ("cpu", torch.float32)):
            inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in (*sources, query, gain)]
            run = BACKENDS["reference" if name == "truth" else name].run
            mix = run(inputs[:-2], inputs[-2], inputs[-1], eps=1e-6).mix
            gradients = torch.autograd.grad(mix, inputs, given.to(dtype))
            results[name] = [mix, torch.stack(gradients[:-2]), *gradients[-2:]]
        worst = 0.0
        for ours, theirs, true in zip(results["cpu"], results["reference"], results["truth"], strict=True):
            worst = max(worst, ((ours - true).norm() / (theirs - true).norm()).item())
        yield Line("error against float64", f"{num_sources} x [256, {width}], cpu / reference, worst",
                   f"{worst:.2f}", "<= 2", worst <= 2)  # fmt: skip


CASES: dict[str, Callable[[], Iterator[Line]]] = {
    "op-float32": op_float32,
    "op-bfloat16": op_bfloat16,
    "op-shapes": op_shapes,
    "step": training_step,
    "rules": every_rule,
    "memory": memory,
    "one-token": one_token,
    "tap": tap,
    "error": error,
    "kimi-linear": kimi_linear_step,
    **INFERENCE_CASES,
}
"""Every case by the name that the runner takes."""
