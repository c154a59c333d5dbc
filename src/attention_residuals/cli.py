"""Train, evaluate and read transformers with attention residuals."""

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
)
from attention_residuals.demo import Demo, run_demo
from attention_residuals.demo.demo import prepared
from attention_residuals.demo.findings import verdict
from attention_residuals.errors import AttentionResidualsError, ConfigError, DataError, nearest
from attention_residuals.layers.residual import AttnRes, ResidualConfig, StandardResidual
from attention_residuals.models import presets
from attention_residuals.models.weights import read_json
from attention_residuals.ops import BACKENDS
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
from attention_residuals.version import __version__

__all__ = ["main"]

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C stopped, as shells have it."""

Device = Literal["auto", "cpu", "cuda"]

app = tyro.extras.SubcommandApp()


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What to train, and how long.

    Args:
        depth: Layers; width, heads and MLP follow from it.
        residual: standard, full, block (about 4 blocks), or block:S with S sublayers per block.
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
    """

    depth: int = 8
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
      attnres train runs/again --config runs/block

    Args:
        folder: Output folder: a new one, or that of the run to resume.
        options: What to train.
        config: The folder or config.json of a run whose model and training to repeat; of the options,
            only those about the text go with it.
        device: auto is cuda where there is one.
        saving: When to save, evaluate and log.
    """
    about_text = ("source", "separator", "valid_fraction", "vocab_size")
    if config is None:
        options.train_config(options.vocab_size)  # impossible options are told before the text is prepared
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
        vocab_size=options.vocab_size,
        valid_fraction=options.valid_fraction,
        started=(folder / "run" / "config.json").exists(),
    )
    train_config = options.train_config(corpus.vocab_size) if given is None else given
    where = device_of(device)
    result = train(train_config, corpus, folder / "run", saving=saving, device=where)
    if result.interrupted:
        return INTERRUPTED
    print(f"{result.step} steps done")
    return eval_command(folder, device=device)


@app.command(name="eval")
def eval_command(
    folder: Positional[Path], text: Path | None = None, batch_size: int = 16, device: Device = "auto"
) -> int:
    """Measure a trained model in nats per token and bits per byte.

    For example:
      attnres eval runs/block
      attnres eval runs/block --text README.md

    Args:
        folder: A folder written by attnres train.
        text: A UTF-8 text file to measure on; by default the whole validation split of the corpus.
        batch_size: Sequences at once.
        device: auto is cuda where there is one.
    """
    run_folder = run_folder_of(folder)
    run, model = load_run(run_folder), load_checkpoint_model(run_folder).to(device_of(device))
    tokenizer = Tokenizer.load(run_folder / "tokenizer.json")
    if text is None:
        tokens, what = Corpus.load(run_folder.parent / "corpus").valid, "the validation split"
    else:
        tokens, what = encoded(text_of(text), tokenizer).numpy(), str(text)
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
        f"on {what} ({found.num_tokens:,} tokens, {found.num_bytes:,} bytes)"
    )
    return 0


@app.command(name="trace")
def trace_command(
    folder: Positional[Path],
    text: Positional[str],
    out: Path | None = None,
    token: int | None = None,
    device: Device = "auto",
) -> int:
    """Show what each site of a trained model reads for a text.

    Prints a table of weights, and with --out writes the trace and its pictures.

    For example:
      attnres trace runs/block "def add(a, b):"
      attnres trace runs/block "def add(a, b):" --token -1 --out runs/trace

    Args:
        folder: A folder written by attnres train.
        text: What the model reads, after the mark that ends the text before.
        out: A new folder for trace.json, trace.safetensors, routing.png and tokens.png.
        token: Show this token: 0 is the mark before the text, 1 the first of the text, -1 the last. By
            default the mean over the tokens of the text.
        device: auto is cuda where there is one.
    """
    run_folder = run_folder_of(folder)
    if out is not None and out.exists():
        raise ConfigError(got=f"--out {out}, which exists", expected="a new folder", do="name another")
    model = load_checkpoint_model(run_folder).to(device_of(device))
    tokenizer = Tokenizer.load(run_folder / "tokenizer.json")
    tokens = encoded(text, tokenizer)
    if len(tokens) == 1:
        raise ConfigError(got="an empty text", expected="at least one character", do="pass a text to read")
    length = len(tokens)
    if token is not None and not -length <= token < length:
        raise ConfigError(
            got=f"token {token} of {length} tokens, the mark before the text included",
            expected=f"{-length} to {length - 1}",
            do="leave --token out to see the mean",
        )
    trace = record(model, tokens[None].to(device_of(device)), tokenizer=tokenizer)
    shown = None if token is None else (0, token % length)
    console = Console(highlight=False, soft_wrap=True)
    if shown is not None:
        console.print(f"token {shown[1]} is {trace.token_texts[0][shown[1]]!a}", markup=False)
    averaged = replace(trace, mask=trace.tokens != tokenizer.end_of_text)
    console.print(routing_table(averaged, shown), markup=False)
    if out is not None:
        trace.save(out)
        write_pictures(averaged, out)
        console.print(f"wrote {out}", markup=False)
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


def source_of(text: str, separator: str | None = None) -> TextSource:
    """Reads the name of a source of text, or a path; a lone file is cut at empty lines unless told otherwise.

    Raises:
        ConfigError: Neither a known name nor an existing path.
    """
    names: dict[str, TextSource] = {"standard-library": StandardLibrary(), "shakespeare": Shakespeare()}
    if text in names:
        return names[text]
    if text.startswith("hub:"):
        return HuggingFaceDataset(path=text.removeprefix("hub:"))
    path = Path(text)
    if path.exists() or len(path.parts) > 1 or path.suffix:
        # A path that is gone by now must read as it did when its run began.
        is_file = path.is_file() if path.exists() else bool(path.suffix)
        cut = "\n\n" if is_file else ""
        return TextFiles(path=text, separator=cut if separator is None else separator)
    raise ConfigError(
        got=f"source {text!r}",
        expected="a known name, hub:OWNER/NAME or an existing path",
        do=nearest(text, names),
    )


def text_of(path: Path) -> str:
    """Reads a UTF-8 text file.

    Raises:
        DataError: It is none.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            got=f"{path}: {error}", expected="a UTF-8 text file", do="name another file"
        ) from error


