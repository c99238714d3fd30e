"""A table for output: words on the left, entries on the right; in CSV, Markdown, LaTeX and HTML."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bnn_runner.report.numbers import Summary, entry_text
from bnn_runner.report.tables import Entry

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "†": r"$^\dagger$", "‡": r"$^\ddagger$", "—": "---", "−": "$-$", "↑": r"$\uparrow$",
    "↓": r"$\downarrow$", "κ": r"$\kappa$", "τ": r"$\tau$", "≥": r"$\geq$", "≤": r"$\leq$", "…": r"\ldots{}",
    "²": r"$^2$", "√": r"$\sqrt{}$",
}  # fmt: skip


DIFFERS = "*"


@dataclass(frozen=True)
class Line:
    """One line: texts for the columns of words, entries (or None) for the others, and its number of seeds `n`.

    `best` are the entries in bold (`separation`); `starred` those of a difference that is not 0.
    """

    words: tuple[str, ...]
    entries: tuple[Entry | None, ...]
    n: int
    best: frozenset[int] = frozenset()
    starred: frozenset[int] = frozenset()

    def texts(self, summary: Summary) -> list[str]:
        texts = [entry_text(e, self.n, summary) + DIFFERS * (j in self.starred) for j, e in enumerate(self.entries)]
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


def escape_latex(text: str) -> str:
    """Text with LaTeX's special characters escaped; newlines become spaces."""
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def latex(grid: Grid) -> str:
    r"""One `tabular` for \usepackage{booktabs}; a rule where the first word changes, the note as a comment."""
    out = [f"% {grid.title}; needs \\usepackage{{booktabs}}"]
    out += [f"\\begin{{tabular}}{{{'l' * grid.left + 'r' * (len(grid.head) - grid.left)}}}", "\\toprule"]
    out += [" & ".join(map(escape_latex, grid.head)) + r" \\", "\\midrule"]
    firsts = [line.words[0] for line in grid.lines]
    grouped = len(set(firsts)) < len(firsts)
    for place, line in enumerate(grid.lines):
        if grouped and place and firsts[place] != firsts[place - 1]:
            out.append("\\midrule")
        texts = [_latex_entry(t, j >= grid.left) for j, t in enumerate(line.texts(grid.summary))]
        out.append(" & ".join(f"\\textbf{{{t}}}" if grid.bold(line, j) else t for j, t in enumerate(texts)) + r" \\")
    out += ["\\bottomrule", "\\end{tabular}"]
    return "\n".join([*out, f"% {' '.join(grid.note.split())}"] if grid.note else out)


def _latex_entry(text: str, is_number: bool) -> str:
    escaped = escape_latex(text)
    # A hyphen before a digit is a minus sign, which LaTeX must set in math mode.
    return "$-$" + escaped[1:] if is_number and text.startswith("-") else escaped


def html_table(grid: Grid) -> str:
    """A `<table>` whose cells sort by the number behind an entry, not by its text."""
    out = ["<table>", f"<caption>{html.escape(grid.title)}</caption>", "<thead><tr>"]
    for j, text in enumerate(grid.head):
        side = "" if j < grid.left else ' class="r"'
        out.append(f'<th{side} scope="col" tabindex="0">{html.escape(text)}</th>')
    out.append("</tr></thead><tbody>")
    for line in grid.lines:
        texts = line.texts(grid.summary)
        out.append("<tr>")
        for j, text in enumerate(texts):
            entry = line.entries[j - len(grid.words)] if j >= len(grid.words) else None
            value = "" if entry is None else f' data-value="{_sorted_by(entry, grid.summary)}"'
            side = "" if j < grid.left else ' class="r"'
            shown = html.escape(text)
            out.append(f"<td{side}{value}>{f'<b>{shown}</b>' if grid.bold(line, j) else shown}</td>")
        out.append("</tr>")
    out.append("</tbody></table>")
    if grid.note:
        out.append(f"<p>{html.escape(grid.note)}</p>")
    return "\n".join(out)


def _sorted_by(entry: Entry, summary: Summary) -> str:
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
