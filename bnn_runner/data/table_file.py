"""A table in a file, from any program: its header, cells and their line numbers, and what was guessed about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from bnn_runner.data import table_layout as layout
from bnn_runner.data.table_bytes import Content, decode, read_content
from bnn_runner.data.table_layout import Rows, places
from bnn_runner.data.table_numbers import NumberFormat, codes_of, find_marks, mark_of
from bnn_runner.errors import UserError

_NAMES = {"\t": "tabs", ";": "semicolons", "|": "bars", ",": "commas", " ": "white space"}


@dataclass(frozen=True)
class TableFormat:
    """How a table is read where the user says it; None or "auto" leaves it to the table.

    Attributes:
        header: whether the first row names the columns.
        decimal: comma or point.
        thousands: comma, point, space, apostrophe or none.
        encoding: as Python names it.
        skip_rows: number of lines to leave out at the top, or a list of line numbers.
        comment: lines that begin with this text are left out.
        missing_codes: texts or numbers that stand for a missing value, instead of the known ones.
    """

    header: Literal["auto"] | bool = "auto"
    decimal: str = "auto"
    thousands: str = "auto"
    encoding: str | None = None
    skip_rows: int | tuple[int, ...] | None = None
    comment: str | None = None
    missing_codes: tuple[str | float, ...] | None = None


@dataclass(frozen=True)
class TextTable:
    """Cells as texts without outer spaces, row by row; `lines` are their line numbers in the file, counted from 1.

    Attributes:
        path: the file.
        header: None if the first line is a row.
        rows: the cells.
        lines: of the rows.
        separator: between the cells; a space for white space, "" for a file without text.
        numbers: how cells are read as numbers.
        notes: what was guessed, or left out.
        word: what `lines` count.
    """

    path: Path
    header: tuple[str, ...] | None
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    separator: str
    numbers: NumberFormat = field(default_factory=NumberFormat)
    notes: tuple[str, ...] = ()
    word: str = "line"

    @property
    def width(self) -> int:
        return len(self.rows[0])

    @property
    def names(self) -> tuple[str, ...]:
        """The header; columns without a name are called by their position, counted from 1."""
        header = self.header or ("",) * self.width
        return tuple(name or f"column {i}" for i, name in enumerate(header, 1))

    @cached_property
    def _columns(self) -> list[tuple[str, ...]]:
        return list(zip(*self.rows, strict=True))

    def column(self, index: int) -> tuple[str, ...]:
        """The cells of one column."""
        return self._columns[index]

    def number(self, cell: str) -> float | None:
        """The number in a cell; NaN for a missing one, None for text."""
        return self.numbers.value(cell)

    def with_marks(self, columns: Sequence[int], wanted: TableFormat, assumed: NumberFormat | None = None) -> TextTable:
        """The table with the decimal and thousands marks of these columns, the ones that are used.

        Args:
            columns: their indices.
            wanted: marks that the user gave.
            assumed: marks that hold where the table does not decide, such as those of the training table.

        Raises:
            UserError: two decimal marks, or a number with two readings.
        """
        decimal = mark_of(wanted.decimal, "data.decimal", (",", "."))
        thousands = mark_of(wanted.thousands, "data.thousands", (",", ".", " ", "'", ""))
        named = [(self.names[i], self.column(i)) for i in columns]
        semicolons = self.separator == ";"
        try:
            marks = find_marks(named, self.lines, str(self.path), decimal, thousands, semicolons)
        except UserError:
            if assumed is None or decimal is not None or thousands is not None:
                raise
            marks = find_marks(named, self.lines, str(self.path), assumed.decimal)
        numbers = replace(self.numbers, decimal=marks[0], thousands=marks[1])
        advice = " (data.decimal=... and data.thousands=... set others)" if marks[2] else ""
        notes = [f"{', '.join(marks[2])}{advice}"] if marks[2] else []
        table = replace(self, numbers=numbers, notes=(*self.notes, *notes))
        table.__dict__["_columns"] = self._columns  # the cells are the same
        return table

    def shown_first_row(self, columns: Sequence[int]) -> str:
        """The first row as it is read, for a note."""
        shown = []
        for i in columns[:8]:
            value = self.number(self.rows[0][i])
            text = repr(self.rows[0][i]) if value is None else "missing" if value != value else f"{value:.12g}"
            shown.append(f"{self.names[i]} = {text}")
        more = f" and {len(columns) - 8} more" if len(columns) > 8 else ""
        return f"first row ({self.word} {self.lines[0]}): {', '.join(shown)}{more}"


def read_table(path: Path, wanted: TableFormat = TableFormat()) -> TextTable:
    """The table in `path`: text in any encoding with commas, semicolons, tabs, bars or white space; Parquet; .xlsx.

    Text may be packed (.gz, .bz2, .xz, .zip). Its notes say what was guessed.

    Raises:
        UserError: a file that is absent, empty, damaged or of another kind, or whose rows differ in length.
    """
    content = read_content(path)
    codes = codes_of(wanted.missing_codes)
    if content.kind == "text":
        table = _from_text(path, content, wanted)
    else:
        from bnn_runner.data.table_frames import read_frame

        frame = read_frame(path, content)
        header, rows, notes = frame.header, frame.rows, list(frame.notes)
        if header is None:
            rows, header, found = _without_other_rows(rows, wanted, "row", "")
            notes += found
        table = _checked(path, header, rows, "", notes, "row")
    return replace(table, numbers=NumberFormat(codes=codes))


def _from_text(path: Path, content: Content, wanted: TableFormat) -> TextTable:
    text, _, notes = decode(path, content.data, wanted.encoding)
    if content.packed:
        notes.insert(0, f"unpacked ({content.packed})")
    lines = re.split(r"\r\n|\r|\n", text)
    layout.skip(lines, wanted.skip_rows)
    stated = layout.stated_separator(lines)
    comments, above = ([], "") if wanted.comment == "none" else layout.skip_comments(lines, wanted.comment)
    separator = stated or layout.find_separator(lines)
    rows = layout.split_text(path, lines, separator)
    if comments:
        notes.append(f"{places(comments)} left out as comments (data.comment=none reads them)")
    rows, header, found = _without_other_rows(rows, wanted, "line", above)
    named = _NAMES.get(separator, repr(separator))
    how = f"cells separated by {named}" + (", as its first line states" if stated else "")
    return _checked(path, header, rows, separator, [how, *notes, *found], "line")


def _without_other_rows(
    rows: Rows, wanted: TableFormat, word: str, above: str
) -> tuple[Rows, tuple[str, ...] | None, list[str]]:
    """The rows that are points, the header, and notes; `above` is a comment that may be the header."""
    notes: list[str] = []
    if wanted.skip_rows is None:
        rows, titles = layout.skip_titles(rows)
        if titles:
            notes.append(f"{places(titles, word)} left out as a title (data.skip_rows=0 reads all)")
    if not rows.cells:
        return rows, None, notes
    header: tuple[str, ...] | None = None
    is_header = layout.has_header(rows) if wanted.header == "auto" else wanted.header
    if is_header:
        header = rows.cells[0]
        line, rows = rows.lines[0], rows.without([0])
        notes.append(f"header in {word} {line}" + (" (data.header=false: a row)" if wanted.header == "auto" else ""))
    elif wanted.header == "auto":
        names = _comment_header(above, rows)
        if names is not None:
            header = names
            notes.append("header in the comment above the first row (data.header=false: no header)")
        else:
            notes.append(f"no header: {word} {rows.lines[0]} is a row (data.header=true: the header)")
    if not rows.cells:
        return rows, header, notes
    if header is not None:
        header, rows, found = _fitted(header, rows)
        notes += found
    if wanted.skip_rows is None:
        if header is not None:
            rows, units = layout.skip_units(rows)
            if units:
                shown = ", ".join(units)
                notes.append(f"the row {shown} below the header left out as units (data.skip_rows=0 reads all)")
        rows, closing = layout.skip_footnotes(rows, header)
        if closing:
            notes.append(
                f"{places(closing, word)} left out as footnotes or repeated headers (data.skip_rows=0 reads all)"
            )
    return rows, header, notes


def _comment_header(above: str, rows: Rows) -> tuple[str, ...] | None:
    """The names in the last comment above the table, if they are as many as its columns."""
    for separator in (*layout.SEPARATORS, " "):
        names = tuple(name.strip() for name in layout.split_line(above, separator))
        if len(names) == rows.width > 1 and all(names) and not any(map(layout.looks_numeric, names)):
            return names
    return None


def _fitted(header: tuple[str, ...], rows: Rows) -> tuple[tuple[str, ...], Rows, list[str]]:
    """Header and rows of one width where the difference is clear: row names, and blank cells at the end."""
    width = rows.width
    if width == len(header) + 1 and all(len(row) == width for row in rows.cells):
        last = [row[-1] for row in rows.cells]
        if not any(last):
            return header, Rows([row[:-1] for row in rows.cells], rows.lines), []
        return ("", *header), rows, ["the header has one name less than the rows have cells: the first are row names"]
    if width > len(header) and all(not any(row[len(header) :]) for row in rows.cells):
        return header, Rows([row[: len(header)] for row in rows.cells], rows.lines), []
    if width < len(header) and not any(header[width:]):
        return header[:width], rows, []
    return header, rows, []


def _checked(
    path: Path, header: tuple[str, ...] | None, rows: Rows, separator: str, notes: list[str], word: str
) -> TextTable:
    """The table. Raises `UserError` for no rows, rows of different lengths, and names that occur twice."""
    if not rows.cells:
        raise UserError(f"{path} must have one row per point; got no rows.")
    width = len(header) if header is not None else rows.width
    wrong = [(line, len(row)) for row, line in zip(rows.cells, rows.lines, strict=True) if len(row) != width]
    if wrong:
        line, count = wrong[0]
        others = f", and so in {len(wrong) - 1} more {word}s" if len(wrong) > 1 else ""
        raise UserError(
            f"{path}, {word} {line} must have {width} cells, as the {'header' if header else 'other rows'}; got "
            f"{count}{others} (separated by {_NAMES.get(separator, repr(separator))}). Correct it, or leave lines out: "
            f"data.skip_rows=N the first N lines, 'data.skip_rows=[{line}]' this one."
        )
    named = [name for name in header or () if name]
    if len(set(named)) < len(named):
        double = next(name for name in named if named.count(name) > 1)
        raise UserError(
            f"{path}: column names must be unique; got {double!r} twice. Rename one, or read the first line as a row "
            "with data.header=false."
        )
    return TextTable(path, header, tuple(rows.cells), tuple(rows.lines), separator, notes=tuple(notes), word=word)
