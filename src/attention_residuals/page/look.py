"""The style sheet of reports: light and dark, for screens of any width and for paper."""

__all__ = ["LOOK"]

LOOK = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1d2129; --faint: #59616d; --line: #d5d9e0; --shade: #f4f6f9; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181d; --ink: #e6e8eb; --faint: #a3abb6; --line: #3a404a; --shade: #1f242b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.6 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.9rem; line-height: 1.25; margin: 0 0 0.75rem; }
h2 { font-size: 1.35rem; line-height: 1.3; margin: 2.75rem 0 0.5rem; padding-top: 1rem;
  border-top: 1px solid var(--line); }
p { max-width: 44rem; margin: 0.75rem 0; white-space: pre-line; }
.lead { font-size: 1.15rem; }
figure { margin: 1.5rem 0; }
.scroll { overflow-x: auto; }
.picture { background: #ffffff; border: 1px solid var(--line); border-radius: 6px; padding: 0.5rem; }
img { display: block; max-width: 100%; height: auto; }
figcaption { max-width: 44rem; margin-top: 0.5rem; color: var(--faint); font-size: 0.95rem; }
table { border-collapse: collapse; margin: 1.25rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 1rem 0.4rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { border-bottom: 2px solid var(--faint); }
tbody th { font-weight: 500; }
.number { text-align: right; }
footer { margin-top: 3rem; padding: 0.25rem 1.25rem 1.25rem; background: var(--shade); border-radius: 6px; }
footer h2 { border: 0; margin: 0; font-size: 1.1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1.5rem; margin: 0.5rem 0 0;
  font-size: 0.95rem; }
dt { color: var(--faint); }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  body { padding: 1.25rem 1rem 3rem; }
  h1 { font-size: 1.5rem; }
  .picture img { max-width: none; width: 40rem; }
  dl { grid-template-columns: 1fr; gap: 0; }
  dd { margin-bottom: 0.5rem; } }
@media print {
  :root { color-scheme: light; --paper: #ffffff; --ink: #000000; --faint: #444444; --line: #bbbbbb;
    --shade: #ffffff; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  h2, figcaption { break-after: avoid; }
  figure, tr { break-inside: avoid; }
  .scroll { overflow: visible; }
  .picture img { max-width: 100%; width: auto; max-height: 22cm; } }
"""
