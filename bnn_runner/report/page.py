"""A report as one self-contained HTML page: tables that sort by a click, with pictures inside the file."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from bnn_runner.report.grid import html_table
from bnn_runner.report.render import Report

_MOST_BYTES = 10_000_000  # for the figures of single runs

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #1c1c1c; }
table { border-collapse: collapse; margin: 1.5rem 0; display: block; overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .25rem .7rem; text-align: left; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #808080; cursor: pointer; }
th:hover, th:focus { background: #f0f4f8; }
th[aria-sort=ascending]::after { content: " \\25B2"; }
th[aria-sort=descending]::after { content: " \\25BC"; }
.r { text-align: right; font-variant-numeric: tabular-nums; }
tbody tr:hover { background: #f7f7f7; }
img { max-width: 100%; }
pre { background: #f7f7f7; padding: .7rem; overflow-x: auto; }
footer { color: #666; font-size: .9em; margin-top: 2rem; }
"""

# Empty numbers come last in both directions; equal ones keep their order.
_SCRIPT = """
for (const th of document.querySelectorAll('th')) {
  const sort = () => {
    const table = th.closest('table'), body = table.tBodies[0];
    const column = th.cellIndex, up = th.getAttribute('aria-sort') !== 'ascending';
    for (const other of table.querySelectorAll('th')) other.removeAttribute('aria-sort');
    th.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const value = row => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent : cell.dataset.value;
    };
    const rows = Array.from(body.rows);
    rows.sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === '' || y === '') return (x === '') - (y === '');
      const p = Number(x), q = Number(y);
      const order = Number.isNaN(p) || Number.isNaN(q) ? x.localeCompare(y) : p - q;
      return up ? order : -order;
    });
    body.append(...rows);
  };
  th.addEventListener('click', sort);
  th.addEventListener('keydown', event => { if (event.key === 'Enter') sort(); });
}
"""


def to_html(
    report: Report,
    title: str,
    pictures: Sequence[Path] = (),
    commands: Sequence[str] = (),
    runs: Mapping[str, Sequence[Path]] | None = None,
) -> str:
    """The page, which loads no other file and no network resource (its own policy forbids both).

    Args:
        report: tables and notes.
        title: of the page.
        pictures: of the whole table.
        commands: for missing results.
        runs: pictures of single runs by the name of the row; folded, and only of the first rows if the file would
            become too large to open.
    """
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    out = ["<!doctype html>", '<html lang="en"><head><meta charset="utf-8">']
    out += [f'<meta http-equiv="Content-Security-Policy" content="{policy}">', '<link rel="icon" href="data:,">']
    out += ['<meta name="viewport" content="width=device-width, initial-scale=1">']
    out += [f"<title>{html.escape(title)}</title>", f"<style>{_STYLE}</style></head><body>"]
    out += [f"<h1>{html.escape(title)}</h1>", *map(html_table, report.grids), f"<p>{html.escape(report.legend)}</p>"]
    if report.notes:
        out += ["<ul>", *(f"<li>{html.escape(note)}</li>" for note in report.notes), "</ul>"]
    if commands:
        out += [
            "<h2>Missing results, and the commands for them</h2>",
            "<pre>",
            html.escape("\n".join(commands)),
            "</pre>",
        ]
    out += [_image(picture) for picture in pictures]
    out += _folded(runs or {})
    out += [f"<footer>{html.escape(report.provenance)}</footer>", f"<script>{_SCRIPT}</script>", "</body></html>"]
    return "\n".join(out) + "\n"


def _folded(runs: Mapping[str, Sequence[Path]]) -> list[str]:
    out: list[str] = []
    size = left_out = 0
    for name, files in runs.items():
        size += sum(f.stat().st_size for f in files)
        if size > _MOST_BYTES:
            left_out += 1
            continue
        out.append(f"<details><summary>{html.escape(name)}</summary>{''.join(map(_image, files))}</details>")
    if left_out:
        out.append(f"<p>Figures of {left_out} more rows are in the folders of their runs.</p>")
    return ["<h2>Figures of one run of each row</h2>", *out] if out else []


def _image(picture: Path) -> str:
    data = base64.b64encode(picture.read_bytes()).decode("ascii")
    return f'<p><img alt="{html.escape(picture.stem)}" src="data:image/png;base64,{data}"></p>'
