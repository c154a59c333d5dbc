"""The commands that change what a model reads, and measure what that does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from rich.console import Console
from tyro.conf import Positional, arg

from attention_residuals.cli.app import Device, command
from attention_residuals.cli.figures import contrasts, origin, save_each
from attention_residuals.cli.names import Folder, Text, csv_of, device_of, encoded, opened, text_of
from attention_residuals.csv_text import csv_text
from attention_residuals.data import Corpus, Tokenizer
from attention_residuals.durable import write_new
from attention_residuals.errors import ConfigError
from attention_residuals.layers.tap import Chain
from attention_residuals.models.weights import fingerprint
from attention_residuals.page import PageContent, Recorded, write
from attention_residuals.plots import effect_map
from attention_residuals.stats import average_routing, edge_agreement, edge_effects
from attention_residuals.trace import (
    Intervention,
    Receipt,
    Recorder,
    Swept,
    change_of_loss,
    divergence,
    every_edge,
    every_pair,
    every_source,
    intervene,
    load_edits,
    record,
    sweep,
)

__all__ = ["intervene_command", "sweep_command"]


@command("intervene")
def intervene_command(
    folder: Folder,
    text: Text,
    edits: Path,
    out: Path | None = None,
    device: Device = "auto",
) -> int:
    """Run a text with edits of what the model reads or writes, and show what they did.

    Prints a receipt for each edit (how often it fired, where, how much it changed), and for each token how
    far the prediction after it has moved. An edit that changes nothing is an error.

    For example:
      attnres intervene runs/block "def add(a, b):" --edits edits.yaml

    where edits.yaml holds a list of edits, such as
      - {type: Drop, sites: "L3.mlp", sources: embedding}
      - {type: Skip, layers: ["5.."]}

    Args:
        folder: A folder written by attnres train or attnres convert, or "bundled".
        text: What the model reads, after the mark that ends the text before.
        edits: A JSON or YAML file with a list of edits; Drop, Zero, Force, Shuffle, Temperature, Skip and so on.
        out: A new folder for the trace of the edited pass, tokens.csv with the printed table, page.html that shows
            the pass beside the clean one, and the pictures attention.png, mlp.png and their .svg.
        device: auto is cuda where there is one.
    """
    if out is not None and out.exists():
        raise ConfigError(got=f"--out {out}, which exists", expected="a new folder", do="name another")
    listed = load_edits(edits)
    _, model, tokenizer, _ = opened(folder, device_of(device))
    tokens = encoded(text, tokenizer)[None].to(device_of(device))
    if tokens.shape[1] == 1:
        raise ConfigError(got="an empty text", expected="at least one character", do="pass a text to read")
    before, after = Recorder(), Recorder()
    found = intervene(model, tokens, listed, tap=after)
    with torch.no_grad():  # by the same arithmetic: what an edit cannot reach is then equal bit by bit
        clean = model(tokens, tap=Chain(Intervention(model, listed).control_tap(), before))
    rows = _token_rows(clean, found.logits, tokens, tokenizer)
    if out is not None:
        about = {"checkpoint": fingerprint(model)}
        passes = [
            Recorded(trace=replace(trace, about={**trace.about, **about}), name=name, logits=logits)
            for name, trace, logits in (
                ("as it is", before.trace(model, tokenizer=tokenizer), clean),
                ("with edits", after.trace(model, tokenizer=tokenizer), found.logits),
            )
        ]
        _write_intervention(passes, found.receipts, rows, tokenizer, out)
    console = Console(highlight=False, soft_wrap=True)
    for receipt in found.receipts:
        console.print(_receipt_line(receipt), markup=False)
    console.print(f"\n{'token':<16} {'KL':>8} {'loss':>8}  likeliest next: before -> after", markup=False)
    for _, name, moved, loss, old, new in rows:
        change = f"{'':>8}" if loss is None else f"{loss:+8.3f}"
        console.print(f"{name:<16} {moved:8.3f} {change}  {old} -> {new}", markup=False)
    if out is not None:
        console.print(f"wrote {out}", markup=False)
    return 0


def _receipt_line(receipt: Receipt) -> str:
    more = f" and {len(receipt.places) - 4} more" if len(receipt.places) > 4 else ""
    times = "once" if receipt.fired == 1 else f"{receipt.fired} times"
    return (
        f"{type(receipt.edit).__name__}: fired {times}, at {', '.join(receipt.places[:4])}{more}; changed a weight "
        f"by up to {receipt.largest_weight_change:.3g}, a state by up to {receipt.largest_state_change:.3g} times "
        "its length"
    )


def _token_rows(
    clean: torch.Tensor, edited: torch.Tensor, tokens: torch.Tensor, tokenizer: Tokenizer
) -> list[tuple[int, str, float, float | None, str, str]]:
    """Lists for each token how far the prediction after it has moved, and the likeliest before and after."""
    moved = divergence(clean, edited).values[0].tolist()
    losses = [*change_of_loss(clean, edited, tokens).values[0].tolist(), None]
    old, new = (tokenizer.tokens(logits[0].argmax(-1).tolist()) for logits in (clean, edited))
    names = tokenizer.tokens(tokens[0].tolist())
    return list(zip(range(len(names)), names, moved, losses, old, new, strict=True))


def _write_intervention(
    passes: list[Recorded],
    receipts: Sequence[Receipt],
    rows: Sequence[Sequence[object]],
    tokenizer: Tokenizer,
    out: Path,
) -> None:
    first, second = passes
    content = PageContent(
        first=first,
        second=second,
        receipts=receipts,
        spell=tokenizer.tokens,
        title="Depth routing with edits",
    )
    second.trace.save(out)
    write(content, out / "page.html")
    head = ("token", "spelled", "kl_nats", "loss_change_nats", "likeliest_before", "likeliest_after")
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    write_new(out / "tokens.csv", csv_of([head, *cells]).encode())
    figures = contrasts(
        first.trace,
        second.trace,
        average_routing,
        names=("as it is", "with edits"),
        title="Depth routing with edits",
        footer=origin(first.trace),
    )
    save_each(figures, out)


@command("sweep")
def sweep_command(
    folder: Folder,
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    what: Literal["edges", "sources", "pairs"] = "edges",
    site: str | None = None,
    text: Path | None = None,
    num_texts: int = 64,
    length: int = 128,
    batch_size: int = 16,
    device: Device = "auto",
) -> int:
    """Drop every edge, source or pair of sources in turn, and measure what each does to the predictions.

    Writes effects.csv and page.html, and for edges effects.png and effects.svg: the weights beside the effects.
    Prints how well weight, norm share and projection share rank the edges by effect. Ctrl-C loses nothing that is done;
    the same command goes on.

    For example:
      attnres sweep runs/block runs/sweep
      attnres sweep runs/block runs/pairs --what pairs --site L5.mlp

    Args:
        folder: A folder written by attnres train or attnres convert, or "bundled".
        out: Output folder: a new one, or that of the sweep to go on with.
        what: edges: one source at one site. sources: one source at all sites. pairs: two sources of --site.
        site: For pairs, such as L5.mlp.
        text: A UTF-8 text file; by default the validation split of the run's corpus, where there is one.
        num_texts: Pieces of text to measure on.
        length: Tokens of each.
        batch_size: Pieces at once.
        device: auto is cuda where there is one.
    """
    if (what == "pairs") != (site is not None):
        raise ConfigError(
            got=f"--what {what} and --site {site}",
            expected="--site with pairs, and only then",
            do="see --help",
        )
    for name, value in (("num-texts", num_texts), ("length", length), ("batch-size", batch_size)):
        if value < (2 if name == "length" else 1):
            raise ConfigError(got=f"--{name} {value}", expected="1 or more, 2 for length", do="see --help")
    run_folder, model, tokenizer, training = opened(folder, device_of(device))
    if text is None and training is None:
        raise ConfigError(
            got=f"{folder}, which no corpus belongs to", expected="a text", do="pass --text and a text file"
        )
    row = (
        torch.from_numpy(
            Corpus.load(run_folder.parent / "corpus").valid[: num_texts * length].astype("int64")
        )
        if text is None
        else encoded(text_of(text), tokenizer)
    )
    count = min(num_texts, len(row) // length)
    if count == 0:
        raise ConfigError(got=f"{len(row)} tokens", expected=f"at least {length}", do="shorten --length")
    tokens = row[: count * length].view(count, length).to(device_of(device))
    edits = {
        "edges": lambda: every_edge(model),
        "sources": lambda: every_source(model),
        "pairs": lambda: every_pair(model, site or ""),
    }[what]()
    if not edits:
        raise ConfigError(
            got=f"no {what} at {site}", expected="a site with three sources", do="name another site"
        )
    swept = sweep(model, tokens, edits, batch_size=batch_size, folder=out)
    for name in ("page.html", "effects.png", "effects.svg"):
        (out / name).unlink(missing_ok=True)  # of the same sweep, when the same command ran before
    _write(swept, out / "effects.csv")
    console = Console(highlight=False, soft_wrap=True)
    for entry in sorted(swept, key=lambda entry: -entry.divergence)[:10]:
        edit = entry.edits[0]
        console.print(
            f"{edit['sites']!s:<14} without {edit['sources']!s:<22} KL {entry.divergence:.4f}  loss {entry.loss:+.4f}",
            markup=False,
        )
    trace = record(model, tokens[: max(1, 4096 // length)], tokenizer=tokenizer)
    trace = replace(trace, about={**trace.about, "checkpoint": fingerprint(model)})
    write(PageContent(first=trace, effects=swept, title=f"What {what} do"), out / "page.html")
    if what == "edges":
        counted = replace(trace, special=None)  # all tokens, which the effects are of
        for number, found in edge_agreement(counted, swept).items():
            console.print(
                f"rank correlation of {number} and effect: {found.correlation:+.2f} "
                f"[{found.low:+.2f}, {found.high:+.2f}] over {found.num_edges} edges",
                markup=False,
            )
        figure = effect_map(
            average_routing(counted),
            edge_effects(swept),
            title="What is read, and what it does",
            footer=origin(
                trace,
                f"{tokens.numel()} tokens, none left out, of {trace.tokens.numel()} of them the weights",
            ),
        )
        save_each({"effects": figure}, out)
    console.print(f"wrote {out}", markup=False)
    return 0


def _write(swept: list[Swept], path: Path) -> None:
    head = ("sites", "sources", "kl_nats", "loss_change_nats_per_token")
    rows = [
        (entry.edits[0]["sites"], entry.edits[0]["sources"], entry.divergence, entry.loss) for entry in swept
    ]
    path.write_bytes(csv_text([head, *rows]).encode())
