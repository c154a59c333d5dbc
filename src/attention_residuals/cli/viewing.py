"""The commands that show: what a model reads, which rules and backends there are."""

from dataclasses import fields, replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console

from attention_residuals.cli.app import Device, command
from attention_residuals.cli.figures import has_shares, origin, save_each
from attention_residuals.cli.names import Words, csv_of, device_of, encoded, folder_and_text, name_of, opened
from attention_residuals.durable import write_new
from attention_residuals.errors import ConfigError
from attention_residuals.layers.residual import RULES, ResidualConfig
from attention_residuals.models import LanguageModel
from attention_residuals.models.weights import fingerprint
from attention_residuals.ops import BACKENDS
from attention_residuals.page import PageContent, Recorded, write
from attention_residuals.plots import mixing_map, routing_map, token_map
from attention_residuals.stats import average_routing, mixing_matrix
from attention_residuals.trace import Trace, lens, record, routing_table, rule_facts

__all__ = [
    "backends_command",
    "pictures",
    "predicted",
    "rule_lines",
    "rules_command",
    "trace_command",
    "weights_csv",
]


@command("trace")
def trace_command(
    words: Words,
    out: Path | None = None,
    html: Path | None = None,
    token: int | None = None,
    device: Device = "auto",
) -> int:
    """Show what each site of a trained model reads for a text.

    Prints a table of weights, with --out writes the trace and its pictures, and with --html the page on which
    to look at it.

    For example:
      attnres trace "def add(a, b):"
      attnres trace runs/block "def add(a, b):" --token -1 --out runs/trace
      attnres trace runs/block "def add(a, b):" --html trace.html

    Args:
        words: A folder written by attnres train or attnres convert, then the text that the model reads, after
            the mark that ends the text before. The text alone is for the model that comes with the package.
        out: A new folder for trace.json, trace.safetensors, weights.csv (every read, source and token), the
            picture mixing.png and, where weights are shares, routing.png and tokens.png; each as .svg too.
        html: A new file: one page with all views of the trace and what the model predicts, for any browser.
        token: Show this token: 0 is the mark before the text, 1 the first of the text, -1 the last. By
            default the mean over the tokens of the text.
        device: auto is cuda where there is one.
    """
    if out is not None and out.exists():
        raise ConfigError(got=f"--out {out}, which exists", expected="a new folder", do="name another")
    if html is not None and html.exists():
        raise ConfigError(got=f"--html {html}, which exists", expected="a new file", do="name another")
    folder, text = folder_and_text(words)
    _, model, tokenizer, _ = opened(folder, device_of(device))
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
    batch = tokens[None].to(device_of(device))
    trace = record(model, batch, tokenizer=tokenizer)
    trace = replace(trace, about={**trace.about, "checkpoint": fingerprint(model)})
    shown = None if token is None else (0, token % length)
    averaged = replace(trace, mask=trace.tokens != tokenizer.end_of_text)
    if out is not None:
        figures = pictures(averaged)
        trace.save(out)
        write_new(out / "weights.csv", weights_csv(trace).encode())
        save_each(figures, out)
    if html is not None:
        title = f"Depth routing of {name_of(folder)}"
        write(PageContent(first=predicted(model, batch, trace), spell=tokenizer.tokens, title=title), html)
    console = Console(highlight=False, soft_wrap=True)
    if shown is not None:
        console.print(f"token {shown[1]} is {trace.token_texts[0][shown[1]]!r}", markup=False)
    console.print(routing_table(averaged, shown), markup=False)
    for written in (out, html):
        if written is not None:
            console.print(f"wrote {written}", markup=False)
    return 0


