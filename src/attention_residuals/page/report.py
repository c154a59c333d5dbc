"""A report: headings, paragraphs, figures and tables in one HTML file that needs nothing else."""

import base64
import html
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_residuals.durable import write_new
from attention_residuals.errors import ConfigError
from attention_residuals.page.look import LOOK

__all__ = ["ReportFigure", "Section", "write_report"]

_PNG = b"\x89PNG\r\n\x1a\n"
_DOTS_PER_INCH = 150
"""Of the pictures, so that letters have the same size in all of them."""

# The browser itself refuses whatever is not inline style or a picture in the file.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """A picture with what it shows, in words.

    Args:
        png: The picture, such as ``plots.png_bytes`` makes.
        caption: Stands below the picture.
        alt: Replaces the picture for those who cannot see it: what one would learn from it.

    Raises:
        ConfigError: ``png`` is no PNG, or ``alt`` is empty.
    """

    png: bytes
    caption: str
    alt: str

    def __post_init__(self) -> None:
        if not self.png.startswith(_PNG):
            raise ConfigError(
                got=f"{len(self.png)} bytes that start with {self.png[:8]!r}",
                expected="a PNG picture",
                do="pass plots.png_bytes(figure)",
            )
        if not self.alt.strip():
            raise ConfigError(
                got="an empty alt text", expected="a sentence", do="say what one would learn from the picture"
            )


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a report; all texts are plain and appear letter by letter.

    Args:
        heading: Of the section.
        paragraphs: Come first.
        table: Rows, after the paragraphs; the first row and the first column are headers.
        figures: Come last.

    Raises:
        ConfigError: A table of headers only, or with rows of different lengths.
    """

    heading: str
    paragraphs: tuple[str, ...] = ()
    table: tuple[tuple[str, ...], ...] = ()
    figures: tuple[ReportFigure, ...] = ()

    def __post_init__(self) -> None:
        lengths = [len(row) for row in self.table]
        if len(lengths) == 1 or len(set(lengths)) > 1 or 0 in lengths:
            raise ConfigError(
                got=f"a table with rows of {lengths} cells in {self.heading!r}",
                expected="a row of headers and rows with as many cells",
                do="fill the gaps with empty texts, or leave the table out",
            )


def write_report(
    path: Path | str, *, title: str, lead: str, sections: Sequence[Section], about: Mapping[str, str]
) -> None:
    """Writes a report as one HTML file without scripts, links or anything from a network.

    The file appears complete or not at all.

    Args:
        path: A new file; its folder is made if it does not exist.
        title: Of the page.
        lead: A paragraph that says what was found.
        sections: In order.
        about: What the report comes from, such as versions, seed, hardware; stands at the end.

    Raises:
        CheckpointError: The file exists, or cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "report.html"
        >>> section = Section(heading="Loss", paragraphs=("It fell by 5 < 6 %.",))
        >>> write_report(path, title="A run", lead="It worked.", sections=[section], about={"seed": "0"})
        >>> "It fell by 5 &lt; 6 %." in path.read_text(encoding="utf-8")
        True
    """
    text = "\n".join(_page(title, lead, sections, about)) + "\n"
    write_new(Path(path), text.encode())


def _page(title: str, lead: str, sections: Sequence[Section], about: Mapping[str, str]) -> Iterator[str]:
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{html.escape(_POLICY)}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">'
    yield f"<title>{_text(title)}</title>\n<style>{LOOK}</style>\n</head>\n<body>"
    yield f'<main>\n<header>\n<h1>{_text(title)}</h1>\n<p class="lead">{_text(lead)}</p>\n</header>'
    for section in sections:
        yield "<section>"
        yield from _section(section)
        yield "</section>"
    yield "</main>"
    if about:
        yield "<footer>\n<h2>About this report</h2>\n<dl>"
        for name, value in about.items():
            yield f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>"
        yield "</dl>\n</footer>"
    yield "</body>\n</html>"


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{_text(section.heading)}</h2>"
    for paragraph in section.paragraphs:
        yield f"<p>{_text(paragraph)}</p>"
    if section.table:
        yield from _table(section.table)
    for figure in section.figures:
        data = base64.b64encode(figure.png).decode("ascii")
        width, height = (int.from_bytes(figure.png[at : at + 4]) * 96 // _DOTS_PER_INCH for at in (16, 20))
        yield f'<figure>\n<div class="scroll picture"><img width="{width}" height="{height}"'
        yield f' alt="{_text(figure.alt)}" src="data:image/png;base64,{data}"></div>'
        yield f"<figcaption>{_text(figure.caption)}</figcaption>\n</figure>"


def _table(table: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    kinds = [
        ' class="number"' if all(map(_is_number, column)) else "" for column in zip(*table[1:], strict=True)
    ]
    yield '<div class="scroll"><table>\n<thead>'
    headers = (
        f'<th scope="col"{kind}>{_text(cell)}</th>' for cell, kind in zip(table[0], kinds, strict=True)
    )
    yield f"<tr>{''.join(headers)}</tr>\n</thead>\n<tbody>"
    for row in table[1:]:
        first = f'<th scope="row"{kinds[0]}>{_text(row[0])}</th>'
        rest = (f"<td{kind}>{_text(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        yield f"<tr>{first}{''.join(rest)}</tr>"
    yield "</tbody>\n</table></div>"


def _is_number(cell: str) -> bool:
    signs = "+-\N{MINUS SIGN}% "
    return cell == "" or cell.strip(signs).replace(",", "").replace(".", "", 1).isdigit()


def _text(text: str) -> str:
    """Makes a text that HTML shows as it is; what no file may hold is shown by its number."""
    letters = (
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in ("Cc", "Cs") and letter not in "\n\t"
        else letter
        for letter in text
    )
    return html.escape("".join(letters))
