"""The commands that compare: two texts, and a read's weights with others that would do as well."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from tyro.conf import UseAppendAction

from attention_residuals.cli.app import Device, command
from attention_residuals.cli.figures import contrasts, origin, save_each
from attention_residuals.cli.names import Folder, Text, csv_of, device_of, encoded, opened
from attention_residuals.cli.viewing import predicted
from attention_residuals.data import Tokenizer
from attention_residuals.durable import write_new
from attention_residuals.errors import ConfigError
from attention_residuals.models.weights import fingerprint
from attention_residuals.page import PageContent, write
from attention_residuals.stats import pair_distance, token_routing
from attention_residuals.trace import Freedom, Trace, freedom, record
from attention_residuals.trace.sweeps import reads_of

__all__ = ["contrast_command", "freedom_command"]


@command("contrast")
def contrast_command(
    folder: Folder,
    first: Text,
    second: Text,
    control: str | None = None,
    token: int = -1,
    out: Path | None = None,
    device: Device = "auto",
) -> int:
    """Compare where a model reads in two texts that align token by token.

    Prints for each read how far apart its weights are (Jensen-Shannon divergence in nats, 0 to ln 2), and
    which source's share has changed most. A divergence is never below 0, so it says something only beside
    that of a control: a harmless edit of the same size.

    For example:
      attnres contrast bundled "x = 1; y = x" "x = 2; y = x" --control "z = 1; y = x"
      attnres contrast runs/block "a + b" "a - b" --out runs/contrast

    Args:
        folder: A folder written by attnres train or attnres convert, or "bundled".
        first: A text.
        second: The text with the edit that is asked about, of as many tokens.
        control: The first text with an edit that should not matter, of as many tokens.
        token: Compare at this token: 0 is the mark before the texts, -1 the last.
        out: A new folder for contrast.csv (every read, source and token), distances.csv (every read and token),
            page.html with all views of the texts, and the pictures attention.png, mlp.png and their .svg.
        device: auto is cuda where there is one.
    """
    if out is not None and out.exists():
        raise ConfigError(got=f"--out {out}, which exists", expected="a new folder", do="name another")
    _, model, tokenizer, _ = opened(folder, device_of(device))
    texts = [first, second] + ([] if control is None else [control])
    rows = [encoded(text, tokenizer) for text in texts]
    _require_aligned(rows, tokenizer)
    length = len(rows[0])
    if not -length <= token < length:
        raise ConfigError(
            got=f"token {token} of {length}", expected=f"{-length} to {length - 1}", do="-1 is the last"
        )
    place = token % length
    # One call for each, of equal shapes: what lies before the first difference is then equal bit by bit.
    batches = [row[None].to(device_of(device)) for row in rows]
    traces = [record(model, batch, tokenizer=tokenizer) for batch in batches]
    about = {"checkpoint": fingerprint(model)}
    traces = [replace(trace, about={**trace.about, **about}) for trace in traces]
    one, other = traces[:2]
    if out is not None:
        figures = _figures(one, other, place)
        parts = zip(("first text", "second text", "control"), batches, traces, strict=False)
        passes = [predicted(model, batch, trace, name=name) for name, batch, trace in parts]
        content = PageContent(
            first=passes[0],
            second=passes[1],
            control=passes[2] if len(passes) > 2 else None,
            spell=tokenizer.tokens,
            title="Depth routing of two texts",
        )
        write(content, out / "page.html")
        write_new(out / "contrast.csv", _contrast_csv(one, other).encode())
        write_new(out / "distances.csv", _distances_csv(traces).encode())
        save_each(figures, out)
    console = Console(highlight=False, soft_wrap=True)
    names = [trace.token_texts[0][place] for trace in (one, other)]
    console.print(f"at token {place}: {names[0]!r} and {names[1]!r}", markup=False)
    console.print(f"{'read':<16} {'JS nats':>9} {'control':>9}  largest change of a share", markup=False)
    for site in one:
        if len(set(site.same_as)) > 1:
            console.print(_line(traces, site.name, place), markup=False)
    if out is not None:
        console.print(f"wrote {out}", markup=False)
    return 0


@command("freedom")
def freedom_command(
    folder: Folder,
    text: Text,
    site: UseAppendAction[tuple[str, ...]] = (),
    divergence: float = 0.01,
    num_steps: int = 50,
    out: Path | None = None,
    device: Device = "auto",
) -> int:
    """Search how far the weights of a read can move while the predictions stay what they are.

    Prints for each read the share of weight that could move (total variation, 0: the predictions pin the
    weights down), the most that any weights can, what it costs (KL to the clean predictions, nats a token),
    and the same for plain uniform weights. What the search finds is a lower bound.

    For example:
      attnres freedom bundled "def add(a, b):" --site L5.mlp --site output
      attnres freedom runs/block "def add(a, b):" --divergence 0.1 --out freedom.csv

    Args:
        folder: A folder written by attnres train or attnres convert, or "bundled".
        text: What the model reads, after the mark that ends the text before.
        site: Such as L5.mlp, or several, each with a --site; all reads of two sources or more by default.
        divergence: The most that the mean KL may be, nats, above 0.
        num_steps: Passes of each search.
        out: A new CSV file.
        device: auto is cuda where there is one.
    """
    if out is not None and out.exists():
        raise ConfigError(got=f"--out {out}, which exists", expected="a new file", do="name another")
    _, model, tokenizer, _ = opened(folder, device_of(device))
    tokens = encoded(text, tokenizer)[None].to(device_of(device))
    if tokens.shape[1] == 1:
        raise ConfigError(got="an empty text", expected="at least one character", do="pass a text to read")
    reads = [(read.site, read.part) for read in reads_of(model) if len(read.sources) > 1]
    chosen = [(name, part) for name in site for part in _parts(name, reads)] if site else reads
    found = [
        freedom(model, tokens, name, part=part, divergence=divergence, num_steps=num_steps)
        for name, part in track(chosen, "searching", console=Console(stderr=True), transient=True)
    ]
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{'read':<16} {'moved':>6} {'at most':>8} {'KL':>8}   uniform: moved, KL", markup=False)
    for one in found:
        console.print(
            f"{_name(one):<16} {one.total_variation:>6.3f} {one.farthest:>8.3f} {one.divergence:>8.4f}   "
            f"{one.uniform_total_variation:.3f}, {one.uniform_divergence:.4f}",
            markup=False,
        )
    if out is not None:
        write_new(out, _freedom_csv(found).encode())
        console.print(f"wrote {out}", markup=False)
    return 0


def _require_aligned(rows: list[torch.Tensor], tokenizer: Tokenizer) -> None:
    if len(rows[0]) == 1:
        raise ConfigError(got="an empty text", expected="at least one character", do="pass two texts")
    if any(len(row) != len(rows[0]) for row in rows):
        spelled = "; ".join(repr(tokenizer.tokens(row.tolist()[1:])) for row in rows)
        raise ConfigError(
            got=f"texts of {', '.join(str(len(row) - 1) for row in rows)} tokens: {spelled}",
            expected="as many tokens in each, so that every token has its partner",
            do="change words for others of as many tokens",
        )
    if any(torch.equal(rows[0], row) for row in rows[1:]):
        raise ConfigError(got="the same text twice", expected="texts that differ", do="edit one of them")


def _line(traces: list[Trace], site: str, place: int) -> str:
    one, other = traces[:2]
    read = one[site].distinct()
    found = [pair_distance(one, trace, site).divergence[0, place].item() for trace in traces[1:]]
    change = (other[site].distinct().weight_shares - read.weight_shares)[:, 0, place]
    largest = int(change.abs().argmax())
    control = f"{found[1]:9.5f}" if len(found) > 1 else f"{'':>9}"
    return f"{site:<16} {found[0]:9.5f} {control}  {read.source_names[largest]} {change[largest].item():+.4f}"


def _figures(one: Trace, other: Trace, place: int) -> dict[str, Figure]:
    return contrasts(
        one,
        other,
        partial(token_routing, row=0, token=place),
        names=("first text", "second text"),
        title="Depth routing of two texts",
        footer=origin(one, f"1 token (number {place}) of {one.tokens.shape[1]}"),
    )


def _contrast_csv(one: Trace, other: Trace) -> str:
    lines: list[tuple[str, ...]] = [
        ("read", "source", "token", "first", "second", "weight_first", "weight_second")
    ]
    for site in one:
        pair = site.token_weights[:, 0], other[site.name].token_weights[:, 0]
        for source, name in enumerate(site.source_names):
            for place, texts in enumerate(zip(one.token_texts[0], other.token_texts[0], strict=True)):
                weights = (repr(weight[source, place].item()) for weight in pair)
                lines.append((site.name, name, str(place), *texts, *weights))
    return csv_of(lines)


def _distances_csv(traces: list[Trace]) -> str:
    """Writes the Jensen-Shannon divergence of each later trace from the first, a line a read and token."""
    lines: list[tuple[str, ...]] = [("read", "token", *("second_nats", "control_nats")[: len(traces) - 1])]
    for site in traces[0]:
        apart = [pair_distance(traces[0], trace, site.name).divergence[0].tolist() for trace in traces[1:]]
        lines += [
            (site.name, str(place), *map(repr, found)) for place, found in enumerate(zip(*apart, strict=True))
        ]
    return csv_of(lines)


def _freedom_csv(found: list[Freedom]) -> str:
    names = ("total_variation", "farthest", "divergence", "uniform_total_variation", "uniform_divergence")
    return csv_of(
        [("read", *names), *((_name(one), *(str(getattr(one, name)) for name in names)) for one in found)]
    )


def _parts(name: str, reads: list[tuple[str, str]]) -> list[str | None]:
    """Names the parts of a site; one that is not there is left to the search, which knows the nearest name."""
    return [part for site, part in reads if site == name] or [None]


def _name(found: Freedom) -> str:
    return found.site if found.part == "in" else f"{found.site}.{found.part}"
