"""torchrun for a study's run, and each of its ranks; what happens to them is told by the run's setting."""

import os
import sys
import time
from functools import partial
from pathlib import Path

from attention_residuals.experiments import rank, torchrun, worker


def monitor(cell, step, model):
    if cell.setting == "slow":
        time.sleep(0.2)
    if cell.setting == "no memory" and step == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


def trained(cell, *args, **options):
    worker.train = partial(TRAIN, monitor=partial(monitor, cell))
    return worker.trained(cell, *args, **options)


TRAIN = worker.train

if __name__ == "__main__" and "RANK" in os.environ:
    rank.trained = trained
    raise SystemExit(rank.main())
if __name__ == "__main__":
    torchrun.RANK = "experiments.faulty_torchrun"
    (Path(sys.argv[2]) / "process").write_text(str(os.getpid()))
    raise SystemExit(torchrun.main())
