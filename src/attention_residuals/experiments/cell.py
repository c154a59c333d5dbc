"""One run of a study, as data: what to train, on which text, and what to measure afterwards."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from attention_residuals.configs import encode
from attention_residuals.data import Corpus, Tokenizer
from attention_residuals.data.sources import TextSource
from attention_residuals.experiments.results import Key, Number
from attention_residuals.train import Saving, TrainConfig
from attention_residuals.train.run_folder import identity

__all__ = ["Cell", "Finished", "Measure", "Text", "digest_of"]


class Text(NamedTuple):
    """What a study trains on; one of ``vocab_size`` and ``tokenizer``, or neither, is given."""

    source: TextSource | None
    """None: the caller brings a prepared corpus."""
    vocab_size: int | None = None
    """Of the tokenizer that is trained on the text."""
    tokenizer: Tokenizer | None = None
    """That is used instead."""


class Finished(NamedTuple):
    """A run that has reached its last step."""

    folder: Path
    """Of the run, with its metrics and checkpoints."""
    config: TrainConfig
    corpus: Corpus
    device: str = "cpu"
    """Where to measure it."""


class Measure(ABC):
    """What is measured of a run once it is trained; base of small frozen dataclasses that JSON can hold."""

    def saving(self, num_steps: int) -> Saving:
        """Says when a run is saved and evaluated; by default on the whole validation split, at the middle and end."""
        half = max(1, num_steps // 2)
        return Saving(every=200, keep=1, evaluate_every=half, evaluate_batches=None, log_every=50)

    @abstractmethod
    def numbers(self, run: Finished) -> Iterator[Number]:
        """Yields what is measured; the trainer's own losses are taken down without it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a study.

    Args:
        stage: See ``Key``, as ``arm`` and ``setting``.
        arm: What is compared.
        setting: What else differs.
        text: Which of the study's texts it is trained on.
        train: What is trained.
        measure: What is measured afterwards.
    """

    stage: str
    arm: str
    setting: str
    text: str
    train: TrainConfig
    measure: Measure

    @property
    def key(self) -> Key:
        """Which run it is."""
        return Key(self.stage, self.arm, self.setting, self.train.seed)

    @property
    def name(self) -> str:
        """The name of its files, made of the key; different keys have different ones."""
        plain = re.sub(r"[^a-z0-9.]+", "-", str(self.key).lower()).strip("-")
        told = hashlib.sha256("\0".join(map(str, self.key)).encode()).hexdigest()
        return f"{plain}-{told[:6]}"


def digest_of(cell: Cell, corpus: Corpus) -> str:
    """Tells a run's config, measure and text from all others, in 12 hexadecimal digits."""
    data = [encode(cell), identity(cell.train, corpus)]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]
