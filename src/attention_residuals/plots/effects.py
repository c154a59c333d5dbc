"""What is read beside what it does: weights and measured effects of the same edges."""

import math

from matplotlib.figure import Figure

from attention_residuals.errors import ConfigError, NonFiniteError
from attention_residuals.plots import style
from attention_residuals.plots.cells import MAX_WRITTEN, SHARES, Scale, add_scale, draw_cells
from attention_residuals.stats import Routing

__all__ = ["effect_map"]


def effect_map(weights: Routing, effects: Routing, *, title: str, footer: str) -> Figure:
    """Draws the mean weights of edges and, on the same rows and columns, what dropping each edge does.

    Args:
        weights: Mean weights, 0 to 1; rows and columns that the effects do not have are left out.
        effects: Mean KL(clean || edited) in nats, of ``edge_effects``.
        title: What the figure shows.
        footer: What it is from: number of tokens, dtype, checkpoint.

    Raises:
        ConfigError: A site of the effects that has no weights.
        NonFiniteError: No effect above 0, or an infinite one.

    Example:
        >>> import torch
        >>> from attention_residuals.stats import Routing
        >>> cells = torch.tensor([[0.3, 0.7], [0.9, 0.1]])
        >>> routing = Routing(("L0.mlp", "output"), ("embedding", "B1"), cells, torch.zeros(2, 2, dtype=bool))
        >>> figure = effect_map(routing, routing, title="Edges", footer="n = 3 tokens")
        >>> [axes.get_title(loc="left") for axes in figure.axes[:2]]
        ['what is read: mean weight', 'what it does: KL when dropped']
    """
    missing = [site for site in effects.sites if site not in weights.sites]
    if missing:
        raise ConfigError(
            got=f"effects of {missing[0]}, which has no weights",
            expected="weights and effects of the same model",
            do="take both from the same texts",
        )
    largest = effects.weights.nan_to_num(nan=0.0, posinf=math.inf).max().item()
    if not 0 < largest < math.inf:
        raise NonFiniteError(
            got=f"effects of which the largest is {largest}",
            expected="finite effects, one of them above 0",
            do="look at the sweep: edits that change nothing have no map",
        )
    rows = [weights.sites.index(site) for site in effects.sites]
    columns = [weights.sources.index(source) for source in effects.sources]
    height, width = len(rows), len(columns)
    cell = 0.42 if max(height, width) <= MAX_WRITTEN else 0.2
    room = 0.5 + 0.08 * max(len(name) for name in effects.sites)
    below = 0.3 + 0.08 * max(len(name) for name in effects.sources)
    unit, per_nat = ("nats", 1) if largest >= 0.5 else ("millinats", 1000)
    scale = Scale(0.0, largest * per_nat, style.WEIGHTS)
    with style.applied():
        figure = style.new_figure(
            title,
            footer,
            width=max(7.0, 2 * (cell * width + room)),
            body=cell * height + below + 0.5,
            key=0.5,
        )
        panels = {
            "what is read: mean weight": (weights.weights[rows][:, columns], SHARES),
            "what it does: KL when dropped": (effects.weights * per_nat, scale),
        }
        for axes, (name, (cells, own)) in zip(figure.subplots(1, 2), panels.items(), strict=True):
            draw_cells(axes, cells, scale=own, written=max(height, width) <= MAX_WRITTEN)
            axes.set_title(name, loc="left")
            axes.set_xticks(
                range(width), labels=[style.plain(source) for source in effects.sources], rotation=90
            )
            axes.set_yticks(range(height), labels=[style.plain(site) for site in effects.sites])
        add_scale(figure, SHARES)
        add_scale(figure, scale, label=unit, left=3.9)
    return figure
