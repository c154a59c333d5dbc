"""The command that generates."""

import sys
import time
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from attention_residuals.cli.app import INTERRUPTED, Device, app
from attention_residuals.cli.names import device_of, run_folder_of
from attention_residuals.data import Tokenizer
from attention_residuals.inference import Engine, Sampling
from attention_residuals.layers.residual import TwoPhaseRule
from attention_residuals.train import load_checkpoint_model

__all__ = ["generate_command"]


@app.command(name="generate")
def generate_command(
    folder: Positional[Path],
    prompt: Positional[str],
    max_new_tokens: int = 128,
    stop: tuple[str, ...] = (),
    sampling: Sampling = Sampling(),  # noqa: B008
    schedule: Literal["one-phase", "two-phase"] = "one-phase",
    device: Device = "auto",
) -> int:
    r"""Continue a text with a trained model, as it comes.

    The text goes to standard output, speed and the reason of the end to standard error. Ctrl-C ends it;
    what was generated stays.

    For example:
      attnres generate runs/block "def add(a, b):"
      attnres generate runs/block "import " --sampling.temperature 0 --stop "\n"

    Args:
        folder: A folder written by attnres train.
        prompt: The text to continue.
        max_new_tokens: At most so many tokens.
        stop: End before the first of these strings; \n and \t are line end and tab.
        sampling: How tokens are chosen.
        schedule: How attention residuals read; two-phase reads finished blocks for all sites of a block at once.
        device: auto is cuda where there is one.
    """
    run_folder = run_folder_of(folder)
    model = load_checkpoint_model(run_folder).to(device_of(device)).requires_grad_(False)
    residual = TwoPhaseRule(model.residual) if schedule == "two-phase" else None
    engine = Engine(model, Tokenizer.load(run_folder / "tokenizer.json"), residual=residual)
    strings = [string.replace("\\n", "\n").replace("\\t", "\t") for string in stop]
    start, count, ended = time.perf_counter(), 0, "interrupted"
    first = start
    print(prompt, end="", flush=True)
    try:
        for piece in engine.stream(prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=strings):
            print(piece.text, end="", flush=True)
            first = time.perf_counter() if count == 0 else first
            count, ended = count + 1, piece.ended or ended
    except KeyboardInterrupt:
        pass
    print(flush=True)
    seconds = time.perf_counter() - first
    speed = f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else ""
    print(f"{count} tokens, ended by {ended}; the first after {first - start:.2f} s{speed}", file=sys.stderr)
    if strings and ended == "length":
        print("no stop string has come", file=sys.stderr)
    return INTERRUPTED if ended == "interrupted" else 0
