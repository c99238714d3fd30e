"""Tables by chosen axes: any field as rows, any field as columns; rows that share a place are an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bnn_runner.errors import UserError
from bnn_runner.report.columns import Column, unknown
from bnn_runner.report.filters import OWN, group_text, known_fields
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.grouping import ABSENT, Group, by_size
from bnn_runner.report.numbers import Summary
from bnn_runner.report.read_cells import CellRecord
from bnn_runner.report.render import header
from bnn_runner.report.tables import Row, Table, row_of

_MOST_NAMED = 6


def by_axes(table: Table, rows: Sequence[str], columns: Sequence[str], summary: Summary) -> tuple[Grid, ...]:
    """One grid with a line for each value of `rows`; with `columns`, one grid per metric with their values as columns.

    Seeds are averaged unless `seed` is an axis.

    Args:
        table: of all rows.
        rows: fields of the lines.
        columns: fields of the columns; empty for the metrics as columns.
        summary: how entries are summarised over seeds.

    Raises:
        UserError: for a field that no cell has, and if runs of several settings would share a place; it names the
            settings they differ in.
    """
    cells = [c for row in table.rows for c in (*row.group.done.values(), *row.group.others)]
    known = known_fields(cells)
    problems = [unknown("field", f, known, "An axis") for f in (*rows, *columns) if f not in known]
    problems += [f"The field {f} must be on one axis; got it in --rows and --columns." for f in rows if f in columns]
    if problems:
        raise UserError(*problems)
    found = _each_seed(table.rows) if "seed" in (*rows, *columns) else table.rows
    places: dict[tuple[tuple[str, ...], tuple[str, ...]], Row] = {}
    for row in found:
        if not row.n:
            continue
        place = tuple(group_text(row.group, f) for f in rows), tuple(group_text(row.group, f) for f in columns)
        other = places.setdefault(place, row)
        if other is not row:
            _refuse(other.group, row.group, (*rows, *columns), place)
    lines = list(dict.fromkeys(left for left, _ in places))
    if not columns:
        heads = tuple(header(c, table) for c in table.columns)
        filled = []
        for left in lines:
            row = places[left, ()]
            entries = tuple(row.entries.get(c) for c in table.columns)
            bold = frozenset(j for j, c in enumerate(table.columns) if _is_bold(table, row, c))
            words = (*left[:-1], table.named(row, left[-1]), str(row.n))
            filled.append(Line(words, entries, row.n, bold if summary == "mean" else frozenset()))
        return (Grid("by " + ", ".join(rows), (*rows, "n"), len(rows), heads, tuple(filled), "", summary),)
    tops = sorted({top for _, top in places}, key=lambda top: tuple(by_size(t) for t in top))
    grids = []
    for column in table.columns:
        filled = []
        for left in lines:
            there = [places.get((left, top)) for top in tops]
            most = max(row.n for row in there if row is not None)
            entries = tuple(None if row is None else row.entries.get(column) for row in there)
            bold = frozenset(j for j, row in enumerate(there) if row is not None and _is_bold(table, row, column))
            marks = tuple("" if row is None else table.named(row, "") for row in there)
            filled.append(Line(left, entries, most, bold if summary == "mean" else frozenset(), remarks=marks))
        heads = tuple(
            ", ".join(f"{f}={t}" if f not in OWN else t for f, t in zip(columns, top, strict=True)) for top in tops
        )
        counts = sorted({line.n for line in filled})
        seeds = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[-1]} unless stated otherwise,"
        title = f"{header(column, table)} by {', '.join(columns)}"
        grids.append(Grid(title, tuple(rows), len(rows), heads, tuple(filled), f"{seeds} seeds.", summary))
    return tuple(grids)


def _is_bold(table: Table, row: Row, column: Column) -> bool:
    """As in the main table; single seeds are never bold."""
    return any(table.rows[i] is row for i in table.best(column))


def _each_seed(rows: Sequence[Row]) -> list[Row]:
    return [
        row_of(replace(row.group, done={seed: cell}, others=()), row.extra, list(row.entries))
        for row in rows
        for seed, cell in row.group.done.items()
    ]


def differing(a: Group, b: Group) -> list[str]:
    """Fields in which two rows differ; a group's choice covers all of its settings."""
    choices = sorted(
        {name for g in (a, b) for c in _cells(g) for name in c.choices}
        - {"metric", "experiment", "logger", "data", "model", "method"}
    )
    found = [name for name in ("data", "model", "method") if group_text(a, name) != group_text(b, name)]
    found += [name for name in choices if group_text(a, name) != group_text(b, name)]
    one, two = a.key.values, b.key.values
    covered = set(found)
    for name in sorted({*one, *two}):
        if one.get(name, ABSENT) != two.get(name, ABSENT) and name.split(".", 1)[0] not in covered:
            found.append(name)
    found += ["results_version"] if a.key.results_version != b.key.results_version else []
    return found + (["shortened by the time limit"] if a.key.shortened != b.key.shortened else [])


def _cells(group: Group) -> list[CellRecord]:
    return [*group.done.values(), *group.others]


def _refuse(a: Group, b: Group, axes: Sequence[str], place: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
    where = ", ".join(f"{f}={t}" for f, t in zip(axes, (*place[0], *place[1]), strict=True))
    names = differing(a, b)
    shown = ", ".join(
        f"{name} ({group_text(a, name)}, {group_text(b, name)})" if group_text(a, name) != ABSENT else name
        for name in names[:_MOST_NAMED]
    )
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    first = names[0] if names else "seed"
    raise UserError(
        f"Runs at {where} must agree in all other settings to be averaged; they differ in {shown}{more}. Make this an "
        f"axis (--rows {','.join(axes)},{first}), or select one value ({first}=...)."
    )
