"""Two texts and their difference: routing side by side on one scale."""

from matplotlib.figure import Figure

from attention_residuals.errors import ConfigError
from attention_residuals.plots import style
from attention_residuals.plots.cells import MAX_WRITTEN, SHARES, Scale, add_scale, draw_cells
from attention_residuals.stats import Routing

__all__ = ["contrast_map"]


def contrast_map(
    first: Routing, second: Routing, *, names: tuple[str, str], title: str, footer: str
) -> Figure:
    """Draws two routings on one scale, and the second less the first on a scale that is even around 0.

    Args:
        first: Such as ``token_routing(trace, "mlp", row=0, token=-1)``.
        second: Of the same sites and sources.
        names: What the two are.
        title: What the figure shows.
        footer: What it is from: number of tokens, dtype, checkpoint.

    Raises:
        ConfigError: Other sites or sources in the second.

    Example:
        >>> import torch
        >>> cells = torch.tensor([[0.3, 0.7]])
        >>> one = Routing(("L0.mlp",), ("embedding", "B1"), cells, torch.zeros(1, 2, dtype=torch.bool))
        >>> figure = contrast_map(one, one._replace(weights=1 - cells), names=("A", "B"), title="AB", footer="")
        >>> [axes.get_title(loc="left") for axes in figure.axes[:3]]
        ['A', 'B', 'second less first']
    """
    if (first.sites, first.sources) != (second.sites, second.sources):
        raise ConfigError(
            got=f"routings of {len(first.sites)} and {len(second.sites)} sites, or of other sources",
            expected="the same sites and sources",
            do="take both from one model and one kind of site",
        )
    difference = second.weights - first.weights
    largest = max(difference.abs().nan_to_num(0.0).max().item(), 1e-3)
    signed = Scale(-largest, largest, style.SIGNED)
    rows, columns = first.weights.shape
    written = max(rows, columns) <= MAX_WRITTEN
    cell = 0.42 if written else 0.2
    room = 0.5 + 0.08 * max(len(name) for name in first.sites)
    below = 0.8 + 0.08 * max(len(name) for name in first.sources)
    panels = (
        (names[0], first.weights, SHARES),
        (names[1], second.weights, SHARES),
        ("second less first", difference, signed),
    )
    with style.applied():
        figure = style.new_figure(
            title, footer, width=max(7.5, 3 * cell * columns + room), body=cell * rows + below, key=0.5
        )
        for number, (axes, (name, cells, scale)) in enumerate(
            zip(figure.subplots(1, 3), panels, strict=True)
        ):
            draw_cells(axes, cells, scale=scale, written=written)
            axes.set_title(style.plain(name), loc="left")
            axes.set_xticks(range(columns), labels=[style.plain(one) for one in first.sources], rotation=90)
            sites = [style.plain(one) for one in first.sites] if number == 0 else [""] * rows
            axes.set_yticks(range(rows), labels=sites)
        add_scale(figure, SHARES)
        add_scale(figure, signed, label="difference", left=4.1)
    return figure
