"""Our values compared with the published ones of an experiment, with a verdict by a stated tolerance.

The published values, their sources and tolerances are in `published.csv`. Its columns: `status` V was read in the
authors' files, V3 in a text of a third party, S in the talks; R is recalled without a source and never shown.
`quantity` is a column key of a result table (`rmse`, `dyadic_loglik_tau10_kappa2`), `a / b` the ratio of two,
`error_percent` 100 (1 − accuracy), `nll` minus the marginal log-likelihood, or `rate NAME`, a learned dropout rate.
`case` has filters, as in `data.num_train=10`. `kind` says what `spread` is, `se` or `std` over the `n` seeds; `order`
has methods in `value` (`ensemble > map`), from the larger quantity to the smaller; `elsewhere` marks a method that does
not exist here.

`tolerance` of |ours − published|: `2se` is 2 √(SE₁² + SE₂²), `2se+0.05` that and 0.05, `0.2x` a share of the
published value, `0.05` itself; for an order, the amount by which it may be violated. A value without a tolerance is
only for comparison: its settings differ.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from bnn_runner.report.filters import Filter, field_text, parse_filters
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.grouping import Group, distinguishing_fields, group_cells
from bnn_runner.report.read_cells import CellRecord, ScoreRow
from bnn_runner.report.section import Request, Section
from bnn_runner.report.selection import selected_cells
from bnn_runner.report.tables import Entry, aggregate

FILE = Path(__file__).with_name("published.csv")
RECALLED = "R"
_HIGHER = ("marginal_loglik", "accuracy")
_DERIVED: dict[str, tuple[str, Callable[[float], float]]] = {
    "error_percent": ("accuracy", lambda accuracy: 100 * (1 - accuracy)),
    "nll": ("marginal_loglik", lambda loglik: -loglik),
}


@dataclass(frozen=True)
class Published:
    """One line of the file, as texts."""

    experiment: str
    source: str
    status: str
    data: str
    model: str
    method: str
    case: str
    quantity: str
    value: str
    spread: str
    kind: str
    n: str
    tolerance: str

    @property
    def shown(self) -> str:
        """The value with its spread, as published."""
        return f"{self.value} ± {self.spread} ({self.kind})" if self.spread else self.value

    @property
    def filters(self) -> list[Filter]:
        """The filters of the runs it is compared with."""
        words = [f"{name}={value}" for name in ("data", "model") if (value := getattr(self, name))]
        words += [f"method={self.method}"] if self.method else []
        return parse_filters([*words, *self.case.split()], "The case")


@cache
def published(experiment: str) -> tuple[Published, ...]:
    """Every value of an experiment that has a source."""
    with FILE.open(encoding="utf-8", newline="") as file:
        rows = [Published(**row) for row in csv.DictReader(file)]
    return tuple(r for r in rows if r.experiment == experiment and r.status != RECALLED)


def compare_with_published(cells: Sequence[CellRecord], experiment: str) -> Grid | None:
    """A table of an experiment's finished runs and its published values; None if there are none.

    Runs that differ in a setting have separate lines, unless the published rule selects among such settings (see
    `selection`).
    """
    done = [c for c in cells if c.status == "done"]
    kept, rule = selected_cells(done, experiment)
    groups, _ = group_cells(kept)
    extra = distinguishing_fields(groups)
    names = {id(g): " ".join(f"{k}={texts[i]}" for k, texts in extra.items()) for i, g in enumerate(groups)}
    lines: list[Line] = []
    verdicts: list[str] = []
    for row in published(experiment):
        found = [g for g in groups if all(f.matches(_text(g, f.name)) for f in row.filters)]
        compared: list[tuple[Line, str] | None]
        if row.kind == "order":
            compared = [_order(row, found)]
        elif row.kind == "elsewhere":
            compared = [_elsewhere(row)] if found else []
        elif rule:
            compared = [_compared(row, [c for g in found for c in g.done.values()], "")]
        else:
            compared = [_compared(row, list(g.done.values()), names[id(g)]) for g in found]
        for line, verdict in filter(None, compared):
            lines.append(line)
            verdicts.append(verdict)
    if not lines:
        return None
    heads = ("data", "model", "method", "setting", "quantity", "source", "verdict", "published", "n")
    counts = [f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts) if v != "—"]
    note = f"Verdicts by the tolerances of published.csv: {', '.join(counts) or 'none has one'}. {rule}".strip()
    return Grid(f"{experiment}: compared with published values", heads, 7, ("ours",), tuple(lines), note)


def values(cells: Sequence[CellRecord], quantity: str) -> list[float]:
    """A quantity of every cell that has it."""
    found = [_value(c, quantity) for c in cells]
    return [v for v in found if v is not None]


def verdict(ours: Sequence[float], row: Published) -> str:
    """within, better, WORSE or DIFFERS by the row's tolerance; a dash if it has none."""
    if not row.tolerance:
        return "—"
    theirs, mean = float(row.value), statistics.mean(ours)
    if row.tolerance.startswith("2se"):
        theirs_se = float(row.spread) / (math.sqrt(float(row.n)) if row.kind == "std" else 1)
        own = statistics.stdev(ours) / math.sqrt(len(ours)) if len(ours) > 1 else 0.0
        slack = 2 * math.hypot(theirs_se, own) + float(row.tolerance.removeprefix("2se") or 0)
    elif row.tolerance.endswith("x"):
        slack = float(row.tolerance[:-1]) * abs(theirs)
    else:
        slack = float(row.tolerance)
    if abs(mean - theirs) <= slack + 1e-12:
        return "within"
    if row.quantity in _HIGHER:
        return "better" if mean > theirs else "WORSE"
    if row.quantity in ("rmse", "ece", *_DERIVED):
        return "better" if mean < theirs else "WORSE"
    return "DIFFERS"


