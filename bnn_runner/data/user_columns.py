"""Columns of a user's table: numbers, text and missing cells; errors name line and column."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnn_runner.data.table_file import TextTable
from bnn_runner.data.table_layout import places
from bnn_runner.data.typed import typed, typed_columns
from bnn_runner.errors import UserError, did_you_mean

MOST_TEXTS = 20
"""A text column with more different values is an identifier, a date or prose, not a category."""
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ].*)?|\d{1,2}:\d{2}(:\d{2})?")
_SHOWN = 5


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


@dataclass
class Unread:
    """Columns that could not be read as inputs, so that one message can advise on all of them.

    Attributes:
        problems: one sentence for each column.
        columns: their names.
        texts: cells that stand among numbers, with their counts: perhaps codes of missing values.
    """

    problems: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    texts: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, problem: str) -> None:
        """A column and its problem."""
        self.columns.append(name)
        self.problems.append(problem)

    def raise_any(self, table: TextTable, dropped: Sequence[str]) -> None:
        """Raises `UserError` with every problem, and what to type. `dropped` are columns that the user left out."""
        if not self.columns:
            return
        drop = typed_columns("data.drop", [*dropped, *self.columns], table.names)
        several = "these columns" if len(self.columns) > 1 else "the column"
        advice = f"Correct the cells, or leave {several} out: {drop}."
        if 0 < len(self.texts) <= 3:
            codes = typed("data.missing_codes", [*codes_in(table), *self.texts])
            advice += (
                f" If {', '.join(map(repr, self.texts))} means that a value is missing: {codes} data.missing=drop."
            )
        self.problems[-1] += " " + advice
        raise UserError(*self.problems)


def codes_in(table: TextTable) -> list[str]:
    """The codes of missing values that occur in a table, as they are written there; without the empty cell."""
    found: dict[str, None] = {}
    for row in table.rows:
        for cell in row:
            if cell and table.numbers.is_missing(cell):
                found[cell] = None
    return list(found)


def place(names: Sequence[str], wanted: str | int | float, key: str, path: object) -> int:
    """The index of a column, from its name or its position counted from 1. Raises `UserError` if there is none."""
    if str(wanted) in names:
        return names.index(str(wanted))
    if isinstance(wanted, int) and 1 <= wanted <= len(names):
        return wanted - 1
    near = did_you_mean(str(wanted), names)
    same = [name for name in names if name.casefold() == str(wanted).strip().casefold()]
    near = f" Did you mean {same[0]}?" if same else near
    raise UserError(
        f"{key} must be a column of {path}; got {wanted}.{near} Its columns: "
        f"{', '.join(names[:30])}{' ...' if len(names) > 30 else ''} (or a position from 1 to {len(names)})."
    )


def read_column(table: TextTable, index: int, unread: Unread) -> Column | None:
    """One input column; None if it could not be read, which is added to `unread`."""
    name, cells = table.names[index], table.column(index)
    values = table.numbers.values(cells)
    texts = [i for i, value in enumerate(values) if value is None]
    if not texts:
        if all(value != value for value in values):
            unread.add(name, f"{table.path}, column {name}: no cell has a value.")
            return None
        return Column(name, torch.tensor(values, dtype=torch.float64))
    first = f"{table.path}, {table.word} {table.lines[texts[0]]}, column {name}: {cells[texts[0]]!r}"
    numeric = sum(value is not None and value == value for value in values)
    if any(_DATE.fullmatch(cells[i]) for i in texts) and not numeric:
        unread.add(name, f"{first} is a date or a time. Convert it to a number (years, for example).")
        return None
    if numeric:
        found = Counter(cells[i] for i in texts)
        unread.texts.update(found if 2 * len(texts) < len(cells) else {})
        unread.add(name, f"{first} must be a number, like other cells of the column{_more(table, cells, texts)}.")
        return None
    different = tuple(sorted({cells[i] for i in texts}))
    if len(different) > MOST_TEXTS:
        signs = " (a currency or percent sign makes a number text)" if re.search(r"[$€£%]", cells[texts[0]]) else ""
        unread.add(
            name,
            f"{first} is text{signs}; a text column must have at most {MOST_TEXTS} different values, got "
            f"{len(different)}. Merge some of them.",
        )
        return None
    positions = {text: float(i) for i, text in enumerate(different)}
    indices = [positions.get(cell, float("nan")) for cell in cells]
    return Column(name, torch.tensor(indices, dtype=torch.float64), different)


def _more(table: TextTable, cells: Sequence[str], texts: Sequence[int]) -> str:
    """All texts among the numbers of a column, with their places."""
    if len(texts) == 1:
        return ""
    by_text: dict[str, list[int]] = {}
    for i in texts:
        by_text.setdefault(cells[i], []).append(table.lines[i])
    shown = [f"{text!r} in {places(lines, table.word)}" for text, lines in list(by_text.items())[:_SHOWN]]
    more = f" and {len(by_text) - _SHOWN} other texts" if len(by_text) > _SHOWN else ""
    return f" ({len(texts)} cells are not: {'; '.join(shown)}{more})"


def expand(values: Tensor, widths: Sequence[int], texts: Sequence[bool]) -> Tensor:
    """[M, D] numbers and indices of text -> [M, sum of widths]; text becomes one-hot, a missing cell NaNs."""
    expanded = []
    for column, width, is_text in zip(values.T, widths, texts, strict=True):
        if not is_text:
            expanded.append(column[:, None])
            continue
        hot = torch.arange(width, dtype=values.dtype, device=values.device) == column[:, None]
        expanded.append(hot.to(values.dtype).masked_fill(column.isnan()[:, None], float("nan")))
    return torch.cat(expanded, 1)


def missing_cells(table: TextTable, columns: Sequence[int]) -> list[tuple[int, int]]:
    """(row, column) of every missing cell of `columns`, row by row."""
    return sorted((r, c) for c in columns for r in table.numbers.missing_places(table.column(c)))
