"""Stands in for the worker's process in tests of the queue: quick, and told by its first argument how to end.

It knows the file of results as ``Results`` writes it, and takes the run's lock as the real one does.
"""

import fcntl
import json
import os
import signal
import sys
import time
from pathlib import Path

HEADER = "stage,arm,setting,seed,config,quantity,step,place,value\n"


def others_came(path, number):
    """Notes that this run is under way until so many have begun and a moment has passed; tells whether they have."""

    def note(change):
        with path.open("a") as file:
            file.write(f"{change}\n")

    note("+1")
    patience = time.monotonic() + 5
    while (are_few := path.read_text().split().count("+1") < number) and time.monotonic() < patience:
        time.sleep(0.02)
    time.sleep(0.2)  # in which one too many would begin
    note("-1")
    return not are_few


def main():
    ways, folder, results, name = json.loads(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    cell = json.loads((folder / "cells" / f"{name}.json").read_text())["cell"]
    with (folder / "started.txt").open("a") as file:
        file.write(f"{cell['arm']} {cell['train']['seed']}\n")
    (folder / "locks").mkdir(exist_ok=True)
    lock = (folder / "locks" / f"{name}.lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 75
    way = ways.get(f"{cell['arm']} {cell['train']['seed']}", "done")
    attempts = (
        (folder / "started.txt").read_text().split("\n").count(f"{cell['arm']} {cell['train']['seed']}")
    )
    if way == "hangs":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(130))
        (folder / "hanging").touch()
        while True:
            time.sleep(0.02)
    if way == "killed in its write":
        with results.open("a") as file:
            file.write("main,blo")
    if way in ("killed", "killed in its write") or (way == "killed once" and attempts == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "crashes":
        print("Traceback ...\nOSError: the disk is full\n", flush=True)
        return 1
    if way.startswith("waits for "):
        if not others_came(folder / "under-way.txt", int(way.removeprefix("waits for "))):
            return 1
        way = "done"
    key = f"{cell['stage']},{cell['arm']},{cell['setting']},{cell['train']['seed']},{ways['config'][name]}"
    status = "done" if way in ("done", "killed once") else way
    lines = f"{key},validation loss,4,,3.5\n{key},status,,,{status}\n"
    with results.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write((HEADER if file.tell() == 0 else "") + lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
