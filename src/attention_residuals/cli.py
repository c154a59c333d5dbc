"""The command ``attnres``: train, evaluate, trace, and the demo."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from attention_residuals.configs import decode
from attention_residuals.data import (
    Corpus,
    HuggingFaceDataset,
    Shakespeare,
    StandardLibrary,
    TextFiles,
    TextSource,
    Tokenizer,
    prepare,
)
from attention_residuals.demo import Demo, run_demo
from attention_residuals.demo.findings import verdict
from attention_residuals.errors import AttentionResidualsError, ConfigError, nearest
from attention_residuals.layers.residual import AttnRes, ResidualConfig, StandardResidual
from attention_residuals.models import presets
from attention_residuals.models.weights import read_json
from attention_residuals.plots import routing_map, save, token_map
from attention_residuals.stats import average_routing
from attention_residuals.trace import Trace, record, routing_table
from attention_residuals.train import (
    TRAIN_CONFIGS,
    WSD,
    AdamW,
    Cosine,
    Muon,
    Saving,
    TrainConfig,
    evaluate,
    load_checkpoint_model,
    load_run,
    train,
)

__all__ = ["main"]

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C stopped, as shells have it."""

app = tyro.extras.SubcommandApp()


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train, and how long.

    Args:
        depth: Layers; width, heads and MLP follow from it.
        residual: standard, full, block (about 4 blocks), or block:S with S sublayers per block.
        source: standard-library, shakespeare, hub:OWNER/NAME, or the path of a text file or folder.
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
    """

    depth: int = 8
    residual: str = "block"
    source: str = "standard-library"
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

    def train_config(self, vocab_size: int) -> TrainConfig:
        """Makes the config of the run, for a tokenizer of that size."""
        model = presets.scaled(self.depth, vocab_size=vocab_size, max_tokens=max(1024, self.sequence_length))
        warmup = self.num_steps // 20
        schedules: dict[str, Cosine | WSD] = {
            "cosine": Cosine(warmup_steps=warmup),
            "wsd": WSD(warmup_steps=warmup, decay_steps=self.num_steps // 5),
        }
        optimizers: dict[str, AdamW | Muon] = {
            "adamw": AdamW(learning_rate=self.learning_rate),
            "muon": Muon(learning_rate=self.learning_rate),
        }
        return TrainConfig(
            model=replace(model, residual=residual_of(self.residual, model.residual)),
            optimizer=optimizers[self.optimizer],
            schedule=schedules[self.schedule],
            num_steps=self.num_steps,
            batch_size=self.batch_size,
            micro_batch_size=self.micro_batch_size,
            sequence_length=self.sequence_length,
            seed=self.seed,
            precision=self.precision,
            compile=self.compile,
            checkpoint_activations=self.checkpoint_activations,
        )


@app.command(name="train")
def train_command(
    folder: Positional[Path],
    options: Annotated[TrainOptions, arg(name="")] = TrainOptions(),
    config: Path | None = None,
    saving: Saving = Saving(),  # noqa: B008
) -> int:
    """Train a language model, or go on where the same command stopped.

    The folder receives the corpus, config.json, environment.json, metrics.jsonl and checkpoints/. The text
    is prepared once; Ctrl-C saves and stops.

    For example:
      attnres train runs/block
      attnres train runs/full --residual full --source shakespeare --num-steps 500
      attnres train runs/again --config runs/block/config.json

    Args:
        folder: Of the run: new, or of this very run.
        options: What to train.
        config: A run's config.json to train by, in place of the options; edit a copy for what they lack.
        saving: When to save, evaluate and log.
    """
    if config is not None and options != TrainOptions(source=options.source, vocab_size=options.vocab_size):
        raise ConfigError(
            got="--config together with options that it holds",
            expected="either of them; only --source and --vocab-size go with --config",
            do="change the value in a copy of the file",
        )
    options.train_config(
        options.vocab_size
    )  # so that impossible options are told before the text is prepared
    corpus = prepare(source_of(options.source), folder / "corpus", vocab_size=options.vocab_size)
    if config is None:
        train_config = options.train_config(corpus.vocab_size)
    else:
        train_config = decode(read_json(config, newest=1).get("train"), TRAIN_CONFIGS)
        if not isinstance(train_config, TrainConfig):
            raise ConfigError(
                got=f"{config} without a TrainConfig", expected="a run's config.json", do="name one"
            )
    result = train(train_config, corpus, folder / "run", saving=saving)
    if result.interrupted:
        return INTERRUPTED
    print(f"{result.step} steps, {result.loss:.4f} nats per token, {result.bits_per_byte:.4f} bits per byte")
    return 0


@app.command(name="eval")
def eval_command(folder: Positional[Path], text: Path | None = None, batch_size: int = 16) -> int:
    """Measure a trained model in nats per token and bits per byte.

    For example:
      attnres eval runs/block
      attnres eval runs/block --text README.md

    Args:
        folder: That attnres train wrote.
        text: A text file to measure on; by default the corpus's validation split.
        batch_size: Sequences at once.
    """
    run_folder = run_folder_of(folder)
    run, model = load_run(run_folder), load_checkpoint_model(run_folder)
    tokenizer = Tokenizer.load(run_folder / "tokenizer.json")
    if text is None:
        tokens = Corpus.load(run_folder.parent / "corpus").valid
    else:
        (document,) = TextFiles(path=str(text)).documents()
        tokens = encoded(document.text, tokenizer).numpy()
    found = evaluate(
        model,
        tokens,
        bytes_per_token=tokenizer.bytes_per_token,
        sequence_length=run.config.sequence_length,
        batch_size=batch_size,
        cross_documents=run.config.cross_documents,
    )
    print(
        f"{found.loss:.4f} nats per token, {found.bits_per_byte:.4f} bits per byte "
        f"({found.num_tokens:,} tokens, {found.num_bytes:,} bytes)"
    )
    return 0


@app.command(name="trace")
def trace_command(
    folder: Positional[Path], text: Positional[str], out: Path | None = None, token: int | None = None
) -> int:
    """Show what each site of a trained model reads for a text.

    Prints a table of weights, and with --out writes the trace and its pictures.

    For example:
      attnres trace runs/block "def add(a, b):"
      attnres trace runs/block "def add(a, b):" --token -1 --out runs/block/trace

    Args:
        folder: That attnres train wrote.
        text: What the model reads.
        out: A new folder for trace.json, trace.safetensors, routing.png and tokens.png.
        token: Show this token of the text, 0 for the first and -1 for the last; by default the mean of all.
    """
    run_folder = run_folder_of(folder)
    model, tokenizer = load_checkpoint_model(run_folder), Tokenizer.load(run_folder / "tokenizer.json")
    tokens = encoded(text, tokenizer)
    trace = record(model, tokens[None], tokenizer=tokenizer)
    length = len(tokens) - 1  # the first is the end of the text before
    if token is not None and not -length <= token < length:
        raise ConfigError(
            got=f"token {token} of a text of {length} tokens",
            expected=f"{-length} to {length - 1}",
            do="leave --token out to see the mean",
        )
    shown = None if token is None else (0, 1 + token % length)
    console = Console(highlight=False, soft_wrap=True)
    if shown is not None:
        console.print(f"token {token}: {trace.token_texts[0][shown[1]]!r}", markup=False)
    console.print(routing_table(trace, shown), markup=False)
    if out is not None:
        trace.save(out)
        write_pictures(trace, out)
        console.print(f"wrote {out}", markup=False)
    return 0


@app.command(name="demo")
def demo_command(
    folder: Path = Path("runs/demo"),
    source: str = "standard-library",
    num_steps: int = Demo().num_steps,
    depth: int = Demo().depth,
    seed: int = 0,
) -> int:
    """Train a standard and an attention-residual model side by side and report on both.

    Takes a few minutes on two cores. Writes report.html, one file to open in a browser, and the pictures
    in it as PNG. Started again after Ctrl-C, it goes on where it stopped.

    For example:
      attnres demo
      attnres demo --source shakespeare --folder runs/shakespeare

    Args:
        folder: For everything that the demo makes.
        source: standard-library, shakespeare, hub:OWNER/NAME, or the path of a text file or folder.
        num_steps: Optimizer steps of each model.
        depth: Layers of each model, 8 or more.
        seed: Of weights and data order, the same for both models.
    """
    demo = Demo(source=source_of(source), num_steps=num_steps, depth=depth, seed=seed)
    findings = run_demo(demo, folder)
    if findings is None:
        return INTERRUPTED
    for found in findings:
        points = "  ".join(f"{bits:.3f}" for _, bits in found.curve)
        print(f"{found.name:<14} bits per byte: {points}")
    print("\n".join(("", *verdict(*findings), "", f"report: {folder / 'report.html'}")))
    return 0


def residual_of(text: str, block: ResidualConfig) -> ResidualConfig:
    """Reads the name of a residual rule; ``block`` alone is the preset's.

    Raises:
        ConfigError: There is no such rule.
    """
    name, _, size = text.partition(":")
    if name == "block" and size.isdecimal():
        return AttnRes(sublayers_per_block=int(size))
    rules = {"standard": StandardResidual(), "full": AttnRes(sublayers_per_block=1), "block": block}
    if text not in rules:
        raise ConfigError(
            got=f"residual {text!r}", expected="standard, full, block or block:S", do=nearest(text, rules)
        )
    return rules[text]


def source_of(text: str) -> TextSource:
    """Reads the name of a source of text, or a path.

    Raises:
        ConfigError: Neither a known name nor an existing path.
    """
    names: dict[str, TextSource] = {"standard-library": StandardLibrary(), "shakespeare": Shakespeare()}
    if text in names:
        return names[text]
    if text.startswith("hub:"):
        return HuggingFaceDataset(path=text.removeprefix("hub:"))
    if Path(text).exists():
        return TextFiles(path=text)
    raise ConfigError(
        got=f"source {text!r}",
        expected="a known name, hub:OWNER/NAME or an existing path",
        do=nearest(text, names),
    )


def run_folder_of(folder: Path) -> Path:
    """Finds the run in a folder that ``attnres train`` wrote, or takes the run's own folder."""
    return folder / "run" if (folder / "run").is_dir() else folder


