"""The commands that train and measure."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from attention_residuals.cli.app import INTERRUPTED, Device, app
from attention_residuals.cli.names import (
    config_of,
    device_of,
    encoded,
    model_folder_of,
    opened,
    residual_of,
    run_folder_of,
    source_of,
    text_of,
)
from attention_residuals.data import Corpus, Tokenizer
from attention_residuals.demo import Demo, run_demo
from attention_residuals.demo.demo import prepared
from attention_residuals.demo.findings import verdict
from attention_residuals.errors import ConfigError
from attention_residuals.models import ConvertedConfig, DecoderConfig, presets
from attention_residuals.models.weights import load_config
from attention_residuals.train import (
    WSD,
    AdamW,
    Cosine,
    Muon,
    Saving,
    TrainConfig,
    evaluate,
    train,
)

__all__ = ["TrainOptions", "demo_command", "eval_command", "train_command"]


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


@app.command(name="train")
def train_command(
    folder: Positional[Path],
    options: Annotated[TrainOptions, arg(name="")] = TrainOptions(),
    config: Path | None = None,
    start: Path | None = None,
    device: Device = "auto",
    saving: Saving = Saving(),  # noqa: B008
) -> int:
    """Train a language model, or resume where the same command stopped.

    The folder receives corpus/ and run/, which holds config.json, environment.json, metrics.jsonl and
    checkpoints/. The text is prepared once. Ctrl-C saves and stops.

    For example:
      attnres train runs/block
      attnres train runs/full --residual full --source shakespeare --num-steps 500
      attnres train runs/mine --source notes.txt
      attnres train runs/kimi --model kimi-linear-tiny
      attnres train runs/again --config runs/block
      attnres train runs/tuned --start converted --learning-rate 1e-3 --trains residual

    Args:
        folder: Output folder: a new one, or that of the run to resume.
        options: What to train.
        config: The folder or config.json of a run whose model and training to repeat; of the options,
            only those about the text go with it.
        start: A folder that attnres convert or attnres train wrote: its model, weights and tokenizer are
            what the run begins with.
        device: auto is cuda where there is one.
        saving: When to save, evaluate and log.
    """
    about_text = ("source", "separator", "valid_fraction", "vocab_size")
    begin = None if start is None else model_folder_of(start)
    if start is not None:
        require_unset(options, "--start", "depth", "model", "residual", "vocab_size")
    if options.model is not None:
        require_unset(options, "--model", "depth")
    if config is None:  # impossible options are told before the text is prepared
        options.train_config(
            options.model_config(options.vocab_size) if begin is None else load_config(begin)
        )
    elif options != replace(TrainOptions(), **{name: getattr(options, name) for name in about_text}):
        raise ConfigError(
            got="--config together with options that it holds",
            expected=f"either of them; with --config only {', '.join(about_text)}",
            do="change the value in a copy of the config.json",
        )
    given = None if config is None else config_of(config)
    corpus = prepared(
        source_of(options.source, options.separator),
        folder / "corpus",
        vocab_size=options.vocab_size if start is None else None,
        tokenizer=None if start is None else Tokenizer.load(run_folder_of(start) / "tokenizer.json"),
        valid_fraction=options.valid_fraction,
        started=(folder / "run" / "config.json").exists(),
    )
    if given is None:
        given = options.train_config(
            options.model_config(corpus.vocab_size) if begin is None else load_config(begin)
        )
    where = device_of(device)
    result = train(given, corpus, folder / "run", saving=saving, device=where, start=begin)
    if result.interrupted:
        return INTERRUPTED
    print(f"{result.step} steps done")
    return eval_command(folder, device=device)


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


@app.command(name="eval")
def eval_command(
    folder: Positional[Path],
    text: Path | None = None,
    sequence_length: int | None = None,
    batch_size: int = 16,
    device: Device = "auto",
) -> int:
    """Measure a model in nats per token and bits per byte.

    For example:
      attnres eval runs/block
      attnres eval runs/block --text README.md
      attnres eval converted --text README.md --sequence-length 512

    Args:
        folder: A folder written by attnres train or attnres convert, or "bundled".
        text: A UTF-8 text file to measure on; by default the whole validation split of the corpus.
        sequence_length: Tokens per window; by default as in training, or 512.
        batch_size: Sequences at once.
        device: auto is cuda where there is one.
    """
    run_folder, model, tokenizer, training = opened(folder, device_of(device))
    if text is None and training is None:
        raise ConfigError(
            got=f"{folder}, which no corpus belongs to", expected="a text", do="pass --text and a text file"
        )
    if text is None:
        tokens, what = Corpus.load(run_folder.parent / "corpus").valid, "the validation split"
    else:
        tokens, what = encoded(text_of(text), tokenizer).numpy(), str(text)
    usual = min(512, model.config.max_tokens) if training is None else training.sequence_length
    found = evaluate(
        model,
        tokens,
        bytes_per_token=tokenizer.bytes_per_token,
        sequence_length=usual if sequence_length is None else sequence_length,
        batch_size=batch_size,
        cross_documents=training is None or training.cross_documents,
        end_of_text=tokenizer.end_of_text,
    )
    print(
        f"{found.loss:.4f} nats per token, {found.bits_per_byte:.4f} bits per byte "
        f"on {what} ({found.num_tokens:,} tokens, {found.num_bytes:,} bytes)"
    )
    return 0


@app.command(name="demo")
def demo_command(
    folder: Path = Path("runs/demo"),
    source: str = "standard-library",
    num_steps: int = Demo().num_steps,
    depth: int = Demo().depth,
    seed: int = 0,
    device: Device = "auto",
) -> int:
    """Train a standard and an attention-residual model side by side and report on both.

    Takes a few minutes on two cores. Writes report.html, one file to open in a browser, and the pictures
    in it as PNG. Started again after Ctrl-C, it resumes.

    For example:
      attnres demo
      attnres demo --source shakespeare --folder runs/shakespeare

    Args:
        folder: Output folder.
        source: standard-library, shakespeare, hub:OWNER/NAME, or the path of a text file or folder.
        num_steps: Optimizer steps of each model.
        depth: Layers of each model, 8 or more.
        seed: Of weights and data order, the same for both models.
        device: auto is cuda where there is one.
    """
    demo = Demo(source=source_of(source), num_steps=num_steps, depth=depth, seed=seed)
    findings = run_demo(demo, folder, device=device_of(device))
    if findings is None:
        return INTERRUPTED
    for found in findings:
        points = "  ".join(f"{bits:.3f}" for _, bits in found.curve)
        print(f"{found.name:<14} bits per byte: {points}")
    print("\n".join(("", *verdict(*findings), "", f"report: {folder / 'report.html'}")))
    return 0
