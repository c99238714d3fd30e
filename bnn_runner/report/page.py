"""A report as one self-contained HTML page: tables that sort by a click, with pictures inside the file."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

from bnn_runner.report.grid import html_table
from bnn_runner.report.render import Report
from bnn_runner.report.style import DOTS_PER_INCH

_PIXELS_PER_INCH = 96  # of CSS
_MOST_BYTES = 10_000_000  # for the figures of single runs

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; color: #1c1c1c; }
.table, .figure { overflow-x: auto; margin: 1.5rem 0; }
.figure img { display: block; max-width: none; }
table { border-collapse: separate; border-spacing: 0; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .25rem .7rem; text-align: left; white-space: nowrap; border-bottom: 1px solid #e4e4e4; }
th { border-bottom: 2px solid #808080; cursor: pointer; vertical-align: bottom; white-space: normal; }
th.r { max-width: 8.5rem; }
th:hover, th:focus { background: #f0f4f8; }
th[aria-sort=ascending]::after { content: " \\25B2"; }
th[aria-sort=descending]::after { content: " \\25BC"; }
.r { text-align: right; font-variant-numeric: tabular-nums; }
.m { position: sticky; left: 0; z-index: 1; background: #ffffff; border-right: 1px solid #c0c0c0; }
tbody tr:hover td { background: #f7f7f7; }
pre { background: #f7f7f7; padding: .7rem; overflow-x: auto; }
li, p, footer { overflow-wrap: anywhere; }
footer { color: #666; font-size: .9em; margin-top: 2rem; }
@media (max-width: 700px) {
  body { margin: 1rem auto; padding: 0 .6rem; }
  th, td { padding: .25rem .45rem; }
  .k:not(.m) { max-width: 11rem; white-space: normal; overflow-wrap: break-word; }
}
"""

# The columns of words stay in view where they leave room for the numbers; else only the method does. Empty numbers come
# last in both directions; equal ones keep their order. The first click on a score sorts the best first.
_SCRIPT = """
const freeze = () => {
  for (const box of document.querySelectorAll('.table')) {
    const heads = Array.from(box.querySelectorAll('th.k'));
    const wide = heads.reduce((sum, th) => sum + th.offsetWidth, 0);
    const all = wide <= 0.5 * box.clientWidth;
    let left = 0;
    for (const th of heads) {
      const stays = all || th.classList.contains('m');
      const column = th.cellIndex, at = all ? left : 0;
      left += th.offsetWidth;
      for (const row of box.querySelector('table').rows) {
        const style = row.cells[column].style;
        style.position = stays ? 'sticky' : 'static';
        style.left = stays ? at + 'px' : '';
        style.zIndex = stays ? 1 : '';
        style.backgroundColor = stays ? 'white' : '';
      }
    }
  }
};
freeze();
window.addEventListener('resize', freeze);
for (const th of document.querySelectorAll('th')) {
  const sort = () => {
    const table = th.closest('table'), body = table.tBodies[0];
    const first = th.dataset.first || 'ascending', other = first === 'ascending' ? 'descending' : 'ascending';
    const column = th.cellIndex, next = th.getAttribute('aria-sort') === first ? other : first;
    const up = next === 'ascending';
    for (const one of table.querySelectorAll('th')) one.removeAttribute('aria-sort');
    th.setAttribute('aria-sort', next);
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
    """The picture at its own size, at which its text is readable; a narrow window scrolls it."""
    content = picture.read_bytes()
    pixels = int.from_bytes(content[16:20], "big")  # of a PNG: its width is at this place
    width = round(pixels / DOTS_PER_INCH * _PIXELS_PER_INCH)
    data = base64.b64encode(content).decode("ascii")
    source = f"data:image/png;base64,{data}"
    return f'<div class="figure"><img alt="{html.escape(picture.stem)}" width="{width}" src="{source}"></div>'
