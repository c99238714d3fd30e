"""Marginal score against dyadic score, one point per row: which posteriors know what they are wrong about together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bnn_runner.report.columns import Column
from bnn_runner.report.comparison import blocks_of
from bnn_runner.report.looks import identity, looks
from bnn_runner.report.scatter import Panel, Point, error_of, row_label, scatter
from bnn_runner.report.section import Section
from bnn_runner.report.tables import Entry, Row, Table, aggregate

MARGINAL = Column("marginal_loglik")
DYADIC = "dyadic_loglik"
KAPPA = 5
"""Anchors of the dyadic score, where it was computed; else the largest number there is."""


def panels(table: Table) -> list[Panel]:
    """One panel for each data set and network that has both scores for two rows; ± standard errors over seeds."""
    look, found = looks(table), []
    for (data, model), rows in blocks_of(table).items():
        column = _dyadic(rows)
        if column is None:
            continue
        points, units = {}, {"nats per block"}
        for row in rows:
            across, up = _entry(row, MARGINAL), _entry(row, column)
            if across is None or up is None:
                continue
            units = {up.unit or "nats per block"}
            place = (across.mean, error_of(across)), (up.mean, error_of(up))
            points[row_label(row)] = Point(look[identity(row)], *place, hollow=across.marked or up.marked)
        if len(points) > 1:
            labels = "marginal log-likelihood [nats per point]", f"dyadic, kappa = {column.kappa} [{units.pop()}]"
            found.append(Panel(f"{data} · {model}", points, data, *labels))
    return found


def figure(table: Table, path: Path) -> Path | None:
    """The panels in one figure; None if there are none."""
    shown = panels(table)
    if not shown:
        return None
    title = "Single points and blocks of points\n(up and right is better; error bars: ±1 standard error over seeds)"
    return scatter(shown, title, path)


def _dyadic(rows: Sequence[Row]) -> Column | None:
    """The dyadic score with five anchors, or with the most that any row has."""
    cells = [cell for row in rows for cell in row.group.done.values()]
    columns = {c for cell in cells for c in cell.main_scores if c.metric == DYADIC and c.split == "test" and c.kappa}
    return max(columns, key=lambda c: (c.kappa == KAPPA, c.kappa or 0), default=None)


def _entry(row: Row, column: Column) -> Entry | None:
    """The score of a row over its seeds; None if some seed has no finite value."""
    scores = [cell.main_scores[column] for cell in row.group.done.values() if column in cell.main_scores]
    entry = aggregate(scores)
    complete = len(scores) == row.n and not entry.not_applicable
    return entry if complete and math.isfinite(entry.mean) else None


SECTION = Section("", "", lambda request: (), lambda request, path: figure(request.table, path), stem="marginal_dyadic")
