"""A table for output: words on the left, entries on the right; in CSV, Markdown and HTML (LaTeX: `latex`)."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bnn_runner.report.numbers import Summary, entry_text
from bnn_runner.report.tables import Entry

DIFFERS = "*"


@dataclass(frozen=True)
class Line:
    """One line: texts for the columns of words, entries (or None) for the others, and its number of seeds `n`.

    `best` are the entries in bold (`separation`); `starred` those of a difference that is not 0; `remarks` follow the
    entries, one each, where every entry is of another row.
    """

    words: tuple[str, ...]
    entries: tuple[Entry | None, ...]
    n: int
    best: frozenset[int] = frozenset()
    starred: frozenset[int] = frozenset()
    remarks: tuple[str, ...] = ()

    def texts(self, summary: Summary) -> list[str]:
        texts = [entry_text(e, self.n, summary) + DIFFERS * (j in self.starred) for j, e in enumerate(self.entries)]
        if self.remarks:
            texts = [text + remark for text, remark in zip(texts, self.remarks, strict=True)]
        return [*self.words, *texts]


@dataclass(frozen=True)
class Grid:
    """A table: `words` are the heads of the columns of words (the first `left` left-aligned), `heads` of entries.

    `note` is printed below the table; `summary` selects mean or median for the entries.
    """

    title: str
    words: tuple[str, ...]
    left: int
    heads: tuple[str, ...]
    lines: tuple[Line, ...]
    note: str = ""
    summary: Summary = "mean"

    @property
    def head(self) -> list[str]:
        return [*self.words, *self.heads]

    def bold(self, line: Line, column: int) -> bool:
        return column - len(self.words) in line.best


def markdown(grid: Grid, titled: bool) -> str:
    """GitHub's table, padded so that it is readable as plain text."""
    rows = [grid.head]
    for line in grid.lines:
        texts = line.texts(grid.summary)
        rows.append([f"**{t}**" if grid.bold(line, j) else t for j, t in enumerate(texts)])
    cells = [[text.replace("|", "\\|") for text in row] for row in rows]
    widths = [max(3, *(len(row[j]) for row in cells)) for j in range(len(grid.head))]
    body = []
    for texts in cells:
        pairs = enumerate(zip(texts, widths, strict=True))
        body.append("| " + " | ".join(t.ljust(w) if j < grid.left else t.rjust(w) for j, (t, w) in pairs) + " |")
    rule = ["-" * w if j < grid.left else "-" * (w - 1) + ":" for j, w in enumerate(widths)]
    body.insert(1, "| " + " | ".join(rule) + " |")
    title = [f"### {grid.title}", ""] if titled else []
    note = ["", grid.note] if grid.note else []
    return "\n".join(title + body + note)


def without_empty(grid: Grid) -> Grid:
    """The table without columns in which no line has a number; its note names them."""
    kept = [j for j in range(len(grid.heads)) if any((e := line.entries[j]) is not None and e.n for line in grid.lines)]
    if len(kept) == len(grid.heads) or not kept:
        return grid
    places = {j: place for place, j in enumerate(kept)}
    lines = tuple(
        replace(
            line,
            entries=tuple(line.entries[j] for j in kept),
            best=frozenset(places[j] for j in line.best if j in places),
            starred=frozenset(places[j] for j in line.starred if j in places),
        )
        for line in grid.lines
    )
    left_out = ", ".join(head for j, head in enumerate(grid.heads) if j not in places)
    note = " ".join(filter(None, [grid.note, f"Left out, because no line has a number: {left_out}."]))
    return replace(grid, heads=tuple(grid.heads[j] for j in kept), lines=lines, note=note)


def html_table(grid: Grid) -> str:
    """A `<table>` whose cells sort by the number behind an entry, not by its text."""
    main = grid.words.index("method") if "method" in grid.words[: grid.left] else 0
    kinds = [_classes(j, grid.left, main) for j in range(len(grid.head))]
    out = ['<div class="table"><table>', f"<caption>{html.escape(grid.title)}</caption>", "<thead><tr>"]
    for text, kind in zip(grid.head, kinds, strict=True):
        first = ' data-first="descending"' if text.endswith("↑") else ""
        out.append(f'<th{kind}{first} scope="col" tabindex="0">{html.escape(text)}</th>')
    out.append("</tr></thead><tbody>")
    for line in grid.lines:
        texts = line.texts(grid.summary)
        out.append("<tr>")
        for j, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
            value = ""
            if j >= len(grid.words):
                value = f' data-value="{_sorted_by(line.entries[j - len(grid.words)], grid.summary)}"'
            shown = html.escape(text)
            out.append(f"<td{kind}{value}>{f'<b>{shown}</b>' if grid.bold(line, j) else shown}</td>")
        out.append("</tr>")
    out.append("</tbody></table></div>")
    if grid.note:
        out.append(f"<p>{html.escape(grid.note)}</p>")
    return "\n".join(out)


def _classes(j: int, left: int, main: int) -> str:
    """The classes of a column: r (right-aligned), k (words, which may stay in view), m (those that always do)."""
    if j >= left:
        return ' class="r"'
    return ' class="k m"' if j == main else ' class="k"'


def _sorted_by(entry: Entry | None, summary: Summary) -> str:
    if entry is None:
        return ""
    value = entry.quartiles[1] if summary == "median" else entry.mean
    return repr(value) if entry.n and math.isfinite(value) else ""


def to_csv(grids: Sequence[Grid]) -> str:
    """Long form with raw numbers: one line per entry, with its table and the words of its line."""
    words = list(dict.fromkeys(w for grid in grids for w in grid.words if w != "n"))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    numbers = ["mean", "se", "q1", "median", "q3", "n", "nan", "na", "converged"]
    writer.writerow(["table", *words, "column", *numbers])
    for grid in grids:
        for line in grid.lines:
            named = dict(zip(grid.words, line.words, strict=True))
            for head, e in zip(grid.heads, line.entries, strict=True):
                if e is None:
                    continue
                values = (e.mean, e.standard_error, *e.quartiles)
                counts = (e.n, e.nonfinite, e.not_applicable, int(not e.marked))
                texts = ["" if math.isnan(v) else repr(v) for v in values]
                writer.writerow([grid.title, *(named.get(w, "") for w in words), head, *texts, *counts])
    return out.getvalue()