def config_of(path: Path) -> TrainConfig:
    """Reads the config of a run from its folder or its config.json.

    Raises:
        ConfigError: There is none, or it holds what no config holds.
    """
    file = run_folder_of(path) / "config.json" if path.is_dir() else path
    config = decode(read_json(file, newest=1).get("train"), TRAIN_CONFIGS)
    if not isinstance(config, TrainConfig):
        raise ConfigError(got=f"{file} without a TrainConfig", expected="a run's config.json", do="name one")
    return config


def device_of(name: str) -> str:
    """Chooses the device.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(got="device cuda", expected="a device that is here", do="pass --device cpu or auto")
    return name


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


@app.command(name="backends")
def backends_command() -> int:
    """Show the ways to compute depth attention, in the order in which auto tries them, and what is missing."""
    for backend in BACKENDS.values():
        state = "available" if backend.missing is None else f"not here: {backend.missing}"
        limits = ", ".join(
            (*backend.devices, *(str(dtype).removeprefix("torch.") for dtype in backend.dtypes))
        )
        print(f"{backend.name:<10} {state}\n{'':<10} {backend.about}; {limits or 'any device and dtype'}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, 1 (it failed), 2 (it was called wrongly) or 130 (it was interrupted)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"attnres {__version__}")
        return 0
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print(f"attnres: {message}", file=sys.stderr)
        try:
            return int(app.cli(prog="attnres", description=__doc__, args=arguments))
        except AttentionResidualsError as error:
            print(f"attnres: {error}", file=sys.stderr)
            return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            print("attnres: interrupted; the same command starts again or resumes", file=sys.stderr)
            return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
