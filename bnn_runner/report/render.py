"""A table as CSV (raw numbers), Markdown and LaTeX (rounded to what the standard error bears)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence

from bnn_runner.report.columns import Column
from bnn_runner.report.grouping import ABSENT
from bnn_runner.report.tables import NOT_CONVERGED, SHORTENED, Entry, Row, Table

_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "±": r"$\pm$", "†": r"$^\dagger$", "‡": r"$^\ddagger$", "—": "---", "−": "$-$", "↑": r"$\uparrow$",
    "↓": r"$\downarrow$", "κ": r"$\kappa$", "τ": r"$\tau$", "≥": r"$\geq$", "≤": r"$\leq$", "…": r"\ldots{}",
    "²": r"$^2$", "√": r"$\sqrt{}$",
}  # fmt: skip


def escape_latex(text: str) -> str:
    """Text that LaTeX sets as it stands here; newlines become spaces."""
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def number(mean: float, error: float = math.nan) -> str:
    """`-0.532 ± 0.012`: two digits of the standard error, the mean to the same place; four digits without one."""
    if not math.isfinite(mean):
        return "NaN" if math.isnan(mean) else f"{mean}"
    if not math.isfinite(error):
        return _plain(mean, 4)
    if error <= 1e-12 * abs(mean):  # rounding of equal numbers
        return f"{_plain(mean, 4)} ± 0"
    if max(abs(mean), error) >= 1e6 or error < 1e-6:
        return f"{mean:.4g} ± {error:.2g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.{places}f} ± {error:.{places}f}"


def _plain(value: float, digits: int) -> str:
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{min(max(places, 0), 6)}f}"


def entry_text(entry: Entry | None, row_n: int) -> str:
    """What a table cell says; n only where it is not the row's."""
    if entry is None:
        return ABSENT
    seeds = entry.n + entry.not_applicable
    if entry.not_applicable:
        return "n/a" if entry.n == 0 else f"n/a ({entry.not_applicable} of {seeds})"
    if entry.nonfinite:
        return f"{number(entry.mean)} ({entry.nonfinite} of {seeds})"
    text = number(entry.mean, entry.standard_error) + (NOT_CONVERGED if entry.marked else "")
    return text if entry.n == row_n else f"{text} (n={entry.n})"


def header(column: Column, table: Table) -> str:
    """Label, unit, and which way is better."""
    entries = [row.entries[column] for row in table.rows if column in row.entries]
    units = {e.unit for e in entries if e.unit}
    arrow = {"higher": " ↑", "lower": " ↓"}.get(next((e.better for e in entries if e.better), ""), "")
    unit = f" [{next(iter(units))}]" if len(units) == 1 else ""
    return f"{column.label}{unit}{arrow}"


def to_csv(table: Table) -> str:
    """One line a row: what it is, then for every column mean, se, n, and the counts of what is not a number."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ["data", "model", "method", *table.extra, "kind", "n", "shortened", "recipe_version"]
    names += ["seeds", "missing_seeds", "failed", "cut", "unfinished", "damaged"]
    parts = ("mean", "se", "n", "nan", "na", "absent", "converged")
    writer.writerow(names + [f"{c.key}_{part}" for c in table.columns for part in parts])
    for row in table.rows:
        key = row.group.key
        line: list[object] = [key.data, key.model, key.method, *(row.extra[name] for name in table.extra)]
        line += [row.kind, row.n, int(key.shortened), "" if key.recipe is None else key.recipe]
        line += [" ".join(map(str, row.group.done)), " ".join(map(str, row.missing))]
        line += [row.count(status) for status in ("failed", "cut", "unfinished", "damaged")]
        for column in table.columns:
            e = row.entries.get(column)
            if e is None:
                line += [""] * len(parts)
                continue
            error = "" if math.isnan(e.standard_error) else repr(e.standard_error)
            mean = "" if e.n == 0 else repr(e.mean)
            line += [mean, error, e.n, e.nonfinite, e.not_applicable, e.absent, int(not e.marked)]
        writer.writerow(line)
    return out.getvalue()


def _parts(table: Table) -> list[tuple[str, list[int], list[Column]]]:
    """(kind, rows, columns) for each kind of task: a regression table has no use for accuracy's column."""
    kinds = list(dict.fromkeys(row.kind for row in table.rows))
    parts = []
    for kind in kinds:
        places = [i for i, row in enumerate(table.rows) if row.kind == kind]
        parts.append((kind, places, [c for c in table.columns if any(c in table.rows[i].entries for i in places)]))
    return parts