def outliers(ours: Sequence[float]) -> str:
    """A remark with the median if a few values dominate the mean: sd more than three times that of the middle half."""
    if len(ours) < 5:
        return ""
    low, middle, high = statistics.quantiles(ours, n=4)
    far = statistics.stdev(ours) > 3 * (high - low) / 1.349
    return f", mean dominated by outliers (median {middle:.4g})" if far else ""


def _compared(row: Published, cells: Sequence[CellRecord], setting: str) -> tuple[Line, str] | None:
    ours = values(cells, row.quantity)
    if not ours:
        return None
    judged = verdict(ours, row)
    words = judged + outliers(ours)
    return _line(row, _one(cells, "model"), _one(cells, "method"), setting or row.case, words, row.shown, ours), judged


def _order(row: Published, groups: Sequence[Group]) -> tuple[Line, str] | None:
    """Whether the quantity decreases along the methods that have run; its line has the smallest step."""
    names = [name.strip() for name in row.value.split(">")]
    cells = [c for g in groups for c in g.done.values()]
    of = {n: values([c for c in cells if c.method == n], row.quantity) for n in names}
    there = [n for n in names if of[n]]
    if len(there) < 2:
        return None
    steps = [statistics.mean(of[a]) - statistics.mean(of[b]) for a, b in itertools.pairwise(there)]
    judged = "order holds" if min(steps) >= -float(row.tolerance or 0) else "ORDER DOES NOT HOLD"
    kept = [c for c in cells if c.method in there]
    words = f"smallest step{'' if there == names else ' of ' + ' > '.join(there)}"
    return _line(row, _one(kept, "model"), "", words, judged, row.value, [min(steps)]), judged


def _elsewhere(row: Published) -> tuple[Line, str]:
    shown = f"{row.value} ± {row.spread}" if row.spread else row.value
    return Line(
        (row.data, "", "", row.case, row.quantity, f"{row.source} [{row.status}]", "—", shown, ""), (None,), 0
    ), "—"


def _line(
    row: Published, model: str, method: str, setting: str, judged: str, shown: str, ours: Sequence[float]
) -> Line:
    entry: Entry = aggregate([ScoreRow(row.quantity, v) for v in ours])
    source = f"{row.source} [{row.status}]"
    words = (row.data, model, method, setting, row.quantity, source, judged, shown, str(len(ours)))
    return Line(words, (entry,), len(ours))


def _one(cells: Sequence[CellRecord], what: str) -> str:
    return "/".join(sorted({str(getattr(c, what)) for c in cells}))


def _text(group: Group, name: str) -> str | None:
    cells = [*group.done.values(), *group.others]
    return field_text(cells[0], name) if cells else None


def _value(cell: CellRecord, quantity: str) -> float | None:
    top, _, bottom = quantity.partition(" / ")
    if bottom:
        a, b = _value(cell, top), _value(cell, bottom)
        return a / b if a is not None and b else None
    if quantity.startswith("rate "):
        report = json.loads((cell.path / "cell.json").read_text(encoding="utf-8"))["report"]
        return report["rates"].get(quantity.removeprefix("rate "))
    metric, change = _DERIVED.get(quantity, (quantity, float))
    found = [s for column, s in cell.main_scores.items() if column.key == metric and s.status != "n/a"]
    return change(found[0].value) if found else None


COLUMNS = tuple(f.name for f in fields(Published))


def _tables(request: Request) -> list[Grid]:
    """A table for each filter that names one experiment."""
    experiments = [f.values[0] for f in request.filters if f.name == "experiment" and len(f.values) == 1]
    found = [compare_with_published(request.cells, experiment) for experiment in experiments]
    return [grid for grid in found if grid is not None]


SECTION = Section(
    "",
    "",
    _tables,
    example=("experiment=uci_mc_dropout", "the runs of an experiment, compared with published values"),
)
