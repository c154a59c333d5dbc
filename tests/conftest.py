"""Shapes in signatures are checked at run time, in tests only."""

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook

install_import_hook("attention_residuals", "beartype.beartype")

hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _same_seed_for_every_test():
    torch.manual_seed(0)
