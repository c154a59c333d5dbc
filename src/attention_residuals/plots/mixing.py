"""Maps of the depth mixing matrix."""

import math

from matplotlib.figure import Figure

from attention_residuals.errors import NonFiniteError
from attention_residuals.plots import style
from attention_residuals.plots.cells import MAX_WRITTEN, SHARES, Scale, add_scale, draw_cells
from attention_residuals.stats import Routing

__all__ = ["mixing_map"]


def mixing_map(average: Routing, *, title: str, footer: str) -> Figure:
    """Draws how many times each read (rows) holds each writer's output (columns).

    Weights from 0 to 1 are drawn on that scale. Where a rule has others, the scale goes from minus the
    largest to the largest, and both ends have colours of their own, so that 0 is the pale middle.

    Args:
        average: ``mixing_matrix(trace).average(trace)``.
        title: What the figure shows.
        footer: What it is from: number of tokens, dtype, checkpoint.

    Raises:
        NonFiniteError: A weight is not finite, or all are NaN.

    Source:
        Attention Residuals (arXiv:2603.15031), Fig. 9.

    Example:
        >>> import torch
        >>> from attention_residuals import Decoder, presets, record
        >>> from attention_residuals.stats import mixing_matrix
        >>> trace = record(Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]]))
        >>> figure = mixing_map(mixing_matrix(trace).average(trace), title="M", footer="3 tokens")
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()][-1]
        'output'
    """
    weights = average.weights
    largest = weights.abs().nan_to_num(nan=0.0, posinf=math.inf).max().item()
    if not 0 < largest < math.inf:
        raise NonFiniteError(
            got=f"a mixing matrix whose largest weight is {largest}",
            expected="finite weights, not all of them zero or NaN",
            do="look at the model: its scores are probably not finite",
        )
    is_share = weights.nan_to_num(0).min() >= 0 and largest <= 1.01
    scale = SHARES if is_share else Scale(-largest, largest, style.SIGNED)
    rows, columns = weights.shape
    cell = 0.42 if max(rows, columns) <= MAX_WRITTEN else 0.2
    room = 0.3 + 0.08 * max(len(name) for name in (*average.sites, *average.sources))
    with style.applied():
        figure = style.new_figure(
            title, footer, width=max(4.5, cell * columns + room), body=cell * rows + room + 0.3, key=0.5
        )
        axes = figure.subplots()
        draw_cells(axes, weights, scale=scale, written=max(rows, columns) <= MAX_WRITTEN)
        axes.set_xticks(range(columns), labels=[style.plain(name) for name in average.sources], rotation=90)
        axes.set_yticks(range(rows), labels=[style.plain(name) for name in average.sites])
        axes.set_xlabel("writer")
        axes.set_ylabel("read")
        add_scale(figure, scale)
    return figure
