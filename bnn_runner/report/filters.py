"""Fields of cells by name, for the filters, axes and baselines of a report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bnn_runner.errors import UserError
from bnn_runner.report.columns import unknown
from bnn_runner.report.grouping import ABSENT, Group, value_text
from bnn_runner.report.read_cells import CellRecord

OWN = ("data", "model", "method", "seed", "kind")


def field_text(cell: CellRecord, name: str) -> str | None:
    """The value of `data`, `seed`, a choice (`schedule`) or a setting (`schedule.epochs`) in a cell; None if unknown.

    A cell that stopped before it wrote its configuration has only the values in the name of its folder.
    """
    if name in OWN:
        return str(getattr(cell, name)) or None
    if name in cell.choices:
        return cell.choices[name]
    return value_text(cell.config[name]) if name in cell.config else None


def group_text(group: Group, name: str) -> str:
    """The same of a row: one text, or several joined by a slash if its cells differ."""
    cells = [c for c in (*group.done.values(), *group.others) if c.config] or list(group.others)
    found = sorted({text for c in cells if (text := field_text(c, name)) is not None})
    return "/".join(found) or ABSENT


def known_fields(cells: Iterable[CellRecord]) -> set[str]:
    """Every name that `field_text` knows for one of the cells."""
    return set(OWN).union(*({*c.choices, *c.config} for c in cells)) - {"metric"}


@dataclass(frozen=True)
class Filter:
    """`name=value,value`: cells whose field is one of the values."""

    name: str
    values: tuple[str, ...]

    def matches(self, text: str | None) -> bool:
        return text is not None and _normal(text) in map(_normal, self.values)


def parse_filters(words: Sequence[str], option: str) -> list[Filter]:
    """Filters from words as `data=yacht` or `schedule.epochs=3,10`. Raises `UserError` naming every other word."""
    problems, found = [], []
    for word in words:
        name, equals, values = word.partition("=")
        parts = tuple(v.strip() for v in _split(values) if v.strip())
        if not (name and equals and parts):
            problems.append(f"{option} {word!r} must be a filter field=value, as in data=yacht or seed=0,1.")
        found.append(Filter(name.strip(), parts))
    if problems:
        raise UserError(*problems)
    return found


def select(cells: Sequence[CellRecord], filters: Sequence[Filter]) -> list[CellRecord]:
    """The cells that match every filter. Raises `UserError` for fields and values that no cell has."""
    problems = []
    selected = list(cells)
    for f in filters:
        texts = [field_text(c, f.name) for c in cells]
        have = {t for t in texts if t is not None}
        if not have:
            problems.append(unknown("field", f.name, known_fields(cells), "The field of a filter"))
            continue
        normal = {_normal(t) for t in have}
        problems += [unknown(f.name, v, have, f.name) for v in f.values if _normal(v) not in normal]
        selected = [c for c in selected if f.matches(field_text(c, f.name))]
    if problems:
        raise UserError(*problems)
    if not selected:
        raise UserError("The filters match no cell together, though each matches some. Remove one of them.")
    return selected


def _normal(text: str) -> str:
    """One form for a value that is typed in several ways: 1 and 1.0, [50,50] and [50, 50], True and true."""
    text = re.sub(r"\s+", "", text)
    try:
        return value_text(float(text))
    except ValueError:
        return text.lower() if text.lower() in ("true", "false", "null") else text


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "[{(") - (c in "]})")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts
