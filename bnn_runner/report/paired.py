"""Paired differences from a baseline, seed by seed: what both share (split, initial weights) cancels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bnn_runner.errors import UserError
from bnn_runner.report.axes import differing
from bnn_runner.report.columns import Column, is_companion
from bnn_runner.report.difference_figure import difference_figure
from bnn_runner.report.differences import FEWEST, Measured, difference
from bnn_runner.report.filters import Filter, group_text, parse_filters
from bnn_runner.report.grid import DIFFERS, Grid, Line
from bnn_runner.report.numbers import Summary
from bnn_runner.report.render import header
from bnn_runner.report.section import Request, Section
from bnn_runner.report.separation import LEVEL
from bnn_runner.report.student import holm
from bnn_runner.report.tables import Entry, Row, Table, aggregate, measured


def paired_differences(table: Table, baseline: Sequence[Filter], summary: Summary) -> Grid:
    """Each row minus the baseline of its data set and model: d_s = x_s − b_s over the seeds that both have.

    Mean d ± s_d/√n over the n shared seeds; a star where it differs from 0 at 5 %, by the test of `differences` and
    Holm's rule over the table. The baseline is the row that matches the filters; of several, the one that shares most
    settings with the row. Raises `UserError` if there is none.
    """
    candidates = [
        row for row in table.rows if row.n and all(f.matches(group_text(row.group, f.name)) for f in baseline)
    ]
    words = " ".join(f"{f.name}={','.join(f.values)}" for f in baseline)
    if not candidates:
        raise UserError(f"--baseline must match a finished row; got {words}. Use another, as in --baseline method=map.")
    lines: list[Line] = []
    p_values: list[list[float]] = []
    alone = []
    free = {f.name for f in baseline}
    for row in table.rows:
        if row in candidates or not row.n:
            continue
        rival = _baseline_of(row, candidates, free)
        if rival is None:
            alone.append(row.name)
            continue
        shared = [seed for seed in row.group.done if seed in rival.group.done]
        found = [_difference(row, rival, column, shared) for column in table.columns]
        p_values.append([p for _, p in found])
        key = row.group.key
        texts = [
            key.data,
            key.model,
            table.named(row, key.method),
            *(row.extra[e] for e in table.extra),
            str(len(shared)),
        ]
        lines.append(Line(tuple(texts), tuple(entry for entry, _ in found), len(shared)))
    if not lines:
        raise UserError(
            f"The baseline {words} must have the data, results version and model of another row. Run it there, or use "
            "another --baseline."
        )
    names = ("data", "model", "method", *table.extra)
    heads = tuple(f"Δ {header(c, table)}" for c in table.columns)
    note = f"Differences from {words}, seed by seed."
    if summary == "mean":
        lines, count = starred(lines, p_values)
        note += (
            f" {DIFFERS}: differs from 0 at 5 % (t test over seeds and test points, n at least {FEWEST}; Holm's rule "
            f"over the {count} differences)."
        )
    note += f" Without a baseline: {', '.join(alone)}." if alone else ""
    return Grid(f"differences from {words}", (*names, "n"), len(names), heads, tuple(lines), note, summary)


def starred(lines: Sequence[Line], p_values: Sequence[Sequence[float]]) -> tuple[list[Line], int]:
    """The lines with stars, and the number of differences that were tested."""
    places = [(i, j) for i, row in enumerate(p_values) for j, p in enumerate(row) if not math.isnan(p)]
    kept = holm([p_values[i][j] for i, j in places], LEVEL)
    stars = {place for place, there in zip(places, kept, strict=True) if there}
    marked = [replace(x, starred=frozenset(j for k, j in stars if k == i)) for i, x in enumerate(lines)]
    return marked, len(places)


def _baseline_of(row: Row, candidates: Sequence[Row], free: set[str]) -> Row | None:
    there = [b for b in candidates if b.group.key.data_key == row.group.key.data_key]
    if "model" not in free:
        there = [b for b in there if b.group.key.model == row.group.key.model]
    if not there:
        return None
    distance = [sum(name not in free for name in differing(row.group, b.group)) for b in there]
    nearest = [b for b, d in zip(there, distance, strict=True) if d == min(distance)]
    if len(nearest) > 1:
        raise UserError(
            f"The baseline of {row.name} must be a single row; got {nearest[0].name} and {nearest[1].name}, which "
            "differ "
            f"in {', '.join(differing(nearest[0].group, nearest[1].group))}. Add a filter to --baseline."
        )
    return nearest[0]


def _difference(row: Row, rival: Row, column: Column, seeds: Sequence[int]) -> tuple[Entry | None, float]:
    """The entry, and its p-value: NaN for what is not tested (diagnostics, and what is not converged)."""
    scores = []
    kept = []
    for seed in seeds:
        one = row.group.done[seed].main_scores.get(column)
        two = rival.group.done[seed].main_scores.get(column)
        if one is None or two is None:
            continue
        status = next((s.status for s in (one, two) if s.status != "ok"), "ok")
        scores.append(one._replace(value=one.value - two.value, status=status))
        kept.append(seed)
    if not scores:
        return None, math.nan
    entry = aggregate(scores, absent=len(seeds) - len(scores))
    ours, theirs = ({s: measured(r.group.done[s], column) for s in kept} for r in (row, rival))
    return tested(entry, column, ours, theirs)


def tested(
    entry: Entry, column: Column, ours: Mapping[int, Measured], theirs: Mapping[int, Measured]
) -> tuple[Entry, float]:
    """An entry of differences with its error over points, and its p-value (NaN for what is not tested)."""
    if entry.nonfinite or entry.not_applicable or not entry.n:
        return replace(entry, points_error=math.nan), math.nan
    found = difference(ours, theirs)
    counts = entry.better and not (entry.marked or is_companion(column.metric))
    return replace(entry, points_error=found.over_points), found.p_value if counts else math.nan


def without_extra(grid: Grid) -> Grid:
    """The grid without the columns of words in which all lines agree."""
    kept = [j for j in range(len(grid.words)) if j < 3 or j >= grid.left or len({x.words[j] for x in grid.lines}) > 1]
    lines = tuple(replace(line, words=tuple(line.words[j] for j in kept)) for line in grid.lines)
    left = sum(j < grid.left for j in kept)
    return replace(grid, words=tuple(grid.words[j] for j in kept), left=left, lines=lines)


def _tables(request: Request) -> list[Grid]:
    baseline = parse_filters(request.value.split(), "--baseline")
    return [without_extra(paired_differences(request.table, baseline, request.summary))]


SECTION = Section(
    "--baseline",
    "also paired differences from these runs: method=map",
    _tables,
    lambda request, path: difference_figure(_tables(request)[0], path),
    metavar="'F=X ...'",
    example=("--baseline method=map", "also differences from MAP, seed by seed"),
)
