"""The commands that train and measure."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from attention_residuals.cli.app import INTERRUPTED, Device, command
from attention_residuals.cli.names import (
    config_of,
    device_of,
    encoded,
    model_folder_of,
    opened,
    run_folder_of,
    source_of,
    text_of,
)
from attention_residuals.cli.ranks import train_on_ranks
from attention_residuals.cli.train_options import TrainOptions, require_unset
from attention_residuals.data import Corpus, Tokenizer
from attention_residuals.demo import Demo, run_demo
from attention_residuals.demo.demo import prepared
from attention_residuals.demo.findings import verdict
from attention_residuals.errors import ConfigError
from attention_residuals.models.weights import load_config
from attention_residuals.parallel.config import Parallel
from attention_residuals.train import (
    Result,
    Saving,
    TrainConfig,
    evaluate,
    train,
)
from attention_residuals.train.execution import Executes, InProcess

__all__ = ["demo_command", "eval_command", "train_command"]


@command("train")
def train_command(
    folder: Positional[Path],
    options: Annotated[TrainOptions, arg(name="")] = TrainOptions(),  # noqa: B008
    config: Path | None = None,
    start: Path | None = None,
    device: Device = "auto",
    saving: Saving = Saving(),  # noqa: B008
    parallel: Parallel = Parallel(),  # noqa: B008
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
      torchrun --nproc-per-node 2 --no-python -- attnres train runs/two --parallel.shard 2

    Args:
        folder: Output folder: a new one, or that of the run to resume.
        options: What to train.
        config: The folder or config.json of a run whose model and training to repeat; of the options,
            only those about the text go with it.
        start: A folder that attnres convert or attnres train wrote: its model, weights and tokenizer are
            what the run begins with.
        device: auto is cuda where there is one.
        saving: When to save, evaluate and log.
        parallel: How to train on several processes, which torchrun starts; see docs/distributed.md.
    """
    parallel.check_world()
    about_text = ("source", "separator", "valid_fraction", "vocab_size")
    begin = None if start is None else model_folder_of(start)
    if start is not None:
        require_unset(options, "--start", "depth", "model", "residual", "vocab_size")
    if options.model is not None:
        require_unset(options, "--model", "depth")
    if config is not None and options != replace(
        TrainOptions(), **{name: getattr(options, name) for name in about_text}
    ):
        raise ConfigError(
            got="--config together with options that it holds",
            expected=f"either of them; with --config only {', '.join(about_text)}",
            do="change the value in a copy of the config.json",
        )
    given = None if config is None else config_of(config)

    def config_for(vocab_size: int) -> TrainConfig:
        if given is not None:
            return given
        model = options.model_config(vocab_size) if begin is None else load_config(begin)
        return options.train_config(model)

    parallel.check(config_for(options.vocab_size))  # what is impossible is told before the text is prepared
    started = (folder / "run" / "config.json").exists()

    def corpus_of() -> Corpus:
        return prepared(
            source_of(options.source, options.separator),
            folder / "corpus",
            vocab_size=options.vocab_size if start is None else None,
            tokenizer=None if start is None else Tokenizer.load(run_folder_of(start) / "tokenizer.json"),
            valid_fraction=options.valid_fraction,
            started=started,
        )

    where = device_of(device)

    def run(corpus: Corpus, executes: Executes) -> Result:
        return train(
            config_for(corpus.vocab_size),
            corpus,
            folder / "run",
            saving=saving,
            device=where,
            start=begin,
            executes=executes,
        )

    if parallel.num_ranks > 1:
        places = {"folder": folder, "--config": config, "--start": start}
        words = {name: None if place is None else str(place) for name, place in places.items()}
        words |= {f"--{name.replace('_', '-')}": value for name, value in asdict(options).items()}
        return train_on_ranks(parallel, where, words, corpus_of, partial(Corpus.load, folder / "corpus"), run)
    result = run(corpus_of(), InProcess)
    if result.interrupted:
        return INTERRUPTED
    print(f"{result.step} steps done")
    return eval_command(folder, device=device)


@command("eval")
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
        sequence_length: Tokens per window; by default as in training; 512 for a model that was converted or
            exported.
        batch_size: Sequences at once.
        device: auto is cuda where there is one.
    """
    run_folder, model, tokenizer, training = opened(folder, device_of(device))
    if text is None and training is None:
        raise ConfigError(
            got=f"{folder}, which no corpus belongs to", expected="a text", do="pass --text and a text file"
        )
    scored = None
    if text is None:
        corpus = Corpus.load(run_folder.parent / "corpus")
        tokens, scored, what = corpus.valid, corpus.valid_scored, "the validation split"
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
        scored=scored,
    )
    print(
        f"{found.loss:.4f} nats per token, {found.bits_per_byte:.4f} bits per byte "
        f"on {what} ({found.num_tokens:,} tokens, {found.num_bytes:,} bytes)"
    )
    return 0


@command("demo")
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
