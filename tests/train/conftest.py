import shutil

import pytest
import tiny_run
import torch

from attention_residuals.data import Corpus
from attention_residuals.train import train


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    return tiny_run.make_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def uninterrupted(corpus, tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    train(tiny_run.train_config(), corpus, folder, saving=tiny_run.SAVING, progress=False)
    return folder


@pytest.fixture
def go(corpus, tmp_path):
    """Trains the tiny run in this test's own folder, with changes to its config."""

    def run(saving=tiny_run.SAVING, monitor=None, folder=tmp_path / "run", progress=False, **changes):
        config = tiny_run.train_config(**changes)
        return train(config, corpus, folder, saving=saving, monitor=monitor, progress=progress)

    return run


@pytest.fixture
def run(uninterrupted, tmp_path):
    """A finished run of this test's own, to be damaged."""
    shutil.copytree(uninterrupted, tmp_path / "run")
    return tmp_path / "run"
