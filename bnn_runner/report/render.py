"""A report as CSV (raw numbers), Markdown, LaTeX and one HTML page (rounded to what the standard error bears)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from bnn_runner.report.columns import Column
from bnn_runner.report.differences import FEWEST
from bnn_runner.report.epochs import NOTE, epochs_text, shows_epochs
from bnn_runner.report.grid import Grid, Line, markdown, without_empty
from bnn_runner.report.latex import latex
from bnn_runner.report.numbers import Summary
from bnn_runner.report.tables import Row, Table

LEGENDS: dict[Summary, str] = {
    "mean": "Mean ± standard error over n seeds.",
    "median": "Median [first quartile, third quartile] over n seeds (linear between the values).",
}


_MOST_LIMITS = 12


@dataclass(frozen=True)
class Report:
    """The content of a report, without its pictures."""

    grids: tuple[Grid, ...]
    legend: str
    notes: tuple[str, ...]
    provenance: str


def report_of(table: Table, summary: Summary = "mean") -> Report:
    """The table, one grid per kind of task, since their columns differ."""
    kinds = list(dict.fromkeys(row.kind for row in table.rows))
    grids = []
    for kind in kinds:
        places = [i for i, row in enumerate(table.rows) if row.kind == kind]
        columns = [c for c in table.columns if any(c in table.rows[i].entries for i in places)]
        grids.append(without_empty(_grid(table, kind or "not finished", places, columns, summary)))
    return Report(tuple(grids), legend_of(table, summary), tuple(table.notes), table.provenance)


def legend_of(table: Table, summary: Summary) -> str:
    """What an entry, its parentheses and bold type mean, and which difference would be bold."""
    entries = [e for row in table.rows for column, e in row.entries.items() if column in table.columns]
    words = [LEGENDS[summary]]
    if any(e.n == 1 and math.isfinite(e.points_error) for e in entries):
        words.append("In parentheses, of a single seed: standard error over the test points.")
    if summary != "mean" or not table.comparisons:
        return " ".join(words)
    count = sum(map(len, table.comparisons.values()))
    smallest = {c: d for c in table.comparisons if not math.isnan(d := table.detectable(c))}
    if not smallest:
        return " ".join([*words, f"No number is bold: a comparison requires {FEWEST} seeds and a known error."])
    limits = [f"{column.label} {limit:.2g}" for column, limit in list(smallest.items())[:_MOST_LIMITS]]
    more = ", …" if len(smallest) > _MOST_LIMITS else ""
    words.append(
        "Bold: best of its data set, and different from each rival at 5 % (t test over seeds and test points; Holm's "
        f"rule over the {count} comparisons of the table). Differences that would be bold at these n: "
        f"{', '.join(limits)}{more}."
    )
    return " ".join(words)


def header(column: Column, table: Table) -> str:
    """Label, unit and direction of a column."""
    entries = [row.entries[column] for row in table.rows if column in row.entries]
    units = {e.unit for e in entries if e.unit}
    arrow = {"higher": " ↑", "lower": " ↓"}.get(next((e.better for e in entries if e.better), ""), "")
    unit = f" [{next(iter(units))}]" if len(units) == 1 else ""
    return f"{column.label}{unit}{arrow}"


def _grid(table: Table, kind: str, places: Sequence[int], columns: Sequence[Column], summary: Summary) -> Grid:
    extra = [e for e in table.extra if len({table.rows[i].extra[e] for i in places}) > 1]
    incomplete = any(table.rows[i].missing for i in places)
    epochs = shows_epochs([table.rows[i].group for i in places])
    best = {i: set[int]() for i in places}
    if summary == "mean":
        for j, column in enumerate(columns):
            for i in table.best(column):
                if i in best:
                    best[i].add(j)
    lines = []
    for i in places:
        row = table.rows[i]
        key = row.group.key
        method = table.named(row, key.method)
        words = [key.data, key.model, method, *(row.extra[e] for e in extra)]
        words += [epochs_text(row.group)] if epochs else []
        words.append(str(row.n))
        if incomplete:
            words.append(_missing_text(row))
        entries = tuple(row.entries.get(c) for c in columns)
        lines.append(Line(tuple(words), entries, row.n, frozenset(best[i])))
    words = ["data", "model", "method", *extra, *(["epochs"] if epochs else [])]
    heads = tuple(header(c, table) for c in columns)
    after = ("n", *(["missing"] if incomplete else []))
    note = NOTE if epochs else ""
    return Grid(kind, (*words, *after), len(words), heads, tuple(lines), note, summary)


def _missing_text(row: Row) -> str:
    counts: dict[str, int] = {}
    for why in row.missing.values():
        counts[why] = counts.get(why, 0) + 1
    return ", ".join(f"{n} {why}" for why, n in counts.items()) or "0"


def to_csv(table: Table) -> str:
    """One line per row: its settings, then for every column mean, se, n, quartiles, and counts of NaN and n/a."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = ["data", "model", "method", *table.extra, "kind", "n", "shortened", "results_version", "epochs", "marks"]
    names += ["seeds", "missing_seeds", "failed", "interrupted", "unfinished", "damaged"]
    parts = ("mean", "se", "n", "nan", "na", "absent", "converged", "q1", "median", "q3", "points_se")
    writer.writerow(names + [f"{c.key}_{part}" for c in table.columns for part in parts])
    for row in table.rows:
        key = row.group.key
        line: list[object] = [key.data, key.model, key.method, *(row.extra[name] for name in table.extra)]
        line += [row.kind, row.n, int(key.shortened), "" if key.results_version is None else key.results_version]
        line += [epochs_text(row.group), " ".join(row.marks)]
        line += [" ".join(map(str, row.group.done)), " ".join(map(str, row.missing))]
        line += [row.count(status) for status in ("failed", "interrupted", "unfinished", "damaged")]
        for column in table.columns:
            e = row.entries.get(column)
            if e is None:
                line += [""] * len(parts)
                continue
            error = "" if math.isnan(e.standard_error) else repr(e.standard_error)
            mean = "" if e.n == 0 else repr(e.mean)
            quartiles = ["" if math.isnan(q) else repr(q) for q in e.quartiles]
            points = "" if math.isnan(e.points_error) else repr(e.points_error)
            line += [mean, error, e.n, e.nonfinite, e.not_applicable, e.absent, int(not e.marked), *quartiles, points]
        writer.writerow(line)
    return out.getvalue()


def to_markdown(report: Report) -> str:
    """Each grid as a GitHub table, followed by notes and provenance."""
    blocks = [markdown(grid, titled=len(report.grids) > 1) for grid in report.grids]
    foot = [report.legend, "", *(f"- {note}" for note in report.notes)] + ([""] if report.notes else [])
    return "\n\n".join(blocks) + "\n\n" + "\n".join([*foot, report.provenance]) + "\n"


def to_latex(report: Report) -> str:
    """Each grid as one `tabular` or several; notes as comments, for the caption."""
    comments = [f"% {' '.join(line.split())}" for line in (report.legend, *report.notes, report.provenance)]
    return "\n\n".join(map(latex, report.grids)) + "\n\n" + "\n".join(comments) + "\n"
