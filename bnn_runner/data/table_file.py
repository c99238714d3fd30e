"""A table in a text file, from any program: its header, cells and their line numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bnn_runner.errors import UserError

SEPARATORS = (",", ";", "\t", "|")
MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""How a missing cell is written, in lower case."""


@dataclass(frozen=True)
class TextTable:
    """Cells as texts without outer spaces, row by row; `lines` are their line numbers in the file, counted from 1.

    `header` is None if the first line holds only numbers. `separator` stood between the cells (a space for white
    space).
    """

    path: Path
    header: tuple[str, ...] | None
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    separator: str

    @property
    def width(self) -> int:
        return len(self.rows[0])

    def number(self, cell: str) -> float | None:
        """The number in a cell (NaN for a missing one), None for text. Between semicolons, "1,5" is one and a half."""
        return number(cell, decimal_comma=self.separator != ",")


def number(cell: str, decimal_comma: bool = False) -> float | None:
    """A finite number, NaN for a missing cell, None for any other text.

    >>> number("1e3"), number("1,5"), number("1,5", decimal_comma=True), number("red")
    (1000.0, None, 1.5, None)
    """
    text = cell.strip()
    if text.lower() in MISSING:
        return float("nan")
    if decimal_comma and "." not in text and text.count(",") == 1:
        text = text.replace(",", ".")
    try:
        value = float(text.replace("_", "x"))  # Python reads 1_000; no table means that
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def read_table(path: Path) -> TextTable:
    """The table in `path`: UTF-8 with or without a byte-order mark; commas, semicolons, tabs, bars or white space.

    Raises `UserError` for a file that is absent, empty, of another encoding, or whose rows differ in length.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"Could not read {path}: {error.strerror}. Give the file of a table.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} must be text in UTF-8; byte {error.start} is not. Save it as CSV in UTF-8.") from None
    separator = _separator(text)
    cells: list[tuple[str, ...]] = []
    lines: list[int] = []
    if separator == " ":
        for line, content in enumerate(text.splitlines(), 1):
            if content.strip():
                cells.append(tuple(content.split()))
                lines.append(line)
    else:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, skipinitialspace=True)
        end = 0
        for row in reader:
            begin, end = end + 1, reader.line_num
            if any(cell.strip() for cell in row):
                cells.append(tuple(cell.strip() for cell in row))
                lines.append(begin)
    header: tuple[str, ...] | None = None
    if cells and _names_columns(cells[0], separator):
        header, cells, lines = cells[0], cells[1:], lines[1:]
    if not cells:
        raise UserError(f"{path} must have one row per point; got no rows.")
    width = len(header) if header is not None else len(cells[0])
    for found, line in zip(cells, lines, strict=True):
        if len(found) != width:
            raise UserError(
                f"{path}, line {line} must have {width} cells, as the first line; got {len(found)} (separated by "
                f"{separator!r})."
            )
    if header is not None and len(set(header)) < len(header):
        double = next(name for name in header if header.count(name) > 1)
        raise UserError(f"{path}: column names must be unique; got {double!r} twice.")
    return TextTable(path, header, tuple(cells), tuple(lines), separator)


def _separator(text: str) -> str:
    """The separator that splits the first lines into equally many cells, the most of them; else white space."""
    first = [line for line in text.splitlines() if line.strip()][:20]
    counts = {}
    for separator in SEPARATORS:
        widths = {len(row) for row in csv.reader(first, delimiter=separator, skipinitialspace=True)}
        if len(widths) == 1 and (width := widths.pop()) > 1:
            counts[separator] = width
    if counts:
        # Semicolons before commas: decimal commas split rows into equally many cells as well.
        return max(counts, key=lambda s: (s == ";", counts[s]))
    if any("," in line for line in first):
        return ","
    split = {len(line.split()) for line in first}
    numbers = all(number(cell, True) is not None for line in first[1:] for cell in line.split())
    return " " if len(split) == 1 and numbers and split != {1} else ","


def _names_columns(row: Sequence[str], separator: str) -> bool:
    """Whether a first row names columns: it has text and no number (an unnamed column is an empty cell)."""
    values = [number(cell, separator != ",") for cell in row]
    return None in values and all(v is None or v != v for v in values)