def encoded(text: str, tokenizer: Tokenizer) -> torch.Tensor:
    """Turns a text into tokens after an end of text, as documents begin in training."""
    return torch.tensor([tokenizer.end_of_text, *tokenizer.encode(text)])


def write_pictures(trace: Trace, folder: Path) -> None:
    """Draws average routing and the routing of each token."""
    footer = f"n = {trace.tokens.numel()} tokens, {trace.about['dtype']}"
    panels = {
        "attention sites": average_routing(trace, "attention"),
        "MLP sites": average_routing(trace, "mlp"),
        "output": average_routing(trace, "output"),
    }
    save(routing_map(panels, title="Average depth routing", footer=footer), folder / "routing.png")
    last = max(int(site.site[1:].split(".")[0]) for site in trace.sites[:-1])
    sites = [f"L{last // 2}.attention", f"L{last}.attention", f"L{last}.mlp", "output"]
    shown = range(min(64, trace.tokens.shape[1]))
    figure = token_map(trace, row=0, sites=sites, title="Depth routing by token", footer=footer, tokens=shown)
    save(figure, folder / "tokens.png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 (it failed), 2 (it was called wrongly) or 130 (it was interrupted)."""
    warnings.showwarning = lambda message, *_, **__: print(f"attnres: {message}", file=sys.stderr)
    try:
        return int(
            app.cli(
                prog="attnres",
                description=__doc__,
                args=arguments,
                config=(tyro.conf.OmitSubcommandPrefixes,),
            )
        )
    except AttentionResidualsError as error:
        print(f"attnres: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("attnres: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
