"""What ``attnres train`` does as one of several processes."""

from collections.abc import Callable

from attention_residuals.cli.app import INTERRUPTED
from attention_residuals.data import Corpus
from attention_residuals.parallel.config import Parallel
from attention_residuals.train import Result
from attention_residuals.train.execution import Executes

__all__ = ["train_on_ranks"]


def train_on_ranks(
    parallel: Parallel,
    device: str,
    corpus_of: Callable[[], Corpus],
    run: Callable[[Corpus, Executes], Result],
) -> int:
    """Trains as one of the processes that torchrun has started; one of them prepares the text and speaks.

    Args:
        parallel: How they share the work.
        device: Of this process.
        corpus_of: Prepares the corpus, or opens it.
        run: Trains.

    Returns:
        The exit code.
    """
    # PyTorch's distributed engine takes seconds to import, which a single process need not wait for.
    from attention_residuals.parallel.launch import launched
    from attention_residuals.parallel.training import executes

    with launched(parallel, device) as ranks:
        result = run(ranks.lead_first(corpus_of), executes(ranks))
        if ranks.is_lead and not result.interrupted:
            print(f"{result.step} steps done; the last evaluation: {result.bits_per_byte:.4f} bits per byte")
    return INTERRUPTED if result.interrupted else 0
