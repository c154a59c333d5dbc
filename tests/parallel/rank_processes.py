"""Runs groups of processes that import everything once, and gathers what each of them found."""

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path


def run_groups(folder, *groups, worker="pipeline_worker.py", timeout=240):
    """Runs groups of ranks at once; returns for each what its ranks found, an exit code where they found nothing.

    A group is a dict: ``work`` names a function of the worker's ``WORK``, ``num_ranks`` says how many ranks call
    it with their rank and the group, which then has a ``folder`` of its own and says ``at`` which place they meet;
    a ``victim`` is ended when all others have.
    """
    (folder / "groups.json").write_text(json.dumps(groups))
    command = [sys.executable, str(Path(__file__).with_name(worker)), str(folder)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent), *sys.path])
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        process.wait(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return json.loads((folder / "found.json").read_text())


def fork_groups(work):
    """Forks every rank of every group, waits, and writes down what they found."""
    folder = Path(sys.argv[1])
    groups = json.loads((folder / "groups.json").read_text())
    children = {}
    for number, group in enumerate(groups):
        group["folder"] = str(folder / str(number))
        Path(group["folder"]).mkdir()
        group["at"] = _meeting_place(group)
        for rank in range(group["num_ranks"]):
            children[_forked(work[group["work"]], rank, group)] = (number, rank)
    found = [[None] * group["num_ranks"] for group in groups]
    while children:
        child, status = os.wait()
        number, rank = children.pop(child)
        path = folder / str(number) / f"{rank}.json"
        found[number][rank] = (
            json.loads(path.read_text()) if path.exists() else os.waitstatus_to_exitcode(status)
        )
        rest = [process for process, (other, _) in children.items() if other == number]
        if [children[process][1] for process in rest] == [groups[number].get("victim")]:
            os.kill(rest[0], signal.SIGKILL)
    (folder / "found.json").write_text(json.dumps(found))


def _meeting_place(group):
    if group.get("meets_by") != "tcp":
        return f"file://{group['folder']}/store"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def _forked(work, rank, group):
    """Calls the work in a process of its own, which ends without goodbye: there may be nobody left to hear it."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        (Path(group["folder"]) / f"{rank}.json").write_text(json.dumps(work(rank, group)))
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)
