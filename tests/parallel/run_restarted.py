"""A rank under torchrun; in the first attempt one of them is killed in step 5."""

import os
import signal
import sys

from parallel.run_cases import SAVING, config_of

from attention_residuals.data import Corpus
from attention_residuals.parallel.config import Parallel
from attention_residuals.parallel.launch import launched
from attention_residuals.parallel.training import executes
from attention_residuals.train import train


def main():
    corpus, folder = Corpus.load(sys.argv[1]), sys.argv[2]
    attempt, rank, first = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"]), []

    def monitor(step, model):
        if not first and rank == 0:
            print(f"attempt {attempt} from step {step}", flush=True)
        first.append(step)
        if (attempt, rank, step) == (0, 1, 5):
            os.kill(os.getpid(), signal.SIGKILL)

    with launched(Parallel(shard=2, timeout_seconds=60)) as ranks:
        doing = {"executes": executes(ranks), "monitor": monitor}
        train(config_of(), corpus, folder, saving=SAVING, progress=False, **doing)


if __name__ == "__main__":
    main()
