"""The page as one HTML file, and as a cell of a notebook."""

import base64
import hashlib
import html as markup
import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from attention_residuals.durable import write_new
from attention_residuals.page.content import PageContent, Recorded
from attention_residuals.page.payload import payload
from attention_residuals.page.report import about_html, header_html, section_html, text_html
from attention_residuals.trace import Trace

__all__ = ["Notebook", "html", "notebook", "write"]

STYLES = ("look.css", "views.css", "print.css")
SCRIPTS = (
    *(
        "data.js",
        "scales.js",
        "words.js",
        "dom.js",
        "drawing.js",
        "state.js",
        "frame.js",
        "card.js",
        "strip.js",
    ),
    *(
        "map.js",
        "panel.js",
        "story.js",
        "profile.js",
        "pair.js",
        "distance.js",
        "lens.js",
        "tables.js",
        "main.js",
    ),
)
"""In the order in which they run; all share one scope."""

_ASSETS = files("attention_residuals.page") / "assets"


class Notebook(NamedTuple):
    """A page inside a notebook: the whole document in a frame that reaches neither network nor notebook."""

    document: str
    height: int

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="Depth routing" sandbox="allow-scripts allow-downloads" width="100%" '
            f'height="{self.height}" srcdoc="{markup.escape(self.document)}"></iframe>'
        )


def html(payload: Mapping[str, Any], *, live: bool = False) -> str:
    """Writes the document that shows a payload, with styles, scripts and data inside.

    The browser itself is told to refuse whatever is not in the file: scripts and styles by their hashes.

    Args:
        payload: From ``payload``.
        live: Add the controls of the local server, which may be asked for more.

    Example:
        >>> import torch
        >>> from attention_residuals import Decoder, page, presets, record
        >>> trace = record(Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]]))
        >>> "http:" in page.html(page.payload(trace)), "https:" in page.html(page.payload(trace))
        (False, False)
    """
    return "\n".join(_lines(payload, live)) + "\n"


def write(content: Trace | Recorded | PageContent, path: Path | str) -> None:
    """Writes one HTML file that needs nothing else.

    Args:
        content: A trace, a pass with its predictions, or all that a page can show.
        path: A new file; its folder is made if it does not exist.

    Raises:
        CheckpointError: The file exists, or cannot be written.
        NonFiniteError: NaN or infinity among weights or norms; nothing is written.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from attention_residuals import Decoder, page, presets, record
        >>> trace = record(Decoder(presets.scaled(2, vocab_size=300)), torch.tensor([[5, 6, 7]]))
        >>> page.write(trace, Path(tempfile.mkdtemp()) / "trace.html")
    """
    write_new(Path(path), html(payload(content)).encode())


def notebook(content: Trace | Recorded | PageContent, *, height: int = 900) -> Notebook:
    """Shows the page in a notebook, inside of a sandboxed frame, without a network.

    Args:
        content: As for ``write``.
        height: Of the frame, in pixels.
    """
    return Notebook(html(payload(content)), height)


def _lines(payload: Mapping[str, Any], live: bool) -> Iterator[str]:
    style = "".join(_asset(name) for name in STYLES)
    body = "".join(_asset(name) for name in SCRIPTS)
    scripts = [f'(() => {{\n"use strict";\n{body}}})();\n']
    if live and (_ASSETS / "live.js").is_file():
        scripts.append(_asset("live.js"))
    yield '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, scripts, live)}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">'
    yield f"<title>{text_html(payload['title'])}</title>\n<style>{style}</style>\n</head>\n<body>"
    yield '<section id="live" hidden></section>\n<main>'
    yield from header_html(payload["title"], payload["lead"])
    for section in payload["sections"]:
        yield from section_html(section)
    yield '<div id="views"><noscript>The views need scripts, which are in this file.</noscript></div>\n</main>'
    if payload["about"]:
        yield from about_html(payload["about"])
    data = {**payload, "sections": []}  # which are in the page already
    yield f'<script type="application/json" id="payload">{_data(data)}</script>'
    for script in scripts:
        yield f"<script>{script}</script>"
    yield "</body>\n</html>"


def _policy(style: str, scripts: list[str], live: bool) -> str:
    connect = " connect-src 'self';" if live else ""
    return (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {_hash(style)}; "
        f"img-src data: blob:;{connect} base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _data(payload: Mapping[str, Any]) -> str:
    """Writes JSON in which no letter ends a script: all but ASCII is escaped, and so is ``<``."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
