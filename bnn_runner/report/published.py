"""Our values compared with the published ones of an experiment, with a verdict by a stated tolerance.

The published values, their sources and tolerances are in `published.csv`. Its columns: `status` V was read in the
authors' files, V3 in a text of a third party, S in the talks; R is recalled without a source and never shown.
`quantity` is a name of `quantities`. `case` has filters, as in `data.num_train=10`. `kind` says what `spread` is, `se`
or `std` over the `n` seeds; `order` has methods in `value` (`ensemble > map`), from the larger quantity to the smaller;
`identity` is a relation that every run must fulfil, so that it reproduces nothing; `elsewhere` marks a method that does
not exist here. `beside` names a smaller data set whose runs are shown next to the value, without a verdict.

`tolerance` of |ours − published|: `3se` is three published standard errors, `1std` one published standard deviation
over seeds, `0.2x` a share of the published value, `0.05` itself; of an order, the margin by which a step may be
negative.
`why` is its reason. Our own error never widens a tolerance: where it is larger than the tolerance, the verdict is
"undecided". A value without a tolerance is only for comparison: its settings differ.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from bnn_runner.report.filters import Filter, field_text, parse_filters
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.grouping import Group, distinguishing_fields, group_cells
from bnn_runner.report.orders import UNDECIDED, alternatives, judge
from bnn_runner.report.quantities import LINEAR, Quantity, by_seed
from bnn_runner.report.read_cells import CellRecord, ScoreRow
from bnn_runner.report.section import Request, Section
from bnn_runner.report.selection import selected_cells
from bnn_runner.report.tables import BIASED, Entry, aggregate

FILE = Path(__file__).with_name("published.csv")
RECALLED = "R"
TAGS = {
    "V": "read in the authors' files",
    "V3": "read in a text of a third party",
    "C": "computed from the authors' code",
    "S": "from the talks",
}
OTHER_SIZE, FLAGGED, NO_VERDICT = "other size", "not converged", "—"
_HIGHER = ("marginal_loglik", "accuracy")


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
    why: str = ""
    beside: str = ""

    @property
    def shown(self) -> str:
        """The value with its spread, as published."""
        return f"{self.value} ± {self.spread} ({self.kind})" if self.spread else self.value

    @property
    def deviation(self) -> float:
        """The published standard deviation over seeds; NaN where no spread was published."""
        if not self.spread or self.kind not in ("se", "std"):
            return math.nan
        return float(self.spread) * (math.sqrt(float(self.n)) if self.kind == "se" else 1)

    @property
    def slack(self) -> float:
        """The tolerance of a value as a number; NaN without one."""
        if not self.tolerance or self.kind == "order":
            return math.nan
        if self.tolerance.endswith("se"):
            return float(self.tolerance[:-2]) * self.deviation / math.sqrt(float(self.n))
        if self.tolerance.endswith("std"):
            return float(self.tolerance[:-3]) * self.deviation
        if self.tolerance.endswith("x"):
            return float(self.tolerance[:-1]) * abs(float(self.value))
        return float(self.tolerance)

    @property
    def allowed(self) -> str:
        """The tolerance with its reason, as it is shown."""
        if not self.tolerance:
            return NO_VERDICT
        amount = self.tolerance if self.kind == "order" else f"± {self.slack:.2g}"
        return f"{amount} ({self.why})"

    @property
    def filters(self) -> list[Filter]:
        """The filters of the runs it is compared with."""
        data = ",".join(filter(None, (self.data, self.beside)))
        words = [f"{name}={value}" for name, value in (("data", data), ("model", self.model)) if value]
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
        compared: Sequence[tuple[Line, str] | None]
        if row.kind == "order":
            compared = _orders(row, found)
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
    heads = ("data", "model", "method", "setting", "quantity", "source", "verdict", "tolerance", "published", "n")
    grid = Grid(f"{experiment}: compared with published values", heads, 8, ("ours",), tuple(lines))
    return replace(grid, note=" ".join(_notes(grid, verdicts, rule)))


def _notes(grid: Grid, verdicts: Sequence[str], rule: str) -> list[str]:
    counts = [f"{verdicts.count(v)} {v}" for v in dict.fromkeys(verdicts) if v != NO_VERDICT]
    notes = [f"Verdicts: {', '.join(counts) or 'none'}."]
    if any(v in verdicts for v in ("within", "better", "WORSE", "DIFFERS", UNDECIDED)):
        notes.append("A tolerance does not grow with our own error; where that is larger, the verdict is undecided.")
    if any(v.startswith("order") for v in verdicts):
        notes.append(
            "Orders: each step by a paired t test at 5 %; the line has the step that is farthest from holding."
        )
    if any(v.lower().startswith("identity") for v in verdicts):
        notes.append("An identity holds for every correct program and reproduces nothing.")
    if FLAGGED in verdicts:
        notes.append(f"{BIASED}, and is not judged.")
    sources = "".join(line.words[5] for line in grid.lines)
    notes += [f"[{tag}]: {meaning}." for tag, meaning in TAGS.items() if f"[{tag}]" in sources]
    return [*notes, rule] if rule else notes


def verdict(ours: Sequence[float], row: Published, own_error: float = math.nan) -> str:
    """within, better, WORSE, DIFFERS or undecided by the row's tolerance; a dash if it has none.

    Args:
        ours: our values, by seed.
        row: the published value.
        own_error: our standard error where there is a single seed; over seeds it follows from the values.
    """
    slack = row.slack
    if math.isnan(slack):
        return NO_VERDICT
    theirs, mean = float(row.value), statistics.mean(ours)
    own = statistics.stdev(ours) / math.sqrt(len(ours)) if len(ours) > 1 else own_error
    inside = abs(mean - theirs) <= slack + 1e-12
    if row.kind == "identity":
        return "identity holds" if inside else "IDENTITY BROKEN"
    if inside:
        return "within" if own <= slack else UNDECIDED
    if row.quantity in _HIGHER:
        return "better" if mean > theirs else "WORSE"
    if row.quantity in ("rmse", "ece", *LINEAR) or row.quantity.startswith("pruning cost "):
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
    found = list(by_seed(cells, row.quantity).values())
    if not found:
        return None
    ours = [q.value for q in found]
    if row.beside and all(c.data == row.beside for c in cells):
        judged = OTHER_SIZE
    elif any(q.flagged for q in found) and row.tolerance:
        judged = FLAGGED
    else:
        judged = verdict(ours, row, found[0].measured.standard_error)
    places = _one(cells, "data"), _one(cells, "model"), _one(cells, "method")
    words = judged + outliers(ours)
    return _line(row, places, setting or row.case, words, row.allowed, row.shown, _entry(row, found)), judged


def _orders(row: Published, groups: Sequence[Group]) -> list[tuple[Line, str]]:
    """Whether the quantity decreases along the methods that have run, for each data set and model."""
    names = [name.strip() for name in row.value.split(">")]
    blocks: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        blocks.setdefault((group.key.data_key, group.key.model), []).append(group)
    found = []
    for block in blocks.values():
        own = {n: [g for g in block if g.key.method == n and g.done] for n in names}
        for setting, chosen in alternatives({n: rows for n, rows in own.items() if rows}):
            scores = {n: by_seed(list(chosen[n].done.values()), row.quantity) for n in names if n in chosen}
            measured = {n: {s: q.measured for s, q in of.items()} for n, of in scores.items()}
            order = judge(measured, float(row.tolerance or 0))
            if order is None:
                continue
            flagged = any(q.flagged for n in order.names for q in scores[n].values())
            judged = FLAGGED if flagged else f"order {order.verdict}"
            weakest = order.weakest
            step = weakest.difference
            entry = Entry(step.mean, step.error, step.n, marked=flagged)
            words = f"{setting} step {weakest.names[0]} − {weakest.names[1]}".strip()
            key = chosen[order.names[0]].key
            line = _line(row, (key.data, key.model, ""), words, judged, row.allowed, row.value, entry)
            found.append((line, judged))
    return found


def _elsewhere(row: Published) -> tuple[Line, str]:
    shown = f"{row.value} ± {row.spread}" if row.spread else row.value
    return _line(row, (row.data, "", ""), row.case, NO_VERDICT, NO_VERDICT, shown, None), NO_VERDICT


def _entry(row: Published, found: Sequence[Quantity]) -> Entry:
    status = {False: "ok", True: FLAGGED}
    error = [q.measured.standard_error or math.nan for q in found]
    return aggregate(
        [ScoreRow(row.quantity, q.value, e, status=status[q.flagged]) for q, e in zip(found, error, strict=True)]
    )


def _line(
    row: Published,
    places: tuple[str, str, str],
    setting: str,
    judged: str,
    allowed: str,
    shown: str,
    entry: Entry | None,
) -> Line:
    n = entry.n if entry is not None else 0
    source = f"{row.source} [{row.status}]"
    words = (*places, setting, row.quantity, source, judged, allowed, shown, str(n) if n else "")
    return Line(words, (entry,), n)


def _one(cells: Sequence[CellRecord], what: str) -> str:
    return "/".join(sorted({str(getattr(c, what)) for c in cells}))


def _text(group: Group, name: str) -> str | None:
    cells = [*group.done.values(), *group.others]
    return field_text(cells[0], name) if cells else None


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
