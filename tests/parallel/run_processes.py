"""Runs the ranks of a run as processes that import everything once."""

import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path


def run_ranks(folder, num_ranks, task, timeout=600):
    """Runs a worker on each rank and returns what each found, or its exit code where it found nothing."""
    (folder / "task.json").write_text(json.dumps(task))
    worker = Path(__file__).with_name("run_worker.py")
    command = [sys.executable, str(worker), str(folder), str(num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    found = [folder / f"{rank}.json" for rank in range(num_ranks)]
    codes = json.loads((folder / "codes.json").read_text())
    return [
        json.loads(path.read_text()) if path.exists() else code
        for path, code in zip(found, codes, strict=True)
    ]


def fork_ranks(main):
    """Runs ``main(rank, num_ranks, folder)`` in a process for each rank, which import everything once."""
    folder, num_ranks = Path(sys.argv[1]), int(sys.argv[2])
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if not child:
            code = 1
            try:
                main(rank, num_ranks, folder)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "codes.json").write_text(json.dumps(codes))