def _grid(table: Table, places: Sequence[int], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of plain text; the first 3 + extra columns are words, the rest numbers."""
    extra = [e for e in table.extra if len({table.rows[i].extra[e] for i in places}) > 1]
    gone = any(table.rows[i].missing for i in places)
    head = ["data", "model", "method", *extra, "n", *(["missing"] if gone else [])]
    lines = []
    for i in places:
        row = table.rows[i]
        key = row.group.key
        method = key.method + (SHORTENED if key.shortened else "")
        line = [key.data, key.model, method, *(row.extra[e] for e in extra), str(row.n)]
        if gone:
            line.append(_missing_text(row))
        line += [entry_text(row.entries.get(c), row.n) for c in columns]
        lines.append(line)
    return head + [header(c, table) for c in columns], lines


def _missing_text(row: Row) -> str:
    counts: dict[str, int] = {}
    for why in row.missing.values():
        counts[why] = counts.get(why, 0) + 1
    return ", ".join(f"{n} {why}" for why, n in counts.items()) or "0"


def _bold_places(table: Table, places: Sequence[int], columns: Sequence[Column], offset: int) -> set[tuple[int, int]]:
    where = {place: line for line, place in enumerate(places)}
    return {(where[i], offset + j) for j, c in enumerate(columns) for i in table.best(c) if i in where}


def to_markdown(table: Table) -> str:
    """GitHub's tables, padded so that they are readable as plain text; notes and provenance below."""
    blocks = []
    parts = _parts(table)
    for kind, places, columns in parts:
        head, lines = _grid(table, places, columns)
        offset = len(head) - len(columns)
        for line, place in _bold_places(table, places, columns, offset):
            lines[line][place] = f"**{lines[line][place]}**"
        cells = [[text.replace("|", "\\|") for text in line] for line in [head, *lines]]
        widths = [max(3, *(len(line[j]) for line in cells)) for j in range(len(head))]
        number_from = head.index("n")
        body = []
        for words in cells:
            pairs = enumerate(zip(words, widths, strict=True))
            padded = [t.ljust(w) if j < number_from else t.rjust(w) for j, (t, w) in pairs]
            body.append("| " + " | ".join(padded) + " |")
        rule = ["-" * w if j < number_from else "-" * (w - 1) + ":" for j, w in enumerate(widths)]
        body.insert(1, "| " + " | ".join(rule) + " |")
        title = [f"### {kind or 'not finished'}", ""] if len(parts) > 1 else []
        blocks.append("\n".join(title + body))
    foot = [_legend(table)] + [f"- {note}" for note in table.notes] + ([""] if table.notes else [])
    return "\n\n".join(blocks) + "\n\n" + "\n".join([*foot, table.provenance]) + "\n"


def _legend(table: Table) -> str:
    bold = " Bold: the best of its data set by more than 2 standard errors of the difference."
    return f"Mean ± standard error over n seeds.{bold if any(table.best(c) for c in table.columns) else ''}\n"


def to_latex(table: Table) -> str:
    r"""One `tabular` for each kind of task, for \usepackage{booktabs}; notes as comments, for the caption."""
    blocks = []
    for kind, places, columns in _parts(table):
        head, lines = _grid(table, places, columns)
        bold = _bold_places(table, places, columns, len(head) - len(columns))
        number_from = head.index("n")
        align = "l" * number_from + "r" * (len(head) - number_from)
        out = [f"% {kind or 'not finished'}; needs \\usepackage{{booktabs}}"]
        out += [f"\\begin{{tabular}}{{{align}}}", "\\toprule"]
        out += [" & ".join(map(escape_latex, head)) + r" \\", "\\midrule"]
        data = lines[0][0] if lines else ""
        for i, line in enumerate(lines):
            if line[0] != data:
                out.append("\\midrule")
                data = line[0]
            texts = [_latex_entry(t, j >= number_from) for j, t in enumerate(line)]
            texts = [f"\\textbf{{{t}}}" if (i, j) in bold else t for j, t in enumerate(texts)]
            out.append(" & ".join(texts) + r" \\")
        blocks.append("\n".join([*out, "\\bottomrule", "\\end{tabular}"]))
    comments = [f"% {' '.join(line.split())}" for line in (_legend(table), *table.notes, table.provenance)]
    return "\n\n".join(blocks) + "\n\n" + "\n".join(comments) + "\n"


def _latex_entry(text: str, is_number: bool) -> str:
    escaped = escape_latex(text)
    # A hyphen before a digit is a minus sign in a number, and must not be set as a hyphen.
    return "$-$" + escaped[1:] if is_number and text.startswith("-") else escaped
