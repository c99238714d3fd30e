"""Cost and quality of a posterior: seconds after training against the test log-likelihood."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from bnn_runner.errors import UserError
from bnn_runner.report import style
from bnn_runner.report.columns import Column
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.read_cells import CellRecord, ScoreRow
from bnn_runner.report.section import Section
from bnn_runner.report.tables import Entry, Row, Table, aggregate

TEST = Column("marginal_loglik")
STAGES = ("posterior", "evaluation")


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


def cost_figure(found: dict[str, list[CostedRow]], path: Path) -> Path:
    """One panel per data set and network: seconds (log scale) against test log-likelihood, ± standard errors."""
    figure, axes = style.new_figure(1, len(found), width=6.4, height=4.2)
    for ax, (name, rows) in zip(axes, found.items(), strict=True):
        for i, r in enumerate(rows):
            label = " ".join([r.row.group.key.method, *r.row.settings()])
            ax.errorbar(
                [max(r.seconds[-1].mean, 1e-3)], [r.test.mean], yerr=[_error(r.test)],
                fmt=style.marker(i + i // 8), color=style.colour(i), markersize=7, capsize=3, label=label,
            )  # fmt: skip
        ax.set_xscale("log")
        ax.set_xlabel("seconds after training")
        ax.set_ylabel("test log-likelihood [nats per point]")
        style.panel_title(ax, name)
        ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    style.title(figure, "quality against cost")
    return style.save(figure, path)


def _seconds(cell: CellRecord) -> dict[str, float]:
    try:
        facts = json.loads((cell.path / "provenance.json").read_text(encoding="utf-8"))
        return {str(k): float(v) for k, v in facts["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _error(entry: Entry) -> float:
    return entry.standard_error if math.isfinite(entry.standard_error) else 0.0


SECTION = Section(
    "--cost",
    "also seconds against log-likelihood, with a figure",
    lambda request: cost_grids(costs(request.table)),
    lambda request, path: cost_figure(costs(request.table), path),
    example=("--cost", "also seconds after training against log-likelihood"),
)
