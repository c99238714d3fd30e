"""Quantities of a cell by name: its scores, and simple functions of them.

A name is a column key of a result table (`rmse`, `dyadic_loglik_tau10_kappa2`), `a / b` the ratio of two,
`error_percent` 100 (1 − accuracy), `nll` minus the marginal log-likelihood, `rate NAME` a learned dropout rate,
`pruning cost P` the points of error that removing P percent of the weights adds (a run on which bnn-prune was used),
and `evidence_nats` or `newton_decrement_nats` those facts of the posterior.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bnn_runner.report.differences import Measured
from bnn_runner.report.point_scores import PointScores, read_points
from bnn_runner.report.read_cells import CellRecord

LINEAR: dict[str, tuple[str, float, float]] = {
    "error_percent": ("accuracy", -100.0, 100.0),
    "nll": ("marginal_loglik", -1.0, 0.0),
}
"""Name -> (score, factor, offset)."""
FACTS = ("evidence_nats", "newton_decrement_nats")
_SETTLED = ("ok", "n/a")


@dataclass(frozen=True)
class Quantity:
    """A quantity of one cell, and whether its score is flagged (not converged, not finite)."""

    measured: Measured
    flagged: bool = False

    @property
    def value(self) -> float:
        return self.measured.value


def quantity_of(cell: CellRecord, name: str) -> Quantity | None:
    """The quantity; None if the cell does not have it. Ratios, rates and facts have no error over test points."""
    top, _, bottom = name.partition(" / ")
    if bottom:
        a, b = quantity_of(cell, top), quantity_of(cell, bottom)
        if a is None or b is None or not b.value:
            return None
        return Quantity(_alone(a.value / b.value), a.flagged or b.flagged)
    if name.startswith("rate "):
        report = json.loads((cell.path / "cell.json").read_text(encoding="utf-8"))["report"]
        rate = report.get("rates", {}).get(name.removeprefix("rate "))
        return None if rate is None else Quantity(_alone(float(rate)))
    if name in FACTS:
        fact = cell.evidence.get(name)
        return None if fact is None else Quantity(_alone(float(fact)))
    if name.startswith("pruning cost "):
        cost = _pruning_cost(cell, float(name.removeprefix("pruning cost ")))
        return None if cost is None else Quantity(cost)
    key, factor, offset = LINEAR.get(name, (name, 1.0, 0.0))
    found = [s for column, s in cell.main_scores.items() if column.key == key and s.status != "n/a"]
    if not found:
        return None
    score = found[0]

    def points() -> PointScores | None:
        kept = read_points(cell.path, key)
        return None if kept is None else replace(kept, values=factor * kept.values + offset)

    measured = Measured(factor * score.value + offset, abs(factor) * score.standard_error, points)
    return Quantity(measured, score.status not in _SETTLED)


def _pruning_cost(cell: CellRecord, percent: float) -> Measured | None:
    """The cost of removing `percent` of the weights; None without a table of bnn-prune."""
    try:
        with (cell.path / "pruning.csv").open(encoding="utf-8", newline="") as file:
            found = {float(row["removed_percent"]): row for row in csv.DictReader(file)}
        row = found[percent]
        return Measured(float(row["cost"]), float(row["cost_standard_error"]), lambda: None)
    except (OSError, ValueError, KeyError):
        return None


def _alone(value: float) -> Measured:
    return Measured(value, 0.0, lambda: None)


def by_seed(cells: Sequence[CellRecord], name: str) -> dict[int, Quantity]:
    """The quantity of each seed that has a finite one."""
    found = {c.seed: quantity_of(c, name) for c in cells}
    return {seed: q for seed, q in found.items() if q is not None and math.isfinite(q.value)}
