"""Each posterior minus its centre (see `base.Centred`): what the posterior adds to the network that it is around."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from bnn_runner.errors import UserError
from bnn_runner.report.columns import CENTRE, Column
from bnn_runner.report.differences import FEWEST
from bnn_runner.report.grid import DIFFERS, Grid, Line
from bnn_runner.report.numbers import Summary
from bnn_runner.report.paired import starred, tested, without_extra
from bnn_runner.report.render import header
from bnn_runner.report.section import Request, Section
from bnn_runner.report.tables import Entry, Row, Table, aggregate, measured


def centre_differences(table: Table, summary: Summary = "mean") -> Grid:
    """The shown scores minus those of the posterior's own centre, seed by seed: mean ± s/√n over the seeds.

    A star where it differs from 0 at 5 %, by the test of `differences` (paired over seeds and over test points) and
    Holm's rule over the table. Raises `UserError` if no row has a centre.
    """
    found = {i: _differences(row, table.columns) for i, row in enumerate(table.rows) if row.n}
    columns = [c for c in table.columns if any(c in pairs for pairs in found.values())]
    lines: list[Line] = []
    p_values: list[list[float]] = []
    for i, pairs in found.items():
        if not pairs:
            continue
        row, key = table.rows[i], table.rows[i].group.key
        words = (key.data, key.model, table.named(row, key.method), *(row.extra[e] for e in table.extra), str(row.n))
        cells = [pairs.get(c, (None, math.nan)) for c in columns]
        lines.append(Line(words, tuple(entry for entry, _ in cells), row.n))
        p_values.append([p for _, p in cells])
    if not lines:
        raise UserError(
            "--centre requires a run of this version whose posterior has a centre: Laplace, ensembles, dropout, Bayes "
            "by Backprop or SWAG. Run one, for example bnn-run method=laplace."
        )
    names = ("data", "model", "method", *table.extra)
    note = "Differences of the posterior from its own centre (Laplace and ensembles: the MAP network), seed by seed."
    if summary == "mean":
        lines, count = starred(lines, p_values)
        note += (
            f" {DIFFERS}: differs from 0 at 5 % (t test over seeds and test points, n at least {FEWEST}; Holm's rule "
            f"over the {count} differences)."
        )
    heads = tuple(f"Δ {header(c, table)}" for c in columns)
    return Grid("posterior minus its centre", (*names, "n"), len(names), heads, tuple(lines), note, summary)


def _differences(row: Row, columns: Sequence[Column]) -> dict[Column, tuple[Entry | None, float]]:
    """For each column that the centre has too, the entry and its p-value."""
    found: dict[Column, tuple[Entry | None, float]] = {}
    for column in columns:
        of_centre = replace(column, metric=CENTRE + column.metric)
        both = {s: c for s, c in row.group.done.items() if column in c.main_scores and of_centre in c.main_scores}
        if not both:
            continue
        pairs = [(c.main_scores[column], c.main_scores[of_centre]) for c in both.values()]
        scores = [own._replace(value=own.value - centre.value) for own, centre in pairs]
        entry = aggregate(scores, absent=row.n - len(scores))
        ours, theirs = ({s: measured(c, which) for s, c in both.items()} for which in (column, of_centre))
        found[column] = tested(entry, column, ours, theirs)
    return found


def _tables(request: Request) -> list[Grid]:
    return [without_extra(centre_differences(request.table, request.summary))]


SECTION = Section(
    "--centre",
    "also what each posterior adds to its own centre (Laplace: the MAP network)",
    _tables,
    example=("--centre", "also each posterior minus its own centre"),
)
