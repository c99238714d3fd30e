"""Cost and quality of a posterior: seconds after training against the test log-likelihood."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from bnn_runner.errors import UserError
from bnn_runner.report.columns import Column
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.looks import identity, looks
from bnn_runner.report.read_cells import CellRecord, ScoreRow
from bnn_runner.report.scatter import Panel, Point, error_of, row_label, scatter
from bnn_runner.report.section import Section
from bnn_runner.report.tables import Entry, Row, Table, aggregate

TEST = Column("marginal_loglik")
STAGES = ("posterior", "evaluation")
_LEAST_SECONDS = 1e-3


@dataclass(frozen=True)
class CostedRow:
    """A row with its wall-clock seconds by stage (`STAGES`, then their sum) and its test log-likelihood."""

    row: Row
    seconds: tuple[Entry, ...]
    test: Entry


def costs(table: Table) -> dict[str, list[CostedRow]]:
    """By data set and network, the cheapest first. Raises `UserError` if no row has both numbers."""
    found: dict[str, list[CostedRow]] = {}
    for row in table.rows:
        cells = list(row.group.done.values())
        scores = [c.main_scores[TEST] for c in cells if TEST in c.main_scores]
        taken = [stages for c in cells if (stages := _seconds(c))]
        if not scores or len(taken) < len(cells):
            continue
        seconds = [[t.get(stage, 0.0) for t in taken] for stage in STAGES]
        seconds.append([sum(pair) for pair in zip(*seconds, strict=True)])
        entries = tuple(aggregate([ScoreRow("seconds", v, better="lower", unit="s") for v in vs]) for vs in seconds)
        key = row.group.key
        found.setdefault(f"{key.data}, {key.model}", []).append(CostedRow(row, entries, aggregate(scores)))
    if not found:
        raise UserError(
            "--cost requires finished runs with both seconds and a log-likelihood; none has both. Leave it out, or run "
            "the methods again (force=true)."
        )
    return {name: sorted(rows, key=lambda r: r.seconds[-1].mean) for name, rows in found.items()}


def cost_grids(found: dict[str, list[CostedRow]]) -> tuple[Grid, ...]:
    """One table per data set and network."""
    heads = ("fit [s] ↓", "evaluation [s] ↓", "both [s] ↓", "marginal_loglik [nats per point] ↑")
    note = "Wall-clock seconds after training, for the points, draws and machine of these runs."
    grids = []
    for name, rows in found.items():
        extra = list(rows[0].row.extra)
        lines = tuple(
            Line((r.row.group.key.method, *r.row.extra.values(), str(r.row.n)), (*r.seconds, r.test), r.row.n)
            for r in rows
        )
        grids.append(Grid(f"{name}: cost", ("method", *extra, "n"), 1 + len(extra), heads, lines, note))
    return tuple(grids)


def cost_figure(table: Table, path: Path) -> Path:
    """One panel per data set and network: seconds (log scale) against test log-likelihood, ± standard errors of both.

    Panels share the axis of seconds; those of one data set also that of the log-likelihood.
    """
    look, panels = looks(table), []
    for name, rows in costs(table).items():
        points = {
            row_label(r.row): Point(look[identity(r.row)], _place(r.seconds[-1]), (r.test.mean, error_of(r.test)))
            for r in rows
            if math.isfinite(r.test.mean)
        }
        key = rows[0].row.group.key.data
        panels.append(Panel(name, points, key, "seconds after training", "test log-likelihood [nats per point]"))
    return scatter(panels, "quality against cost\n(error bars: ±1 standard error over seeds)", path, log_x=True)


def _place(seconds: Entry) -> tuple[float, float]:
    """Seconds and their standard error, both within a logarithmic axis."""
    shown = max(seconds.mean, _LEAST_SECONDS)
    return shown, min(error_of(seconds), 0.9 * shown)


def _seconds(cell: CellRecord) -> dict[str, float]:
    try:
        facts = json.loads((cell.path / "provenance.json").read_text(encoding="utf-8"))
        return {str(k): float(v) for k, v in facts["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


SECTION = Section(
    "--cost",
    "also seconds against log-likelihood, with a figure",
    lambda request: cost_grids(costs(request.table)),
    lambda request, path: cost_figure(request.table, path),
    example=("--cost", "also seconds after training against log-likelihood"),
)
