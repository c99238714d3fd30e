"""Mean rank of each method over data sets: an overall comparison that is free of units."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bnn_runner.errors import UserError
from bnn_runner.report.columns import Column
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.read_cells import ScoreRow
from bnn_runner.report.section import Section
from bnn_runner.report.tables import Entry, Row, Table, aggregate

Name = tuple[str, ...]


def mean_ranks(table: Table) -> Grid:
    """Rank 1 is the best of a data set and model by its mean over seeds; ties share their mean rank.

    Entries are means ± standard errors over data sets. A data set counts for a column if every method has a number
    there that has converged in the number of draws, so that all are ranked among the same methods. Raises `UserError`
    if no column has two methods on one data set.
    """
    blocks: dict[tuple[object, ...], dict[Name, Row]] = {}
    for row in table.rows:
        key = row.group.key
        blocks.setdefault((key.data_key, key.model), {})[(key.method, *row.extra.values())] = row
    names = list(dict.fromkeys(name for block in blocks.values() for name in block))
    columns = [c for c in table.columns if _better(table, c)]
    found = {column: _ranks(blocks, names, column, _better(table, column)) for column in columns}
    columns = [c for c in columns if any(found[c].values())]
    if len(names) < 2 or not columns:
        raise UserError(
            "--ranks requires at least two methods with a number on the same data set. Run the missing cells, or "
            "select "
            "methods that were run on the same data with method=a,b."
        )
    lines = []
    for name in names:
        entries = tuple(_entry(found[c][name], c) for c in columns)
        lines.append(Line(name, entries, max(e.n for e in entries)))
    counts = "; ".join(f"{c.label}: {len(found[c][names[0]])} of {len(blocks)}" for c in columns)
    note = f"Rank 1 is best; mean ± standard error over data sets. Data sets on which every method has run: {counts}."
    heads = tuple(f"rank of {c.label} ↓" for c in columns)
    return Grid("mean ranks", ("method", *table.extra), 1 + len(table.extra), heads, tuple(lines), note)


def _better(table: Table, column: Column) -> str:
    return next((row.entries[column].better for row in table.rows if column in row.entries), "")


def _ranks(
    blocks: dict[tuple[object, ...], dict[Name, Row]], names: Sequence[Name], column: Column, better: str
) -> dict[Name, list[float]]:
    ranks: dict[Name, list[float]] = {name: [] for name in names}
    for block in blocks.values():
        means = [_mean(block.get(name), column) for name in names]
        if any(math.isnan(m) for m in means):
            continue
        values = [-m for m in means] if better == "higher" else means
        for name, value in zip(names, values, strict=True):
            below, equal = sum(v < value for v in values), sum(v == value for v in values)
            ranks[name].append(below + (equal + 1) / 2)
    return ranks


def _mean(row: Row | None, column: Column) -> float:
    entry = row.entries.get(column) if row else None
    usable = entry is not None and entry.n and not (entry.not_applicable or entry.marked)
    return entry.mean if entry is not None and usable else math.nan


def _entry(ranks: Sequence[float], column: Column) -> Entry:
    return aggregate([ScoreRow(column.metric, r, better="lower") for r in ranks])


SECTION = Section(
    "--ranks",
    "also mean ranks over data sets",
    lambda request: [mean_ranks(request.table)],
    example=("--ranks --summary median", "also mean ranks over data sets; medians and quartiles"),
)
