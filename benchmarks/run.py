"""Runs benchmark cases and writes what they found: ``python -m benchmarks.run [CASE ...] [--out FOLDER]``.

Each case runs twice, in processes of their own: with the allocator as it is, and with glibc told to keep
freed memory (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ large), the same for all arms.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

from attention_residuals.train.environment import describe
from benchmarks.cases import CASES

ALLOCATORS = {
    "default": {},
    "keeping": {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, help="a new folder for results.json and results.md")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        for line in CASES[arguments.cases[0]]():
            print(json.dumps(line._asdict()), flush=True)
        return 0
    if arguments.out is not None:
        arguments.out.mkdir(parents=True)
    about = {
        "when": time.strftime("%Y-%m-%d"),
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        **describe(),
    }
    found = []
    for case in arguments.cases or CASES:
        for allocator, settings in ALLOCATORS.items():
            command = [sys.executable, "-W", "ignore", "-m", "benchmarks.run", case, "--inside", allocator]
            process = subprocess.Popen(
                command,
                env={**os.environ, **settings},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            assert process.stdout is not None
            for text in process.stdout:
                if text.startswith("{"):
                    found.append({"allocator": allocator, **json.loads(text)})
                    print(_row(found[-1]), flush=True)
            if process.wait():
                found.append(
                    {
                        "allocator": allocator,
                        "case": case,
                        "arm": "-",
                        "value": "failed",
                        "wanted": "",
                        "holds": False,
                    }
                )
                print(_row(found[-1]), flush=True)
        if arguments.out is not None:  # after each case, so that a long run leaves what it has
            (arguments.out / "results.json").write_text(
                json.dumps({"about": about, "lines": found}, indent=1) + "\n"
            )
            (arguments.out / "results.md").write_text(_markdown(about, found))
    missed = [line for line in found if line["holds"] is False]
    print(f"{len(missed)} wanted figures missed" if missed else "every wanted figure holds")
    return 0


def _row(line: dict[str, object]) -> str:
    holds = {True: "holds", False: "MISSED", None: ""}[line["holds"]]  # type: ignore[index]
    columns = ("allocator", "case", "arm", "value", "wanted")
    return (
        " ".join(f"{line[name]!s:<{width}}" for name, width in zip(columns, (8, 34, 62, 28, 8), strict=True))
        + holds
    )


def _markdown(about: dict[str, object], found: list[dict[str, object]]) -> str:
    kept = ("when", "cpu", "threads", "torch", "python", "machine")
    lines = [", ".join(f"{name} {about[name]}" for name in kept if name in about), ""]
    lines += ["| allocator | case | arm | measured | wanted | |", "|---|---|---|---|---|---|"]
    for line in found:
        holds = {True: "holds", False: "**missed**", None: ""}[line["holds"]]  # type: ignore[index]
        lines.append(
            "| "
            + " | ".join(str(line[k]) for k in ("allocator", "case", "arm", "value", "wanted"))
            + f" | {holds} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
