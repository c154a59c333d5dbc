"""The command that plans a training run on many GPUs, on paper."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import arg

from attention_residuals.cli.app import command
from attention_residuals.cli.names import config_of, residual_of, run_folder_of
from attention_residuals.errors import ConfigError, is_count, nearest
from attention_residuals.models import ConvertedConfig, DecoderConfig, presets
from attention_residuals.models.kimi_linear import KIMI_LINEAR_SHAPES
from attention_residuals.models.language_model import ModelConfig
from attention_residuals.models.weights import load_config, read_json
from attention_residuals.parallel.activations import activation_formula
from attention_residuals.parallel.config import Parallel
from attention_residuals.parallel.estimate import Estimate, bubbles, estimate, operations

__all__ = ["PlanOptions", "plan_command"]

_ITEMSIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to train, and on how many GPUs.

    Args:
        model: paper-194m, paper-241m, paper-296m, paper-436m, paper-528m, the same with kimi-linear- before
            the size, kimi-linear-tiny, kimi-linear-48b, or the folder or config.json of a run or of a saved
            model.
        gpus: All of them, a multiple of pp; what is more than pp repeats the pipeline for other data,
            which attnres train does not do for Kimi Linear.
        pp: Ranks of one pipeline.
        vp: Stages on each rank.
        microbatches: Of each pipeline in a step.
        tokens: Of one microbatch: its sequences times their length.
        dtype: Of activations and of what is sent; parameters, gradients and AdamW are float32.
        schedule: GPipe, 1F1B, LoopedBFS, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble or DualPipeV;
            by default 1F1B for one stage on each rank, Interleaved1F1B for more. attnres train takes the last
            three only where gpus is pp.
        residual: Another rule than the model's: standard, full, block:S.
        vocab_size: Of a preset, which has none of its own.
        sharded: Parameters, gradients and optimizer are spread over the repeated pipelines (FSDP2).
        checkpoint_activations: Layers are computed again in backward.
    """

    model: str
    gpus: int
    pp: int
    vp: int = 1
    microbatches: int = 8
    tokens: int = 8192
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    schedule: str | None = None
    residual: str | None = None
    vocab_size: int = 163_840
    sharded: bool = False
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        for name in ("gpus", "pp", "vp", "microbatches", "tokens", "vocab_size"):
            if not is_count(getattr(self, name)):
                raise ConfigError(
                    got=f"--{name.replace('_', '-')} {getattr(self, name)}",
                    expected="a whole number, 1 or more",
                    do="correct it",
                )
        if self.gpus % self.pp:
            raise ConfigError(
                got=f"--gpus {self.gpus} --pp {self.pp}",
                expected="a number of GPUs that is a multiple of pp",
                do=f"use {self.gpus - self.gpus % self.pp or self.pp} or {self.gpus + -self.gpus % self.pp} GPUs",
            )

    def config(self) -> DecoderConfig | ConvertedConfig:
        """Finds the model.

        Raises:
            ConfigError: There is none of that name, or no rule of that one.
        """
        found = _model_named(self.model, self.vocab_size)
        if self.residual is None:
            return found
        return replace(found, residual=residual_of(self.residual, found.residual))


@command("plan")
def plan_command(options: Annotated[PlanOptions, arg(name="")]) -> int:
    """Plan a pipeline on paper: memory of each rank, communication, waiting, cost of attention residuals.

    Nothing is allocated and no GPU is needed. Counts of what is sent are exact, those of the plan that the
    pipeline follows; memory of activations is an estimate, whose formula is printed.

    For example:
      attnres plan --model paper-436m --gpus 8 --pp 4 --vp 2
      attnres plan --model paper-436m --gpus 256 --pp 8 --vp 2 --microbatches 32 --tokens 16384 --sharded
      attnres plan --model kimi-linear-48b --gpus 16 --pp 16 --microbatches 32 --checkpoint-activations
      attnres plan --model runs/block --gpus 2 --pp 2 --residual full
    """
    config = options.config()
    schedule = options.schedule or ("1F1B" if options.vp == 1 else "Interleaved1F1B")
    copies = options.gpus // options.pp
    found = estimate(
        config,
        num_ranks=options.pp,
        stages_per_rank=options.vp,
        num_microbatches=options.microbatches,
        num_tokens=options.tokens,
        schedule=schedule,
        itemsize=_ITEMSIZE[options.dtype],
        num_shards=copies if options.sharded else 1,
        checkpoint_activations=options.checkpoint_activations,
    )
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{options.model}: {config.num_layers} layers of width {config.width}, {config.residual}\n"
        f"{options.gpus} GPUs: {copies} x {options.pp} ranks x {options.vp} stages, {schedule}, "
        f"{options.microbatches} microbatches of {options.tokens:,} tokens in {options.dtype}\n",
        markup=False,
    )
    console.print(_memory(found))
    console.print("\n".join(_notes(options, config)), markup=False)
    console.print()
    console.print(_communication(found, options.microbatches))
    console.print(
        "every hop: the whole state; what the rank was not sent before; what it neither has nor made"
    )
    console.print()
    waiting, reasons = _waiting(options, config, schedule)
    console.print(waiting)
    for reason in reasons:
        console.print(reason, markup=False)
    console.print()
    console.print("\n".join(_overhead(found, config, options)), markup=False)
    return 0


