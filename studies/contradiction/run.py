"""Runs the study from its models to its report, as ``attnres study contradiction`` does; see README.md.

Started again, it goes on where it stopped. The confirming run begins only once preregistration.md is filled in
and committed.
"""

import argparse
from pathlib import Path

from attention_residuals.contradiction import STAGES, Study, run_study

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("runs/contradiction"))
    parser.add_argument("--stage", choices=STAGES, default=None)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    document = Path(__file__).parent / "preregistration.md"
    if not run_study(Study(), given.folder, document, stage=given.stage, device=given.device):
        raise SystemExit("interrupted; the same command goes on")
