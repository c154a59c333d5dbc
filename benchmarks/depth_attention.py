"""Times the eager path beside the stacked reference and two floors, forward and backward.

Run: ``python -m benchmarks.depth_attention``. Arms take turns, so that a busy machine slows all of them;
ratios are medians over rounds of one arm's time by another's in the same round.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch

from attention_residuals.ops import BACKENDS

NUM_SOURCES, TOKENS, WIDTH, ROUNDS = 16, 4096, 512, 15


def arms() -> dict[str, Callable[[], None]]:
    sources = [torch.randn(TOKENS, WIDTH, requires_grad=True) for _ in range(NUM_SOURCES)]
    query = (torch.randn(WIDTH) / WIDTH**0.5).requires_grad_()
    gain = torch.ones(WIDTH, requires_grad=True)
    direction = torch.randn(TOKENS, WIDTH)
    leaves = [*sources, query, gain]

    def attention(backend: str) -> Callable[[], None]:
        def run() -> None:
            mix = BACKENDS[backend](sources, query, gain, eps=1e-6).mix
            torch.autograd.grad(mix, leaves, direction)

        return run

    def one_add() -> None:
        torch.autograd.grad(sources[0] + sources[1], sources[:2], direction)

    def floor() -> None:
        """Reads every source twice and writes one gradient for each."""
        with torch.no_grad():
            for source in sources:
                source.sum()
                source.mul(2.0)

    return {
        "stacked reference": attention("reference"),
        "eager": attention("eager"),
        "floor: two reads and one write of all sources": floor,
        "one residual add": one_add,
    }


def main() -> None:
    timed: dict[str, list[float]] = {}
    functions = arms()
    for round_number in range(ROUNDS + 2):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if round_number >= 2:
                timed.setdefault(name, []).append(time.perf_counter() - start)
    settings = {
        name: value for name, value in os.environ.items() if name.startswith(("MALLOC_", "LD_PRELOAD"))
    }
    print(f"{NUM_SOURCES} sources of [{TOKENS}, {WIDTH}] float32, forward and backward, {ROUNDS} rounds")
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, Python {platform.python_version()}, "
          f"{platform.machine()}, allocator {settings or 'default'}")  # fmt: skip
    for name, seconds in timed.items():
        print(f"{name:<46} {1e3 * statistics.median(seconds):8.2f} ms (fastest {1e3 * min(seconds):.2f})")
    pairs = zip(timed["stacked reference"], timed["eager"], strict=True)
    ratio = statistics.median(slow / fast for slow, fast in pairs)
    verdict = "holds" if ratio >= 3 else "MISSED"
    print(f"eager is {ratio:.2f} x as fast as the stacked reference; at least 3 is wanted: {verdict}")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "x", encoding="utf-8") as file:
            json.dump({"seconds": timed, "ratio": ratio, "allocator": settings}, file, indent=1)


if __name__ == "__main__":
    main()
