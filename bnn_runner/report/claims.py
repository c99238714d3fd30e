"""Claims about a table, each checked on its numbers: the text under a table is the outcome, never typed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bnn_runner.errors import UserError
from bnn_runner.report.differences import Measured
from bnn_runner.report.filters import Filter, field_text, group_text
from bnn_runner.report.grouping import Group, group_cells
from bnn_runner.report.orders import Order, alternatives, judge
from bnn_runner.report.quantities import Quantity, by_seed
from bnn_runner.report.read_cells import CellRecord

HEADING = "Checked on these numbers (t tests at 5 %, paired by seed and test point; ± is over both):"
NOT_RUN, FLAGGED = "not run at this size", "not judged, because a score has not converged"


@dataclass(frozen=True)
class Claim:
    """`order` from the larger `quantity` to the smaller.

    Attributes:
        order: values of the field `by`, or numbers, as in ["0.1", "bbb"] for a quantity of bbb below 0.1.
        quantity: a name of `quantities`.
        by: the field that `order` is of.
        where: further filters of the runs, field to value (or several, separated by commas).
        margin: by which a step may be negative, for "no worse".
    """

    order: Sequence[str]
    quantity: str
    by: str = "method"
    where: Mapping[str, str] = field(default_factory=dict)
    margin: float = 0.0

    def __post_init__(self) -> None:
        if len(self.order) < 2:
            raise UserError(f"The order of a claim must have at least two entries; got {list(self.order)}.")

    @property
    def text(self) -> str:
        """`rmse: map > ensemble`, or `schedule.epochs: 40 > 4` for another field."""
        by = "" if self.by == "method" else f" by {self.by}"
        margin = f" (or less by at most {self.margin:g})" if self.margin else ""
        return f"{self.quantity}{by}: {' > '.join(map(str, self.order))}{margin}"


def claim_lines(cells: Sequence[CellRecord], claims: Sequence[Claim]) -> list[str]:
    """One line for each claim, data set, model and setting, with its outcome and the step that decides it."""
    groups, _ = group_cells([c for c in cells if c.status == "done"])
    return [line for claim in claims for line in _lines(claim, groups)]


def _lines(claim: Claim, groups: Sequence[Group]) -> list[str]:
    filters = [Filter(name, tuple(str(value).split(","))) for name, value in claim.where.items()]
    kept = [g for g in groups if all(f.matches(_text(g, f.name)) for f in filters)]
    where = "".join(f", {name}={value}" for name, value in claim.where.items() if name not in ("data", "model"))
    blocks: dict[tuple[object, ...], list[Group]] = {}
    for group in kept:
        blocks.setdefault(_block(group, claim.by), []).append(group)
    lines = []
    for block in blocks.values():
        own = {str(name): [g for g in block if g.done and _is(g, claim.by, str(name))] for name in claim.order}
        for setting, chosen in alternatives({name: rows for name, rows in own.items() if rows}):
            found = _judged(claim, chosen)
            if found is None:
                continue
            order, flagged = found
            key = next(iter(chosen.values())).key
            place = "/".join([key.data, *([] if claim.by.startswith("model") else [key.model])])
            verdict = FLAGGED if flagged else order.verdict
            left_out = [str(n) for n in claim.order if str(n) not in order.names]
            without = f"; {', '.join(left_out)} {NOT_RUN}" if left_out else ""
            words = f"{place}{where}{', ' + setting if setting else ''}: {claim.text}: **{verdict}**"
            lines.append(f"{words} ({order.weakest.text}{without}).")
    return lines or [f"{claim.text}{where}: {NOT_RUN}."]


def _judged(claim: Claim, chosen: Mapping[str, Group]) -> tuple[Order, bool] | None:
    scores: dict[str, dict[int, Quantity]] = {
        name: by_seed(list(group.done.values()), claim.quantity) for name, group in chosen.items()
    }
    seeds = {seed for of in scores.values() for seed in of}
    measured: dict[str, dict[int, Measured]] = {}
    for name in map(str, claim.order):
        if name in scores:
            measured[name] = {seed: q.measured for seed, q in scores[name].items()}
        elif (number := _number(name)) is not None and claim.by == "method":
            measured[name] = {seed: Measured(number, 0.0, lambda: None) for seed in seeds}
    order = judge(measured, claim.margin)
    if order is None:
        return None
    return order, any(q.flagged for n in order.names for q in scores.get(n, {}).values())


def _block(group: Group, by: str) -> tuple[object, ...]:
    key = group.key
    data = key.data if by.startswith("data") else key.data_key
    return data, "" if by.startswith("model") else key.model, "" if by.startswith("method") else key.method


def _is(group: Group, by: str, name: str) -> bool:
    return Filter(by, (name,)).matches(group_text(group, by))


def _text(group: Group, name: str) -> str | None:
    cells = list(group.done.values())
    return field_text(cells[0], name) if cells else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
