"""Trains both models, measures them, and writes the report."""

import json
import sys
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path

from attention_residuals.data import (
    Corpus,
    StandardLibrary,
    TextFiles,
    TextSource,
    Tokenizer,
    corpus_options,
    prepare,
)
from attention_residuals.demo.findings import Findings, measure
from attention_residuals.demo.report import write_demo_report
from attention_residuals.durable import write_bytes
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes, ResidualConfig, StandardResidual
from attention_residuals.models import presets
from attention_residuals.train import AdamW, Cosine, Saving, TrainConfig, train

__all__ = ["MODELS", "Demo", "prepared", "run_demo"]

MODELS: dict[str, ResidualConfig] = {
    "standard": StandardResidual(),
    "block": AttnRes(sublayers_per_block=4),
}
"""The two rules that are compared, by the name of their folder."""

NAMES = {"standard": "standard", "block": "Block AttnRes"}


@dataclass(frozen=True, kw_only=True)
class Demo:
    """What the demo trains: two models that differ in nothing but their residual rule.

    Args:
        source: Where the text comes from.
        num_steps: Optimizer steps of each model.
        depth: Layers of each model.
        vocab_size: Of the tokenizer that is trained on the text.
        sequence_length: Tokens.
        batch_size: Sequences per step.
        learning_rate: The peak, the same for both.
        seed: Of weights and data order, the same for both.

    Raises:
        ConfigError: Fewer than 8 layers, in which there is little depth to attend over.
    """

    source: TextSource = field(default_factory=StandardLibrary)
    num_steps: int = 400
    depth: int = 8
    vocab_size: int = 2048
    sequence_length: int = 128
    batch_size: int = 16
    learning_rate: float = 4e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.depth < 8:
            raise ConfigError(
                got=f"depth={self.depth}", expected="8 or more layers", do="train smaller models with train()"
            )

    def train_config(self, residual: ResidualConfig, corpus: Corpus) -> TrainConfig:
        """Makes the config of one of the two runs."""
        model = presets.scaled(self.depth, vocab_size=corpus.vocab_size, max_tokens=self.sequence_length)
        return TrainConfig(
            model=replace(model, residual=residual),
            optimizer=AdamW(learning_rate=self.learning_rate),
            schedule=Cosine(warmup_steps=self.num_steps // 10),
            num_steps=self.num_steps,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            seed=self.seed,
        )


def prepared(
    source: TextSource,
    folder: Path,
    *,
    vocab_size: int | None,
    started: bool,
    valid_fraction: float = 0.05,
    tokenizer: Tokenizer | None = None,
) -> Corpus:
    """Prepares a corpus, or opens that of a run that has started, whose text may be gone or changed by now.

    Raises:
        ConfigError: The run has started with another source or other options, or would write into its text.
    """
    if started and (folder / "manifest.json").exists():
        corpus = Corpus.load(folder)
        options = corpus_options(vocab_size, valid_fraction, tokenizer)
        here = {"source": asdict(source) if is_dataclass(source) else {}, "options": options}
        there = {"source": corpus.manifest["source"]["config"], "options": corpus.manifest["options"]}
        if there != here:
            raise ConfigError(
                got=f"{here} for {folder}", expected=f"{there}, with which it began", do="name another folder"
            )
        return corpus
    if isinstance(source, TextFiles) and Path(source.path).resolve() in folder.resolve().parents:
        raise ConfigError(
            got=f"a run in {folder}, inside of its own text {source.path}",
            expected="a folder elsewhere, so that no run becomes text of the next",
            do="name a folder outside, or one whose name begins with a dot: those are not read",
        )
    print(f"preparing the text in {folder}", file=sys.stderr)
    return prepare(source, folder, vocab_size=vocab_size, valid_fraction=valid_fraction, tokenizer=tokenizer)


def run_demo(
    demo: Demo, folder: Path | str, *, progress: bool = True, device: str = "cpu"
) -> tuple[Findings, ...] | None:
    """Trains both models, or goes on where an earlier call stopped, and writes the report.

    Args:
        demo: What to train.
        folder: Receives corpus, standard and block (the runs), findings.json, the pictures and report.html.
        progress: Show progress on stderr.
        device: Where to train.

    Returns:
        What was found for each model; None if a signal stopped the training, which the same call goes on
        with.

    Raises:
        ConfigError: The folder holds another demo, or a finished one.
    """
    folder = Path(folder)
    if (folder / "report.html").exists():
        raise ConfigError(
            got=f"{folder / 'report.html'}, which is finished",
            expected="a folder without a report",
            do="open it, name another folder, or delete the file to have it written again",
        )
    started = (folder / "standard" / "config.json").exists()
    corpus = prepared(demo.source, folder / "corpus", vocab_size=demo.vocab_size, started=started)
    saving = Saving(
        every=100, keep=1, evaluate_every=max(1, demo.num_steps // 10), evaluate_batches=8, log_every=10
    )
    for name, residual in MODELS.items():
        config = demo.train_config(residual, corpus)
        if progress:
            print(f"{NAMES[name]} model:", file=sys.stderr)
        if train(config, corpus, folder / name, saving=saving, progress=progress, device=device).interrupted:
            return None
    findings = tuple(measure(NAMES[name], folder / name, corpus) for name in MODELS)
    numbers = [found.numbers() for found in findings]
    write_bytes(folder / "findings.json", (json.dumps(numbers, indent=1) + "\n").encode())
    write_demo_report(folder, findings, demo.source, corpus)
    return findings
