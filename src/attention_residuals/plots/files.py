"""Figures as files."""

import io
from pathlib import Path

from matplotlib.figure import Figure

from attention_residuals.durable import write_new
from attention_residuals.errors import ConfigError
from attention_residuals.plots import style

__all__ = ["png_bytes", "save", "svg_bytes"]

_DOTS_PER_INCH = 150


def png_bytes(figure: Figure) -> bytes:
    """Draws a figure as PNG at 150 dots per inch.

    Example:
        >>> png_bytes(Figure(figsize=(1, 1)))[1:4]
        b'PNG'
    """
    return _drawn(figure, "png")


def svg_bytes(figure: Figure) -> bytes:
    """Draws a figure as SVG; the same figure gives the same bytes.

    Example:
        >>> b"<svg" in svg_bytes(Figure(figsize=(1, 1)))
        True
    """
    return _drawn(figure, "svg")


def save(figure: Figure, path: Path | str) -> None:
    """Writes a figure as PNG (150 dots per inch) or SVG; the whole file, or none.

    Args:
        figure: Any figure.
        path: A new file whose name ends in ``.png`` or ``.svg``; its folder is made if it does not exist.

    Raises:
        ConfigError: Another ending.
        CheckpointError: The file exists, or cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "figure.svg"
        >>> save(Figure(figsize=(1, 1)), path)
        >>> "<svg" in path.read_text()
        True
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(got=f"{path.name}", expected="a name that ends in .png or .svg", do="rename it")
    write_new(path, _drawn(figure, path.suffix[1:]))


def _drawn(figure: Figure, file_format: str) -> bytes:
    buffer = io.BytesIO()
    # Without a date, the same figure gives the same file.
    metadata = {"Date": None} if file_format == "svg" else {}
    with style.applied():
        figure.savefig(buffer, format=file_format, dpi=_DOTS_PER_INCH, metadata=metadata)
    return buffer.getvalue()
