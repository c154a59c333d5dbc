"""What the figures of commands have in common: their two files, what they are from, and pairs of maps."""

from collections.abc import Callable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from attention_residuals.plots import contrast_map, save
from attention_residuals.stats import Routing
from attention_residuals.trace import Trace

__all__ = ["contrasts", "has_shares", "origin", "save_each"]


def has_shares(*traces: Trace) -> bool:
    """Tells whether all weights are shares, which the scale of maps is made for."""
    return all(site.weights.min() >= 0 and site.weights.max() <= 1.01 for trace in traces for site in trace)


def origin(trace: Trace, tokens: str = "") -> str:
    """Says below a figure which tokens it shows, all that are not special by default, and what they ran through."""
    counted = tokens or f"{int(trace.real.sum())} tokens, ends of texts left out"
    checkpoint = trace.about.get("checkpoint", "unknown")[:12]
    return f"n = {counted}; {trace.about['dtype']}; checkpoint {checkpoint}"


def contrasts(
    first: Trace,
    second: Trace,
    routing: Callable[[Trace, str], Routing],
    *,
    names: tuple[str, str],
    title: str,
    footer: str,
) -> dict[str, Figure]:
    """Draws two passes and their difference, attention and MLP sites apart; nothing where weights are no shares."""
    if not has_shares(first, second):
        return {}
    return {
        kind: contrast_map(
            routing(first, kind),
            routing(second, kind),
            names=names,
            title=f"{title}, {'MLP' if kind == 'mlp' else kind} sites",
            footer=footer,
        )
        for kind in ("attention", "mlp")
    }


def save_each(figures: Mapping[str, Figure], folder: Path) -> None:
    """Writes every figure under its name, as PNG and as SVG."""
    for name, figure in figures.items():
        for ending in ("png", "svg"):
            save(figure, folder / f"{name}.{ending}")
