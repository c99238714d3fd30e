"""Columns of a user's table: numbers, text and missing cells; errors name line and column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.data.table_file import MISSING, TextTable, number
from bnn_runner.errors import UserError, did_you_mean

MOST_TEXTS = 20
"""A text column with more different values is an identifier, a date or prose, not a category."""
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ].*)?|\d{1,2}:\d{2}(:\d{2})?")


@dataclass(frozen=True)
class Column:
    """A column of numbers, or of text as indices into `categories`; NaN is a missing cell; `values` [N]."""

    name: str
    values: Tensor
    categories: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Number of inputs it becomes: one, or one per category."""
        return len(self.categories) or 1


def column_names(table: TextTable) -> tuple[str, ...]:
    """The header; columns without a name are called by their position, counted from 1."""
    header = table.header or ("",) * table.width
    return tuple(name or f"column {i}" for i, name in enumerate(header, 1))


def place(names: Sequence[str], wanted: str | int, key: str, path: object) -> int:
    """The index of a column, from its name or its position counted from 1. Raises `UserError` if there is none."""
    if str(wanted) in names:
        return names.index(str(wanted))
    if isinstance(wanted, int) and 1 <= wanted <= len(names):
        return wanted - 1
    raise UserError(
        f"{key} must be a column of {path}; got {wanted}.{did_you_mean(str(wanted), names)} Its columns: "
        f"{', '.join(names[:30])}{' ...' if len(names) > 30 else ''} (or a position from 1 to {len(names)})."
    )


def is_row_number(table: TextTable, index: int) -> bool:
    """Whether a column has no name and numbers the rows (as written by data frames)."""
    if table.header is None or table.header[index]:
        return False
    cells = [row[index] for row in table.rows]
    return any(cells == [str(i + start) for i in range(len(cells))] for start in (0, 1))


def read_column(table: TextTable, index: int) -> tuple[Column | None, list[str]]:
    """One input column, or its problems, as sentences that name line and column."""
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
        return None, [f"{first} must be a number, like other cells of the column. Correct the cell, or {leave}."]
    if all(number(cells[i], decimal_comma=True) is not None for i in texts):
        return None, [f"{first} has a comma, decimal or between thousands. Separate the cells by semicolons."]
    if any(_DATE.fullmatch(cells[i]) for i in texts):
        return None, [f"{first} is a date or a time. Convert it to a number (years, for example), or {leave}."]
    found = tuple(sorted({cells[i] for i in texts}))
    if len(found) > MOST_TEXTS:
        return None, [
            f"{first} is text; a text column must have at most {MOST_TEXTS} different values, got {len(found)}. Merge "
            f"some of them, or {leave}."
        ]
    places = {text: float(i) for i, text in enumerate(found)}
    indices = [places.get(cell, float("nan")) for cell in cells]
    return Column(name, torch.tensor(indices, dtype=torch.float64), found), []


def expand(values: Tensor, widths: Sequence[int], texts: Sequence[bool]) -> Tensor:
    """[M, D] numbers and indices of text -> [M, sum of widths]; text becomes one-hot, a missing cell NaNs."""
    expanded = []
    for column, width, is_text in zip(values.T, widths, texts, strict=True):
        if not is_text:
            expanded.append(column[:, None])
            continue
        hot = torch.arange(width, dtype=values.dtype) == column[:, None]
        expanded.append(hot.to(values.dtype).masked_fill(column.isnan()[:, None], float("nan")))
    return torch.cat(expanded, 1)


def missing_cells(table: TextTable, columns: Sequence[int]) -> list[tuple[int, int]]:
    """(row, column) of every missing cell of `columns`, row by row."""
    return [(r, c) for r, row in enumerate(table.rows) for c in columns if row[c].lower() in MISSING]
