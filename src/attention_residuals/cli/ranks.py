"""What ``attnres train`` does as one of several processes."""

from collections.abc import Callable
from typing import Any

from attention_residuals.cli.app import INTERRUPTED
from attention_residuals.data import Corpus
from attention_residuals.parallel.config import Parallel
from attention_residuals.train import Result
from attention_residuals.train.execution import Executes

__all__ = ["train_on_ranks"]


def train_on_ranks(
    parallel: Parallel,
    device: str,
    words: dict[str, Any],
    corpus_of: Callable[[], Corpus],
    opened: Callable[[], Corpus],
    run: Callable[[Corpus, Executes], Result],
) -> int:
    """Trains as one of the processes that torchrun has started; one of them prepares the text and speaks.

    Args:
        parallel: How they share the work.
        device: Of this process.
        words: What the command was given, by option, which has to be the same for all.
        corpus_of: Prepares the corpus, or opens it.
        opened: Opens the corpus that another process has prepared.
        run: Trains.

    Returns:
        The exit code.
    """
    # PyTorch's distributed engine takes seconds to import, which a single process need not wait for.
    from attention_residuals.parallel.launch import launched
    from attention_residuals.parallel.training import executes

    with launched(parallel, device) as ranks:
        ranks.agree(words)  # before any of them writes into its folder
        result = run(ranks.lead_first(corpus_of, opened), executes(ranks))
        if ranks.is_lead and not result.interrupted:
            print(f"{result.step} steps done; the last evaluation: {result.bits_per_byte:.4f} bits per byte")
    return INTERRUPTED if result.interrupted else 0
