"""How many members of a deep ensemble a posterior is worth (Ashukha et al. 2020)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from bnn_runner.errors import UserError
from bnn_runner.report.axes import differing
from bnn_runner.report.columns import Column
from bnn_runner.report.commands import with_words
from bnn_runner.report.filters import group_text
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.grouping import ABSENT
from bnn_runner.report.paired import without_extra
from bnn_runner.report.read_cells import ScoreRow
from bnn_runner.report.section import Section
from bnn_runner.report.tables import BIASED, Entry, Row, Table, aggregate

_LOGLIK = Column("marginal_loglik")
_SIZE = "method.size"
Curve = Mapping[int, Entry]


def ensemble_equivalents(table: Table) -> Grid:
    """Size l ≥ 1 at which deep ensembles reach the calibrated log-likelihood of a row: min{l : L_DE(l) ≥ L}.

    L is the marginal log-likelihood of the test points, calibrated for classes
    (`eval.calibrate=temperature`), its mean over seeds; L_DE(l) that of the rows `method=ensemble` of
    size l (MAP is size 1) with the same data and model, linear between sizes, limited to 1 and the largest size.
    "lower" and "upper" compare with L_DE(l) ± its standard deviation over seeds.

    Raises:
        UserError: if there are no ensembles of two sizes, or two rows of one size.
    """
    blocks: dict[tuple[object, ...], list[Row]] = {}
    for row in table.rows:
        entry = _loglik(row)
        if entry is not None and math.isfinite(entry.mean):
            blocks.setdefault(_block(row), []).append(row)
    lines: list[Line] = []
    notes: list[str] = []
    flagged = False
    for rows in blocks.values():
        curve = _curve(rows)
        if len(curve) < 2:
            continue
        largest = max(curve)
        absent = sorted(set(range(1, largest)) - set(curve))
        if absent:
            sizes = ", ".join(map(str, absent))
            notes.append(f"{rows[0].group.key.data}: values at ensemble size {sizes} are interpolated.")
            notes += _commands(rows, absent)
        for row in rows:
            entry = _loglik(row)
            assert entry is not None
            deviation = {size: e.standard_error * math.sqrt(e.n) if e.n > 1 else math.nan for size, e in curve.items()}
            values = [
                equivalent(entry.mean, {size: e.mean + sign * deviation[size] for size, e in curve.items()})
                for sign in (1, -1)
            ]
            values.insert(0, equivalent(entry.mean, {size: e.mean for size, e in curve.items()}))
            key = row.group.key
            words = (
                key.data,
                key.model,
                table.named(row, key.method),
                *(row.extra[e] for e in table.extra),
                str(row.n),
            )
            entries = tuple(
                replace(aggregate([ScoreRow("dee", v)]), n=row.n, marked=entry.marked) if math.isfinite(v) else None
                for v in values
            )
            lines.append(Line(words, (entry, *entries), row.n))
            flagged |= entry.marked
            if entry.mean > curve[largest].mean:
                notes.append(
                    f"{row.name} is better than the largest ensemble ({largest}): its equivalent is a lower bound."
                )
    if not lines:
        raise UserError(
            "--equivalents requires deep ensembles of at least two sizes with the same data and model as the methods, "
            "and "
            "eval.calibrate=temperature in all runs for classes (uncalibrated single networks look worse than they "
            "are). "
            "Run for example: bnn-run -m method=ensemble method.size=2,3,5 eval.calibrate=temperature"
        )
    if flagged:
        notes.append(f"{BIASED}, and so is its equivalent.")
    names = ("data", "model", "method", *table.extra)
    heads = (f"{_LOGLIK.label} ↑", "ensemble equivalent ↑", "lower", "upper")
    note = " ".join(
        ["Size of the deep ensemble with the same log-likelihood; lower, upper: ± sd of the ensembles.", *notes]
    )
    return Grid("ensemble equivalents", (*names, "n"), len(names), heads, tuple(lines), note)


def equivalent(value: float, curve: Mapping[int, float]) -> float:
    """Smallest l with curve(l) ≥ value, linear between the sizes; 1 below the curve, the largest size above it.

    >>> equivalent(-0.3, {1: -0.5, 3: -0.1}), equivalent(-0.6, {1: -0.5, 3: -0.1}), equivalent(0.0, {1: -0.5, 3: -0.1})
    (2.0, 1.0, 3.0)
    """
    sizes = sorted(curve)
    if any(math.isnan(curve[size]) for size in sizes):
        return math.nan
    if value <= curve[sizes[0]]:
        return float(sizes[0])
    for low, high in itertools.pairwise(sizes):
        if curve[low] < value <= curve[high]:
            return low + (high - low) * (value - curve[low]) / (curve[high] - curve[low])
    return float(sizes[-1])


def _loglik(row: Row) -> Entry | None:
    """The log-likelihood of the row's test points, if it may be compared."""
    if row.kind == "classification" and group_text(row.group, "eval.calibrate") != "temperature":
        return None
    found = [c.main_scores[_LOGLIK] for c in row.group.done.values() if _LOGLIK in c.main_scores]
    entry = aggregate(found) if found else None
    return entry if entry is not None and entry.n else None


def _block(row: Row) -> tuple[object, ...]:
    model = tuple(s for s in row.group.key.settings if s[0].startswith("model."))
    return (row.group.key.data_key, row.group.key.model, model)


def _size(row: Row) -> int | None:
    if row.group.key.method == "map":
        return 1
    text = group_text(row.group, _SIZE)
    return int(text) if row.group.key.method == "ensemble" and text != ABSENT else None


def _curve(rows: Sequence[Row]) -> Curve:
    by_size: dict[int, Row] = {}
    for row in rows:
        size = _size(row)
        if size is None:
            continue
        other = by_size.setdefault(size, row)
        if other is not row:
            raise UserError(
                f"There must be one ensemble of size {size}; got {other.name} and {row.name}, which differ in "
                f"{', '.join(differing(other.group, row.group))}. Select one by a filter, as in schedule.epochs=100."
            )
    return {size: entry for size, row in sorted(by_size.items()) if (entry := _loglik(row)) is not None}


def _commands(rows: Sequence[Row], sizes: Sequence[int]) -> list[str]:
    ensembles = [row for row in rows if row.group.key.method == "ensemble"]
    command = with_words(ensembles[-1], {_SIZE: ",".join(map(str, sizes))})
    return [f"To run them: {command}."] if command else []


SECTION = Section(
    "--equivalents",
    "also the size of the deep ensemble that each method equals",
    lambda request: [without_extra(ensemble_equivalents(request.table))],
)
