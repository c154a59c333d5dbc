"""The page: a model's routing to look at, as one HTML file that needs nothing else.

``write(trace, "a.html")`` writes it, ``payload`` makes the document that it shows, ``html`` puts a payload
into a page, ``notebook`` shows it in a notebook.

What a script beside the page (``assets/live.js``) may use is the global ``AttnRes``:

- ``AttnRes.show(payload)`` renders a payload in place and keeps the state where it still applies. It returns
  a promise that ends when everything is shown.
- ``AttnRes.state`` is what is chosen: ``trace`` (0, 1, 2), ``row``, ``token`` (numbers from 0), ``end`` (the
  last token of a span, or null), ``scope`` ("token", "text", "all"), ``site`` and ``source`` (names; source
  by identity), ``measure``, ``tint``, ``layout`` ("together", "apart"), ``range`` and ``theme``. Read it;
  ``AttnRes.set({site: "L3.mlp"})`` changes it.
- ``AttnRes.on(event, handler)``: ``"select"`` when a cell, token or site was chosen, ``"show"`` when a payload
  is shown. A handler gets ``{trace, row, site, source, token}``.
- ``AttnRes.cellActions(describe)``: ``describe({trace, row, site, source, token})`` returns a list of
  ``{label, run}``, shown as buttons in the panel of the selected cell.
- ``AttnRes.payload`` is what is shown now.
- ``<section id="live" hidden>`` stands empty at the top, for controls.

All text goes into the page by ``textContent``. Styles by attributes and event attributes are refused by the
page's policy: use classes, ``hidden``, ``element.style.setProperty`` and ``addEventListener``. The style sheet
has classes for controls: ``button``, ``.field`` (a label with its input), ``.bar`` (a row of controls),
``.quiet`` (faint text), ``.error``.
"""

from attention_residuals.page.content import PageContent, Recorded
from attention_residuals.page.document import Notebook, html, notebook, write
from attention_residuals.page.payload import payload
from attention_residuals.page.report import ReportFigure, Section

__all__ = [
    "Notebook",
    "PageContent",
    "Recorded",
    "ReportFigure",
    "Section",
    "html",
    "notebook",
    "payload",
    "write",
]