def weights_csv(trace: Trace) -> str:
    """Writes what every token reads of every source, a line each: weight, norm share and projection share."""
    lines: list[tuple[str, ...]] = [
        ("read", "source", "text", "token", "spelled", "weight", "norm_share", "projection_share")
    ]
    for site in trace:
        numbers = torch.stack([site.token_weights, site.norm_shares, site.projections], -1).tolist()
        for source, rows in zip(site.source_names, numbers, strict=True):
            for row, texts in enumerate(rows):
                lines += [
                    (
                        site.name,
                        source,
                        str(row),
                        str(token),
                        trace.token_texts[row][token],
                        *map(repr, three),
                    )
                    for token, three in enumerate(texts)
                ]
    return csv_of(lines)


def predicted(model: LanguageModel, tokens: torch.Tensor, trace: Trace, *, name: str = "") -> Recorded:
    """Puts beside a trace what the model predicts at its end and would predict at each site."""
    with torch.no_grad():
        return Recorded(trace=trace, name=name, logits=model(tokens), lens=lens(model, tokens))


def pictures(trace: Trace) -> dict[str, Figure]:
    """Draws the mixing matrix, and where weights are shares, average routing and the routing of each token."""
    footer = origin(trace)
    matrix = mixing_matrix(trace).average(trace)
    figures = {"mixing": mixing_map(matrix, title="What each read holds of each output", footer=footer)}
    if not has_shares(trace):
        return figures
    panels = {
        "attention sites": average_routing(trace, "attention"),
        "MLP sites": average_routing(trace, "mlp"),
        "output": average_routing(trace, "output"),
    }
    figures["routing"] = routing_map(panels, title="Average depth routing", footer=footer)
    last = max(int(site.site[1:].split(".")[0]) for site in trace.sites[:-1])
    sites = [f"L{last // 2}.attention", f"L{last}.attention", f"L{last}.mlp", "output"]
    shown = range(min(64, trace.tokens.shape[1]))
    figures["tokens"] = token_map(
        trace, row=0, sites=sites, title="Depth routing by token", footer=footer, tokens=shown
    )
    return figures


@command("rules")
def rules_command() -> int:
    """List the residual rules: what a read is, what it costs, and what a trace of it holds.

    Counts are those of 8 layers and a width of 128, with each rule's default options.

    For example:
      attnres rules
      attnres train runs/delta --residual delta:sublayers_per_block=4
    """
    for name, config_type in RULES.items():
        print("\n".join((name, *(f"    {line}" for line in rule_lines(config_type())))))
    return 0


def rule_lines(config: ResidualConfig) -> list[str]:
    """Describes a rule, a line for each fact."""
    facts = rule_facts(config)
    last = facts.trace.sites[-2]
    scores = "weights" if last.logits is None else "weights, scores"
    heads = f", each for {last.weights.shape[3]} groups of channels" if last.weights.ndim == 4 else ""
    parts = [site.part for site in facts.trace.sites if site.site == "L1.attention"]
    reads = "" if len(parts) == 1 else f"; attention sites read {len(parts)} times ({', '.join(parts)})"
    options = ", ".join(f"{field.name}={getattr(config, field.name)!r}" for field in fields(config))  # type: ignore[arg-type]
    where = {"attention": "an attention site", "mlp": "an MLP site", "output": "the output"}
    counts = ", ".join(f"{count:,} at {where[site]}" for site, count in facts.parameters.items())
    lines = [
        (type(config).__doc__ or "").strip().splitlines()[0],
        config.formula,
        f"options: {type(config).__name__}({options})",
        f"parameters: {counts}",
        f"state: {facts.state_vectors} vectors a token before the output, which reads {facts.num_sources}",
        f"traced: {scores}{heads}, source norms, writers{reads}",
    ]
    return lines + [f"caution: {caution}" for caution in facts.trace.cautions]


@command("backends")
def backends_command() -> int:
    """Show the ways to compute depth attention, in the order in which auto tries them, and what is missing."""
    for backend in BACKENDS.values():
        state = "available" if backend.missing is None else f"not here: {backend.missing}"
        limits = ", ".join(
            (*backend.devices, *(str(dtype).removeprefix("torch.") for dtype in backend.dtypes))
        )
        print(f"{backend.name:<10} {state}\n{'':<10} {backend.about}; {limits or 'any device and dtype'}")
    return 0
