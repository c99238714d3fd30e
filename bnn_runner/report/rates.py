"""Learned dropout rates of each row, by layer, next to the steps and points that they were learned from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from bnn_runner.errors import UserError
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.paired import without_extra
from bnn_runner.report.read_cells import CellRecord, ScoreRow
from bnn_runner.report.section import Section
from bnn_runner.report.tables import Table, aggregate


def rates_table(table: Table) -> Grid:
    """One line per row with learned rates: training points, optimiser steps, and the rate of every layer over seeds.

    Raises `UserError` if no row has rates.
    """
    found = {}
    for i, row in enumerate(table.rows):
        rates = [r for cell in row.group.done.values() if (r := _facts(cell, "cell.json", "report").get("rates"))]
        if rates:
            found[i] = rates
    if not found:
        raise UserError(
            "--rates requires finished runs that learn dropout rates; got none. Run method=concrete_dropout."
        )
    layers = list(dict.fromkeys(name for rates in found.values() for one in rates for name in one))
    lines = []
    for i, rates in found.items():
        row = table.rows[i]
        cell = next(iter(row.group.done.values()))
        points = _facts(cell, "provenance.json").get("training_points")
        words = [row.group.key.data, row.group.key.model, row.group.key.method, *row.extra.values()]
        words += [f"{points:,}" if points else "", _steps(cell, points), str(len(rates))]
        entries = tuple(aggregate([ScoreRow(name, one[name]) for one in rates if name in one]) for name in layers)
        lines.append(Line(tuple(words), entries, len(rates)))
    heads = ("data", "model", "method", *table.extra, "points", "steps", "n")
    return without_extra(Grid("learned dropout rates", heads, len(heads) - 3, tuple(layers), tuple(lines)))


def _steps(cell: CellRecord, points: int | None) -> str:
    """Steps of the optimiser: epochs times batches."""
    epochs, batch = cell.config.get("schedule.epochs"), cell.config.get("schedule.batch_size")
    return f"{epochs * math.ceil(points / batch):,}" if points and epochs and batch else ""


def _facts(cell: CellRecord, name: str, *within: str) -> Mapping[str, Any]:
    try:
        facts = json.loads((cell.path / name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    for key in within:
        facts = facts.get(key, {})
    return facts


SECTION = Section(
    "--rates",
    "also the dropout rates that concrete dropout learned",
    lambda request: [rates_table(request.table)],
    example=("method=concrete_dropout --rates", "also its learned rates, with points and steps"),
)
