"""Shapes in signatures are checked at run time, in tests only."""

from pathlib import Path

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

# Every module but the kernels, which numba compiles from their plain source.
_SOURCE = Path(__file__).parent.parent / "src"
CHECKED = [
    ".".join(path.relative_to(_SOURCE).with_suffix("").parts)
    for path in _SOURCE.rglob("*.py")
    if path.name not in ("cpu.py", "cpu_two_phase.py", "__init__.py")
]
install_import_hook(CHECKED, "beartype.beartype")

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _same_seed_for_every_test():
    torch.manual_seed(0)
