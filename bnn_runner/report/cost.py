"""Cost and quality of a posterior: seconds of training, fit and evaluation against marginal and joint scores."""

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
from bnn_runner.report.render import header
from bnn_runner.report.scatter import Panel, Point, error_of, row_label, scatter
from bnn_runner.report.section import Section
from bnn_runner.report.tables import Entry, Row, Table, aggregate

TEST = Column("marginal_loglik")
JOINT = Column("dyadic_loglik", tau=10, kappa=2)
STAGES = ("training", "fit", "evaluation")
_LEAST_SECONDS = 1e-3


@dataclass(frozen=True)
class CostedRow:
    """A row with its wall-clock seconds by stage (`STAGES`, then their sum), and its scores."""

    row: Row
    seconds: tuple[Entry, ...]
    scores: dict[Column, Entry]


def costs(table: Table) -> dict[str, list[CostedRow]]:
    """By data set and network, the cheapest first. Raises `UserError` if no row has both seconds and a score.

    Training counts all networks of a cell, as if none came from the cache.
    """
    found: dict[str, list[CostedRow]] = {}
    for row in table.rows:
        cells = list(row.group.done.values())
        scores = {
            column: aggregate(there)
            for column in (TEST, JOINT)
            if (there := [c.main_scores[column] for c in cells if column in c.main_scores])
        }
        taken = [stages for c in cells if (stages := _seconds(c))]
        if TEST not in scores or len(taken) < len(cells):
            continue
        seconds = [*([t[stage] for t in taken] for stage in STAGES), [sum(t.values()) for t in taken]]
        entries = tuple(aggregate([ScoreRow("seconds", v, better="lower", unit="s") for v in vs]) for vs in seconds)
        key = row.group.key
        found.setdefault(f"{key.data}, {key.model}", []).append(CostedRow(row, entries, scores))
    if not found:
        raise UserError(
            "--cost requires finished runs with both seconds and a log-likelihood; none has both. Leave it out, or run "
            "the methods again (force=true)."
        )
    return {name: sorted(rows, key=lambda r: _middle(r.seconds[-1])) for name, rows in found.items()}


def cost_grids(table: Table) -> tuple[Grid, ...]:
    """One table per data set and network, with medians: the first run of a process is slower than the others."""
    note = (
        "Medians [quartiles] over seeds of wall-clock seconds, for the points, draws and machine of these runs; "
        "training counts all networks of a run."
    )
    grids = []
    for name, rows in costs(table).items():
        extra = list(rows[0].row.extra)
        columns = [c for c in (TEST, JOINT) if any(c in r.scores for r in rows)]
        heads = (*(f"{stage} [s] ↓" for stage in (*STAGES, "all")), *(header(c, table) for c in columns))
        lines = tuple(
            Line(
                (r.row.group.key.method, *r.row.extra.values(), str(r.row.n)),
                (*r.seconds, *(r.scores.get(c) for c in columns)),
                r.row.n,
            )
            for r in rows
        )
        grids.append(Grid(f"{name}: cost", ("method", *extra, "n"), 1 + len(extra), heads, lines, note, "median"))
    return tuple(grids)


def cost_figure(table: Table, path: Path) -> Path:
    """One panel per score, data set and network: seconds (log scale) against the score, with error bars of both.

    Panels share the axis of seconds; those of one data set and score also that of the score.
    """
    look, panels = looks(table), []
    for name, rows in costs(table).items():
        for column in (TEST, JOINT):
            points = {
                row_label(r.row): Point(look[identity(r.row)], _place(r.seconds[-1]), (score.mean, error_of(score)))
                for r in rows
                if (score := r.scores.get(column)) is not None and math.isfinite(score.mean)
            }
            if points:
                key = f"{rows[0].row.group.key.data} {column.key}"
                label = header(column, table).removesuffix(" ↑")
                panels.append(Panel(name, points, key, "seconds with training", label))
    bars = "(bars: ±1 standard error of the score,\nhalf the distance of the quartiles of the seconds)"
    return scatter(panels, f"quality against cost\n{bars}", path, log_x=True)


def _middle(entry: Entry) -> float:
    return entry.quartiles[1]


def _place(seconds: Entry) -> tuple[float, float]:
    """Median seconds and half the distance of their quartiles, both within a logarithmic axis."""
    low, middle, high = seconds.quartiles
    shown = max(middle, _LEAST_SECONDS)
    return shown, min((high - low) / 2, 0.9 * shown)


def _seconds(cell: CellRecord) -> dict[str, float]:
    """Seconds by stage; empty if the cell has none."""
    try:
        facts = json.loads((cell.path / "provenance.json").read_text(encoding="utf-8"))
        stages = facts["seconds"]
        training = facts.get("training_seconds_when_trained", stages.get("training", 0.0))
        found = (training, stages.get("posterior", 0.0), stages.get("evaluation", 0.0))
        return {stage: float(v) for stage, v in zip(STAGES, found, strict=True)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


SECTION = Section(
    "--cost",
    "also seconds of training, fit and evaluation against scores, with a figure",
    lambda request: cost_grids(request.table),
    lambda request, path: cost_figure(request.table, path),
    example=("--cost", "also seconds against marginal and joint scores"),
)
