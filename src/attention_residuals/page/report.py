"""The parts of a page that are text: headings, paragraphs, tables and pictures."""

import base64
import html
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attention_residuals.errors import ConfigError

__all__ = [
    "ReportFigure",
    "Section",
    "about_html",
    "header_html",
    "section_html",
    "section_payload",
    "text_html",
]

_PNG = b"\x89PNG\r\n\x1a\n"
_DOTS_PER_INCH = 150
"""Of the pictures, so that letters have the same size in all of them."""


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


def section_payload(section: Section) -> dict[str, Any]:
    """Makes what JSON can hold of a section."""
    return {
        "heading": section.heading,
        "paragraphs": list(section.paragraphs),
        "table": [list(row) for row in section.table],
        "figures": [
            {
                "png": base64.b64encode(figure.png).decode("ascii"),
                "width": _inches(figure.png, 16),
                "height": _inches(figure.png, 20),
                "caption": figure.caption,
                "alt": figure.alt,
            }
            for figure in section.figures
        ],
    }


def header_html(title: str, lead: str) -> Iterator[str]:
    """Writes the head of a page."""
    yield f'<header class="head">\n<h1>{text_html(title)}</h1>'
    if lead:
        yield f'<p class="lead">{text_html(lead)}</p>'
    yield "</header>"


def section_html(section: Mapping[str, Any]) -> Iterator[str]:
    """Writes a section that ``section_payload`` made."""
    yield f'<section class="report">\n<h2>{text_html(section["heading"])}</h2>'
    for paragraph in section["paragraphs"]:
        yield f"<p>{text_html(paragraph)}</p>"
    if section["table"]:
        yield from _table(section["table"])
    for figure in section["figures"]:
        yield f'<figure>\n<div class="scroll picture"><img width="{int(figure["width"])}"'
        yield f' height="{int(figure["height"])}" alt="{text_html(figure["alt"])}"'
        yield f' src="data:image/png;base64,{text_html(figure["png"])}"></div>'
        yield f"<figcaption>{text_html(figure['caption'])}</figcaption>\n</figure>"
    yield "</section>"


def about_html(about: Mapping[str, str]) -> Iterator[str]:
    """Writes what a page comes from."""
    yield '<footer class="about">\n<h2>About this page</h2>\n<dl>'
    for name, value in about.items():
        yield f"<dt>{text_html(name)}</dt><dd>{text_html(value)}</dd>"
    yield "</dl>\n</footer>"


def _table(table: Sequence[Sequence[str]]) -> Iterator[str]:
    kinds = [
        ' class="number"' if all(map(_is_number, column)) else "" for column in zip(*table[1:], strict=True)
    ]
    yield '<div class="scroll"><table>\n<thead>'
    headers = (
        f'<th scope="col"{kind}>{text_html(cell)}</th>' for cell, kind in zip(table[0], kinds, strict=True)
    )
    yield f"<tr>{''.join(headers)}</tr>\n</thead>\n<tbody>"
    for row in table[1:]:
        first = f'<th scope="row"{kinds[0]}>{text_html(row[0])}</th>'
        rest = (f"<td{kind}>{text_html(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        yield f"<tr>{first}{''.join(rest)}</tr>"
    yield "</tbody>\n</table></div>"


def _inches(png: bytes, at: int) -> int:
    return int.from_bytes(png[at : at + 4]) * 96 // _DOTS_PER_INCH


def _is_number(cell: str) -> bool:
    signs = "+-\N{MINUS SIGN}% "
    return cell == "" or cell.strip(signs).replace(",", "").replace(".", "", 1).isdigit()


def text_html(text: str) -> str:
    """Makes a text that HTML shows as it is; what no file may hold is shown by its number."""
    letters = (
        letter.encode("unicode_escape").decode()
        if unicodedata.category(letter) in ("Cc", "Cs") and letter not in "\n\t"
        else letter
        for letter in text
    )
    return html.escape("".join(letters))
