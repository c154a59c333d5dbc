"""What a GPU is asked when there is one: do all backends agree there, and how fast are they?

Run: ``scripts/gpu-check [OUT.json]``. One JSON object on standard output, and in the file if one is named.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from attention_residuals.ops import BACKENDS
from attention_residuals.train.environment import describe


def main(device: str = "cuda") -> int:
    if device == "cuda" and not torch.cuda.is_available():
        print("got: no CUDA device\nexpected: one\ndo: run this on a machine with a GPU", file=sys.stderr)
        return 1
    found = [_agreement(device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    found += [_timing(device, *shape) for shape in ((9, 8192, 7168), (17, 8192, 2048), (33, 4096, 2048))]
    text = json.dumps({"about": describe(), "device": _name(device), "found": found}, indent=1)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")
    return 0 if all(line.get("agrees", True) for line in found) else 1


def _inputs(device: str, dtype: torch.dtype, num_sources: int, tokens: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    sources = [
        torch.randn(tokens, width, device=device, generator=generator).to(dtype) for _ in range(num_sources)
    ]
    vectors = [
        torch.randn(width, device=device, generator=generator) / width**0.5,
        torch.ones(width, device=device),
    ]
    return [tensor.requires_grad_() for tensor in (*sources, *vectors)]


def _names(source: torch.Tensor) -> list[str]:
    return [name for name, backend in BACKENDS.items() if backend.refusal(source, with_bias=False) is None]


def _agreement(device: str, dtype: torch.dtype) -> dict[str, object]:
    """The largest relative error of mix and gradients, against the reference in float64."""
    inputs = _inputs(device, dtype, 9, 257, 1000)
    truth = _results("reference", [tensor.detach().double().requires_grad_() for tensor in inputs])
    errors = {}
    for name in _names(inputs[0]):
        pairs = zip(_results(name, inputs), truth, strict=True)
        errors[name] = max(((one.double() - true).norm() / true.norm()).item() for one, true in pairs)
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    return {"what": f"agreement, {dtype}", "errors": errors, "agrees": max(errors.values()) <= bound}


def _results(name: str, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    *sources, query, gain = inputs
    mix = BACKENDS[name].run(sources, query, gain, eps=1e-6).mix
    return [mix, *torch.autograd.grad(mix, inputs, torch.ones_like(mix))]


def _timing(device: str, num_sources: int, tokens: int, width: int) -> dict[str, object]:
    """Milliseconds of forward and backward together, in bfloat16; arms take turns."""
    inputs = _inputs(device, torch.bfloat16, num_sources, tokens, width)
    seconds: dict[str, list[float]] = {name: [] for name in _names(inputs[0]) if name != "reference"}
    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for number in range(12):
        for name, times in seconds.items():
            wait()
            start = time.perf_counter()
            _results(name, inputs)
            wait()
            if number >= 2:
                times.append(time.perf_counter() - start)
    shape = f"{num_sources} x [{tokens}, {width}] bfloat16, forward and backward, ms"
    return {"what": shape, **{name: 1e3 * statistics.median(times) for name, times in seconds.items()}}


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


if __name__ == "__main__":
    sys.exit(main())