def _model_named(name: str, vocab_size: int) -> DecoderConfig | ConvertedConfig:
    """Reads a preset's name, or the folder or config.json of a saved model."""
    if name in presets.PAPER_SHAPES:
        return presets.paper(name, vocab_size=vocab_size)
    if name in KIMI_LINEAR_SHAPES:
        return presets.kimi_linear(name, vocab_size=vocab_size)
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            got=f"--model {name}",
            expected="a preset, or the folder or config.json of a saved model",
            do=nearest(name, (*presets.PAPER_SHAPES, *KIMI_LINEAR_SHAPES)),
        )
    file = run_folder_of(path) / "config.json" if path.is_dir() else path
    found = config_of(file).model if "train" in read_json(file, newest=1) else load_config(file.parent)
    assert isinstance(found, (DecoderConfig, ConvertedConfig))
    return found


def _memory(found: Estimate) -> Table:
    """Shows what each rank needs."""
    table = Table("rank", title="memory of each rank", box=None, title_justify="left")
    for name in ("layers", "parameters", "training", "activations", "buffers", "total", "held"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in found.ranks:
        table.add_row(
            str(rank.rank),
            "+".join(map(str, rank.layers)),
            f"{rank.num_parameters / 1e6:,.1f} M",
            *(
                size_of(number)
                for number in (rank.parameters, rank.activations, rank.buffers, rank.total, rank.held)
            ),
        )
    return table


def _communication(found: Estimate, num_microbatches: int) -> Table:
    """Shows what is sent between ranks, for each transport."""
    table = Table("transport", title="sent between ranks", box=None, title_justify="left")
    for name in ("tensors", "embeddings", "blocks", "forward", "both ways", "a step"):
        table.add_column(name, justify="right", no_wrap=True)
    words = {"naive": "naive", "paper": "paper's cache", "cached": "ours"}
    for transport, plan in found.plans.items():
        one_way = plan.num_sent * found.piece_bytes
        table.add_row(
            words[transport],
            str(plan.num_sent),
            str(plan.num_embeddings_sent),
            str(plan.num_sent - plan.num_embeddings_sent),
            size_of(one_way),
            size_of(2 * one_way),
            size_of(2 * one_way * num_microbatches),
        )
    return table


def _waiting(options: PlanOptions, config: ModelConfig, chosen: str) -> tuple[Table, list[str]]:
    """Shows the share of time in which ranks wait, for each schedule that admits the pipeline.

    Returns:
        The table, and why ``attnres train`` refuses some of its rows.
    """
    table = Table("schedule", title="ranks wait (bubble)", box=None, title_justify="left")
    table.add_column("share of time", justify="right")
    table.add_column("", no_wrap=True)
    reasons = list[str]()
    for name, share in bubbles(options.pp, options.vp, options.microbatches).items():
        if isinstance(share, str):
            table.add_row(name, "-", share)
            continue
        reason = _refusal(options, config, name)
        if reason is not None:
            reasons.append(f"attnres train refuses {reason}")
        notes = ["chosen"] * (name == chosen) + ["refused by attnres train"] * (reason is not None)
        table.add_row(name, f"{share:.1%}", ", ".join(notes))
    return table, list(dict.fromkeys(reasons))


def _refusal(options: PlanOptions, config: ModelConfig, schedule: str) -> str | None:
    """Says why ``attnres train`` would not run a plan with a schedule, if so."""
    copies = options.gpus // options.pp
    parallel = Parallel(
        replicate=1 if options.sharded else copies,
        shard=copies if options.sharded else 1,
        pipeline=options.pp,
    )
    if options.pp > 1:
        parallel = replace(
            parallel, schedule=schedule, stages_per_rank=options.vp, microbatches=options.microbatches
        )
    try:
        parallel.check_model(config)
    except ConfigError as error:
        return f"{error.got}: {error.do}"
    return None


def _notes(options: PlanOptions, config: ModelConfig) -> list[str]:
    """Says how memory was counted."""
    spread = f", spread over {options.gpus // options.pp} ranks" if options.sharded else ""
    kept = "2 D a layer, and one layer whole: " if options.checkpoint_activations else "a layer "
    first, *others = activation_formula(config)
    return [
        f"training: weights, gradients and AdamW, 16 bytes a parameter{spread}",
        f"activations: numbers a token, {kept}{first}",
        *(f"    {line}" for line in others),
        "    logits, and their softmax in float32; at the fullest moment",
        "buffers: PyTorch 2.13 makes one for every microbatch and every tensor or gradient that a rank receives",
        "held: most that is kept for later stages of the rank; it lies in buffers and activations",
    ]


def _overhead(found: Estimate, config: ModelConfig, options: PlanOptions) -> list[str]:
    """Says what attention residuals add to the standard residual."""
    counts = operations(config)
    hops = sum(1 for _ in found.plans["cached"].hops())
    sent = found.plans["cached"].num_sent
    return [
        "attention residuals against the standard residual",
        f"    operations of a forward pass: +{counts.reads / counts.model:.2%} (6 D for each source of a read)",
        f"    vectors that reads and writes move for a sublayer: {counts.vectors:g} (standard: 3)",
        f"    sent for a microbatch: {sent} tensors (standard: {hops}), "
        f"{size_of(2 * (sent - hops) * found.piece_bytes)} more both ways",
    ]


def size_of(num_bytes: int) -> str:
    """Writes a number of bytes for people.

    Example:
        >>> size_of(512), size_of(3 * 2**20), size_of(5 * 2**30)
        ('512 B', '3.0 MiB', '5.0 GiB')
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
