"""What to look at in a user's table: columns that number or name the rows, constant columns, and odd values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bnn_runner.data.table_file import TextTable
from bnn_runner.data.typed import typed, typed_columns
from bnn_runner.data.user_columns import Column, codes_in

_ID = re.compile(
    r"(unnamed:? ?\d*|.*(^|[_\W])(id|idx|index|uuid|guid|row ?names?|rownum|row_?id|row)|.*[a-z](Id|ID)|id)", re.ASCII
)
_CODES = (-99.0, -999.0, -9999.0, -99999.0, -999999.0, 99.0, 999.0, 9999.0, 99999.0, 999999.0, -9.0, -1.0)
_SHOWN = 8


@dataclass(frozen=True)
class Labels:
    """Columns that number or name the rows: their indices, with the reason of each."""

    reasons: dict[int, str]

    def note(self, table: TextTable, columns: Sequence[int]) -> str:
        """Says which of them are left out, and how to use them."""
        left = [i for i in self.reasons if i not in columns]
        if not left:
            return ""
        shown = ", ".join(
            f"{table.header[i] or 'a column without a name' if table.header else table.names[i]} ({self.reasons[i]})"
            for i in left[:_SHOWN]
        )
        keep = [table.names[i] for i in left if self.reasons[i] != BLANK]
        how = f", unless you add {typed_columns('data.keep', keep, table.names)}" if keep else ""
        return f"left out: {shown}{how}"


BLANK = "no cell has a value"


def row_labels(table: TextTable, columns: Sequence[int]) -> Labels:
    """The columns of `columns` that number or name the rows, or that are blank and have no name.

    A column counts if its numbers grow by one from row to row, or if it is called id, index or the like (or nothing)
    and no value occurs twice.
    """
    reasons: dict[int, str] = {}
    for i in columns:
        cells = table.column(i)
        name = table.header[i] if table.header else None
        if not name and not any(cells):
            reasons[i] = BLANK
            continue
        named = name is not None and _names_rows(name)
        if len(cells) < 3 or not (named or _grows(table, cells[:3])) or len(set(cells)) < len(cells):
            continue
        values = table.numbers.values(cells)
        whole = all(value is not None and value == value and float(value).is_integer() for value in values)
        if whole and all(b - a == 1 for a, b in pairwise(values)):  # type: ignore[operator]
            reasons[i] = "counts the rows"
        elif named and (whole or all(value is None for value in values)):
            reasons[i] = "a different value in every row"
    return Labels(reasons)


def _grows(table: TextTable, cells: Sequence[str]) -> bool:
    """Whether the first cells are numbers that grow by one: most columns need no closer look."""
    values = [table.number(cell) for cell in cells]
    return all(a is not None and b is not None and b - a == 1 for a, b in pairwise(values))


def _names_rows(name: str) -> bool:
    """Whether a column's name says that it numbers or names the rows."""
    return name == "" or _ID.fullmatch(name) is not None or _ID.fullmatch(name.lower()) is not None


def is_constant(column: Column) -> bool:
    """Whether a column has the same value in all rows."""
    return bool((column.values == column.values[0]).all())


def columns_to_check(table: TextTable, columns: Sequence[Column]) -> list[str]:
    """Constant columns, and values that look like codes of missing ones (-999, 9.97e36) or errors (1e200)."""
    found = []
    constant = [c.name for c in columns if is_constant(c)]
    if constant:
        found.append(f"constant: {_few(constant)}")
    odd: dict[str, list[tuple[float, int]]] = {}
    for column in columns:
        if not column.categories and (values := _odd_values(column)):
            odd[column.name] = values
    if odd:
        shown = "; ".join(
            f"{name} has {' and '.join(_rows_with(value, count) for value, count in values)}"
            for name, values in list(odd.items())[:_SHOWN]
        )
        more = f"; and {len(odd) - _SHOWN} more columns" if len(odd) > _SHOWN else ""
        codes = list(dict.fromkeys(value for values in odd.values() for value, _ in values))[:_SHOWN]
        numbers = [int(code) if code.is_integer() and abs(code) < 1e15 else code for code in codes]
        advice = typed("data.missing_codes", [*codes_in(table), *numbers])
        found.append(f"far from all other values: {shown}{more} (if missing: {advice} data.missing=drop)")
    return found


def _odd_values(column: Column) -> list[tuple[float, int]]:
    """Values far outside the range of all others: known codes, and anything a million times larger."""
    values = column.values[~column.values.isnan()]
    different, counts = values.unique(return_counts=True)
    found = []
    for value in (different[0], different[-1]):
        others = different[different != value]
        if len(others) < 2:
            continue
        low, high = float(others.min()), float(others.max())
        outside = max(low - float(value), float(value) - high)
        huge = abs(float(value)) > 1e6 * max(abs(low), abs(high), 1e-300)
        if huge or (float(value) in _CODES and outside > high - low):
            found.append((float(value), int(counts[different == value])))
    return found


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _rows_with(value: float, count: int) -> str:
    return f"{value:.6g} in {count} {'row' if count == 1 else 'rows'}"
