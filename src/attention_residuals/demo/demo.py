"""Trains both models, measures them, and writes the report."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from attention_residuals.data import Corpus, StandardLibrary, TextSource, prepare
from attention_residuals.demo.findings import Findings, measure
from attention_residuals.demo.report import write_demo_report
from attention_residuals.durable import write_bytes
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import AttnRes, ResidualConfig, StandardResidual
from attention_residuals.models import presets
from attention_residuals.train import AdamW, Cosine, Saving, TrainConfig, train

__all__ = ["MODELS", "Demo", "run_demo"]

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


def run_demo(demo: Demo, folder: Path | str, *, progress: bool = True) -> tuple[Findings, ...] | None:
    """Trains both models, or goes on where an earlier call stopped, and writes the report.

    Args:
        demo: What to train.
        folder: Receives corpus, standard and block (the runs), findings.json, the pictures and report.html.
        progress: Show progress on stderr.

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
    corpus = prepare(demo.source, folder / "corpus", vocab_size=demo.vocab_size)
    saving = Saving(
        every=100, keep=1, evaluate_every=max(1, demo.num_steps // 10), evaluate_batches=8, log_every=10
    )
    for name, residual in MODELS.items():
        config = demo.train_config(residual, corpus)
        if train(config, corpus, folder / name, saving=saving, progress=progress).interrupted:
            return None
    findings = tuple(measure(NAMES[name], folder / name, corpus) for name in MODELS)
    numbers = [found.numbers() for found in findings]
    write_bytes(folder / "findings.json", (json.dumps(numbers, indent=1) + "\n").encode())
    write_demo_report(folder, findings, demo.source, corpus)
    return findings
