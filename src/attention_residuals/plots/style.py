"""How every figure looks, and how texts from outside get into it as they are."""

import textwrap
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import matplotlib.style
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

__all__ = [
    "COLOURS",
    "DASHES",
    "EMPTY",
    "FAINT",
    "MARKERS",
    "OPEN",
    "SIGNED",
    "WEIGHTS",
    "add_key",
    "applied",
    "key_top",
    "new_figure",
    "plain",
    "visible",
]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#000000", "#56B4E9", "#E69F00")
"""Of lines; people with any kind of colour blindness can tell them apart."""

DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

WEIGHTS: Colormap = LinearSegmentedColormap.from_list("weights", ("#e6ecf5", "#8fb8de", "#2a6fb0", "#08193d"))
"""Of weights from 0 to 1: one hue whose lightness falls steadily, and 0 is not white."""

SIGNED: Colormap = LinearSegmentedColormap.from_list(
    "signed", ("#7f2704", "#e6883c", "#f4f1ec", "#2a6fb0", "#08193d")
)
"""Of weights that may be negative: orange below 0, pale at 0, blue above."""

OPEN = "#D55E00"
EMPTY = "#b8b8b8"
FAINT = "#595959"

_FONT = "DejaVu Sans"
_TITLE_SIZE, _FOOTER_SIZE = 12.0, 8.0
_EDGE = 0.08
"""Inches left free at the figure's edges."""

_SETTINGS = {
    "font.family": [_FONT],
    "font.size": 10.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e0e0e0",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "svg.hashsalt": "attention_residuals",
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
}


def applied() -> AbstractContextManager[Any]:
    """Sets the look until the block ends, whatever the user's own settings of matplotlib are."""
    return matplotlib.style.context(["default", _SETTINGS])


def new_figure(title: str, footer: str, *, width: float, body: float, key: float) -> Figure:
    """Makes an empty figure: from top to bottom a title, room for axes, room for a key, and the footer.

    Args:
        title: What the figure shows; wrapped.
        footer: What it is from: number of tokens, dtype, checkpoint; wrapped.
        width: Of the figure in inches.
        body: Height of the room for axes and their labels, in inches.
        key: Height of the room for a key below them, in inches.
    """
    title, footer = _wrapped(title, width, _TITLE_SIZE), _wrapped(footer, width, _FOOTER_SIZE)
    above, below = _height(title, _TITLE_SIZE), _height(footer, _FOOTER_SIZE) + key
    height = above + body + below
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", rect=(0, below / height, 1, body / height))
    left, edge = _EDGE / width, _EDGE / height
    figure.text(left, 1 - edge, title, ha="left", va="top", fontsize=_TITLE_SIZE, fontweight="bold")
    figure.text(left, edge, footer, ha="left", va="bottom", fontsize=_FOOTER_SIZE, color=FAINT)
    return figure


def add_key(figure: Figure, handles: Sequence[Artist], *, ncols: int, indent: float = 0.0) -> None:
    """Puts a legend into the room for the key.

    Args:
        figure: From ``new_figure``.
        handles: Labelled lines or patches.
        ncols: Columns of the legend.
        indent: Inches to leave free on the left.
    """
    width, height = figure.get_size_inches()
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=((_EDGE + indent) / width, key_top(figure) - _EDGE / height),
        borderaxespad=0,
        borderpad=0,
        ncols=ncols,
        handlelength=3.0,
    )


def key_top(figure: Figure) -> float:
    """Says where the room for the key ends above, as a share of the figure's height."""
    engine = figure.get_layout_engine()
    assert engine is not None
    return float(engine.get()["rect"][1])


def plain(text: str) -> str:
    r"""Makes a text that matplotlib shows as it is.

    A dollar sign starts no formula, and letters that the font lacks are shown by their number: the font is
    the one that comes with matplotlib, so that figures are the same on every machine.

    Example:
        >>> print(plain("$5 中"))
        \$5 \u4e2d
    """
    return _without_formulas(_shown(text))


def visible(token: str, max_letters: int = 14) -> str:
    r"""Makes a tick label of a token: spaces and line ends are visible, a long one is cut.

    Args:
        token: Its text, as it is or as ``Tokenizer.tokens`` writes it.
        max_letters: Keep at most so many letters, the sign of the cut included.

    Example:
        >>> print(visible(" the"), visible("\n"), visible("\x07"))
        ␣the ⏎ \x07
    """
    shown = _shown(token.replace(" ", "␣").replace("\n", "⏎"))
    return _without_formulas(shown if len(shown) <= max_letters else shown[: max_letters - 1] + "…")


def _wrapped(text: str, width: float, size: float) -> str:
    letters_per_line = int((width - 2 * _EDGE) * 72 / (0.65 * size))
    parts = _shown(text).split("\n")
    lines = (line for part in parts for line in textwrap.wrap(part, letters_per_line) or [""])
    return _without_formulas("\n".join(lines))


def _height(text: str, size: float) -> float:
    return 2 * _EDGE + 1.25 * size / 72 * len(text.split("\n"))


def _without_formulas(text: str) -> str:
    return text.replace("$", r"\$")


def _shown(text: str) -> str:
    return "".join(
        letter if letter == "\n" or _has_glyph(letter) else letter.encode("unicode_escape").decode()
        for letter in text
    )


@cache
def _has_glyph(letter: str) -> bool:
    return letter.isprintable() and get_font(findfont(_FONT)).get_char_index(ord(letter)) != 0
