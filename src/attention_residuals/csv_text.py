"""Rows as the text of a CSV file: the one place that says how they are quoted and how lines end."""

import csv
import io
from collections.abc import Iterable

__all__ = ["csv_text"]


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    r"""Writes rows as the text of a CSV file.

    Only cells that need quotes have them, every line ends in ``\n`` alone, and numbers have all their digits. Write
    the text as bytes, or the line ends become those of the system.

    Args:
        rows: Of cells, headers first; a cell is written as ``str`` writes it, and None as nothing. A lone carriage
            return, which Python 3.11 does not quote, would be read as the end of a line.

    Example:
        >>> csv_text([("arm", "loss"), ("full, static", 1.5), ("delta", None)])
        'arm,loss\n"full, static",1.5\ndelta,\n'
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
