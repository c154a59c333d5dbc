"""The command that generates."""

import io
import sys
import time
from typing import Literal

from tyro.conf import UseAppendAction

from attention_residuals.cli.app import INTERRUPTED, Device, command
from attention_residuals.cli.names import Words, device_of, folder_and_text, opened
from attention_residuals.inference import Engine, Sampling
from attention_residuals.layers.residual import TwoPhaseRule

__all__ = ["generate_command"]


@command("generate")
def generate_command(
    words: Words,
    max_new_tokens: int = 128,
    stop: UseAppendAction[tuple[str, ...]] = (),
    sampling: Sampling = Sampling(),  # noqa: B008
    schedule: Literal["one-phase", "two-phase"] = "one-phase",
    device: Device = "auto",
) -> int:
    r"""Continue a text with a trained model, as it comes.

    The text goes to standard output, speed and the reason of the end to standard error. Ctrl-C ends it;
    what was generated stays.

    For example:
      attnres generate "def add(a, b):"
      attnres generate runs/block "import " --sampling.temperature 0 --stop "\n" --stop "#"

    Args:
        words: A folder written by attnres train or attnres convert, then the text to continue; an empty one
            begins a new text. The text alone is for the model that comes with the package.
        max_new_tokens: At most so many tokens.
        stop: End before this string, or the first of several, each with a --stop; \n and \t are line end and tab.
        sampling: How tokens are chosen.
        schedule: How attention residuals read; two-phase reads finished blocks for all sites of a block at once.
        device: auto is cuda where there is one.
    """
    folder, prompt = folder_and_text(words)
    _, model, tokenizer, _ = opened(folder, device_of(device))
    model.requires_grad_(False)
    residual = TwoPhaseRule(model.residual) if schedule == "two-phase" else None
    strings = [string.replace("\\n", "\n").replace("\\t", "\t") for string in stop]
    start = first = time.perf_counter()
    pieces = Engine(model, tokenizer, residual=residual).stream(
        prompt, max_new_tokens=max_new_tokens, sampling=sampling, stop=strings
    )
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that lacks a letter shows a question mark
        sys.stdout.reconfigure(errors="replace")
    print(prompt, end="", flush=True)
    tokens: list[int] = []
    shown, ended = "", "interrupted"
    try:
        for piece in pieces:
            print(piece.text, end="", flush=True)
            first = first if tokens else time.perf_counter()
            tokens, shown, ended = [*tokens, piece.token], shown + piece.text, piece.ended or ended
    except KeyboardInterrupt:
        if ended == "interrupted":  # what was held back, for it might have begun a stop string
            print(tokenizer.decode(tokens)[len(shown) :], end="")
    print(flush=True)
    count, seconds = len(tokens), time.perf_counter() - first
    speed = f"; the first after {first - start:.2f} s" if tokens else ""
    speed += f", {(count - 1) / seconds:.1f} tokens/s" if count > 1 and seconds > 0 else ""
    print(f"{count} tokens, ended by {ended}{speed}", file=sys.stderr)
    if strings and ended == "length":
        print("no stop string has come", file=sys.stderr)
    return INTERRUPTED if ended == "interrupted" else 0
