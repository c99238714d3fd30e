"""A table in a text file: its header, cells and their lines, whatever program wrote it."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bnn_runner.errors import UserError

SEPARATORS = (",", ";", "\t", "|")
MISSING = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})
"""How a missing cell is written, in small letters."""


@dataclass(frozen=True)
class TextTable:
    """Cells as texts without outer spaces, row by row; `lines` are their line numbers in the file, counted from 1.

    `header` is None where the first line holds numbers alone. `separator` is what stood between cells
    (a space for white space).
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
        """The number in a cell (NaN for a missing one), None for a text. "1,5" is one and a half between semicolons."""
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
        raise UserError(f"{path} cannot be read ({error.strerror}). Give the file of a table.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is no text in UTF-8 (byte {error.start}). Save it as CSV in UTF-8 and give that."
        ) from None
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
        raise UserError(f"{path} holds no rows. A table has one row a point.")
    width = len(header) if header is not None else len(cells[0])
    for found, line in zip(cells, lines, strict=True):
        if len(found) != width:
            raise UserError(
                f"{path}, line {line}: {len(found)} cells, and the first line has {width}. Each row needs as many "
                f"(cells are taken to be separated by {separator!r})."
            )
    if header is not None and len(set(header)) < len(header):
        double = next(name for name in header if header.count(name) > 1)
        raise UserError(f"{path}: two columns are named {double!r}. Name each column once.")
    return TextTable(path, header, tuple(cells), tuple(lines), separator)


def _separator(text: str) -> str:
    """The separator that cuts the first lines into equally many cells, the most; white space where none does."""
    first = [line for line in text.splitlines() if line.strip()][:20]
    counts = {}
    for separator in SEPARATORS:
        widths = {len(row) for row in csv.reader(first, delimiter=separator, skipinitialspace=True)}
        if len(widths) == 1 and (width := widths.pop()) > 1:
            counts[separator] = width
    if counts:
        # Semicolons before commas: commas may be decimal ones, which cut rows into equally many cells too.
        return max(counts, key=lambda s: (s == ";", counts[s]))
    if any("," in line for line in first):
        return ","
    split = {len(line.split()) for line in first}
    numbers = all(number(cell, True) is not None for line in first[1:] for cell in line.split())
    return " " if len(split) == 1 and numbers and split != {1} else ","


def _names_columns(row: Sequence[str], separator: str) -> bool:
    """Whether a first row names columns: it holds texts and no number (an unnamed column is an empty cell)."""
    values = [number(cell, separator != ",") for cell in row]
    return None in values and all(v is None or v != v for v in values)
