"""Columns of a user's table: which are numbers, which are texts, what is missing; refused by line and name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.data.table_file import MISSING, TextTable, number
from bnn_runner.errors import UserError, did_you_mean

MOST_TEXTS = 20
"""A column of texts with more different ones is an identifier, a date or prose, and no category."""
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ].*)?|\d{1,2}:\d{2}(:\d{2})?")


@dataclass(frozen=True)
class Column:
    """A column of numbers, or of texts given by their places in `categories`; NaN is a missing cell; `values` [N]."""

    name: str
    values: Tensor
    categories: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Numbers it becomes: one, or one for each text."""
        return len(self.categories) or 1


def column_names(table: TextTable) -> tuple[str, ...]:
    """The header; columns without a name are called by their places, counted from 1."""
    header = table.header or ("",) * table.width
    return tuple(name or f"column {i}" for i, name in enumerate(header, 1))


def place(names: Sequence[str], wanted: str | int, key: str, path: object) -> int:
    """Where a column is, by its name or by its place counted from 1. Raises `UserError` where there is none."""
    if str(wanted) in names:
        return names.index(str(wanted))
    if isinstance(wanted, int) and 1 <= wanted <= len(names):
        return wanted - 1
    raise UserError(
        f"{key}={wanted} is no column of {path}.{did_you_mean(str(wanted), names)} "
        f"Its columns: {', '.join(names[:30])}{' ...' if len(names) > 30 else ''} (or a place from 1 to {len(names)})."
    )


def is_row_number(table: TextTable, index: int) -> bool:
    """Whether a column has no name and counts the rows (as data frames are written)."""
    if table.header is None or table.header[index]:
        return False
    cells = [row[index] for row in table.rows]
    return any(cells == [str(i + start) for i in range(len(cells))] for start in (0, 1))


def read_column(table: TextTable, index: int) -> tuple[Column | None, list[str]]:
    """One input column; or what is wrong with it, naming line and column."""
    name = column_names(table)[index]
    cells = [row[index] for row in table.rows]
    values = [table.number(cell) for cell in cells]
    texts = [i for i, value in enumerate(values) if value is None]
    if not texts:
        if all(value != value for value in values):
            return None, [f"{table.path}, column {name}: no cell has a value. Leave it out with data.drop=[{name}]."]
        return Column(name, torch.tensor(values, dtype=torch.float64)), []
    first = f"{table.path}, line {table.lines[texts[0]]}, column {name}: {cells[texts[0]]!r}"
    leave = f"leave the column out with data.drop=[{name}]"
    if any(value is not None and value == value for value in values):
        return None, [f"{first} is no number, and other cells of the column are. Mend the cell, or {leave}."]
    if all(number(cells[i], decimal_comma=True) is not None for i in texts):
        return None, [f"{first} may have a decimal comma or one between thousands. Separate cells by semicolons."]
    if any(_DATE.fullmatch(cells[i]) for i in texts):
        return None, [f"{first} is a date or a time. Make a number of it (years, say), or {leave}."]
    found = tuple(sorted({cells[i] for i in texts}))
    if len(found) > MOST_TEXTS:
        return None, [
            f"{first} is a text, one of {len(found)}: up to {MOST_TEXTS} become one input each. Join some, or {leave}."
        ]
    places = {text: float(i) for i, text in enumerate(found)}
    made = [places.get(cell, float("nan")) for cell in cells]
    return Column(name, torch.tensor(made, dtype=torch.float64), found), []


def expand(values: Tensor, widths: Sequence[int], texts: Sequence[bool]) -> Tensor:
    """[M, D] numbers and places of texts -> [M, sum of widths]; a text becomes one 1 among 0s, a missing one NaNs."""
    made = []
    for column, width, is_text in zip(values.T, widths, texts, strict=True):
        if not is_text:
            made.append(column[:, None])
            continue
        hot = torch.arange(width, dtype=values.dtype) == column[:, None]
        made.append(hot.to(values.dtype).masked_fill(column.isnan()[:, None], float("nan")))
    return torch.cat(made, 1)


def missing_cells(table: TextTable, columns: Sequence[int]) -> list[tuple[int, int]]:
    """(row, column) of every missing cell of `columns`, row by row."""
    return [(r, c) for r, row in enumerate(table.rows) for c in columns if row[c].lower() in MISSING]
