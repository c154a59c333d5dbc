"""What to train, as options of ``attnres train``."""

from dataclasses import dataclass, replace
from typing import Literal

from attention_residuals.cli.names import residual_of
from attention_residuals.errors import ConfigError
from attention_residuals.models import ConvertedConfig, DecoderConfig, presets
from attention_residuals.train import WSD, AdamW, Cosine, Muon, TrainConfig

__all__ = ["TrainOptions", "require_unset"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train, and how long.

    Args:
        depth: Layers; width, heads and MLP follow from it.
        model: kimi-linear-tiny, or another size of the paper's own architecture (kimi-linear-194m to -528m and
            -48b); by default a decoder of depth layers. Needs Transformers.
        residual: standard, full, block (about 4 blocks), block:S with S sublayers per block, or a rule that
            attnres rules lists, with options: window:window=4 or heads:num_heads=8,sublayers_per_block=2.
        source: standard-library, shakespeare, hub:OWNER/NAME, or the path of a text file or folder.
        separator: Where a text is cut into documents, which are split into training and validation; by
            default a lone file is cut at empty lines and the files of a folder are not cut.
        valid_fraction: Share of the documents that is kept for validation.
        vocab_size: Of the tokenizer that is trained on the text.
        sequence_length: Tokens per sequence.
        batch_size: Sequences per step.
        micro_batch_size: Sequences per forward pass; all of the batch by default.
        num_steps: Optimizer steps.
        learning_rate: The peak.
        optimizer: adamw, or muon for matrices with adamw for the rest.
        schedule: cosine, or wsd: warm-up, stable, decay over the last fifth.
        precision: bfloat16 runs matrix products under autocast.
        seed: Of the weights and the order of the data.
        compile: Compile the model; worth it for long runs.
        checkpoint_activations: Keep less for backward and compute it again.
        trains: residual trains what the residual rule learns, and leaves the rest as it starts; with adamw.
        cross_documents: Let tokens attend to the documents before theirs in the same sequence.
    """

    depth: int = 8
    model: str | None = None
    residual: str = "block"
    source: str = "standard-library"
    separator: str | None = None
    valid_fraction: float = 0.05
    vocab_size: int = 4096
    sequence_length: int = 256
    batch_size: int = 16
    micro_batch_size: int | None = None
    num_steps: int = 1000
    learning_rate: float = 3e-3
    optimizer: Literal["adamw", "muon"] = "adamw"
    schedule: Literal["cosine", "wsd"] = "cosine"
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: int = 0
    compile: bool = False
    checkpoint_activations: bool = False
    trains: Literal["all", "residual"] = "all"
    cross_documents: bool = False

    def model_config(self, vocab_size: int) -> DecoderConfig | ConvertedConfig:
        """Makes the config of a new model, for a tokenizer of that size."""
        if self.model is not None:
            usual = presets.kimi_linear(self.model, vocab_size=vocab_size).residual
            residual = residual_of(self.residual, usual)
            return presets.kimi_linear(self.model, vocab_size=vocab_size, residual=residual)
        model = presets.scaled(self.depth, vocab_size=vocab_size, max_tokens=max(1024, self.sequence_length))
        return replace(model, residual=residual_of(self.residual, model.residual))

    def train_config(self, model: DecoderConfig | ConvertedConfig) -> TrainConfig:
        """Makes the config of the run."""
        warmup = self.num_steps // 20
        schedules: dict[str, Cosine | WSD] = {
            "cosine": Cosine(warmup_steps=warmup),
            "wsd": WSD(warmup_steps=warmup, decay_steps=self.num_steps // 5),
        }
        optimizers: dict[str, AdamW | Muon] = {
            "adamw": AdamW(learning_rate=self.learning_rate, trains=self.trains),
            "muon": Muon(learning_rate=self.learning_rate),
        }
        return TrainConfig(
            model=model,
            optimizer=optimizers[self.optimizer],
            schedule=schedules[self.schedule],
            num_steps=self.num_steps,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            sequence_length=self.sequence_length,
            seed=self.seed,
            precision=self.precision,
            compile=self.compile,
            cross_documents=self.cross_documents,
            checkpoint_activations=self.checkpoint_activations,
        )


def require_unset(options: TrainOptions, decider: str, *names: str) -> None:
    """Refuses options that another option decides.

    Raises:
        ConfigError: One of them was given.
    """
    given = [name for name in names if getattr(options, name) != getattr(TrainOptions(), name)]
    if given:
        raise ConfigError(
            got=f"--{given[0].replace('_', '-')} together with {decider}",
            expected=f"one of them: the model that {decider} names has its own",
            do="leave it out, or train a new model",
        )
