"""Numbers in the cells of a table: decimal marks, thousands marks, and the codes of missing values.

Marks are found once for a whole table, because one cell can be ambiguous: "48,900" is 48.9 or 48900. Where the table
does not decide, it is refused with both readings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bnn_runner.errors import UserError

MISSING = frozenset(
    ("", "?", "na", "n/a", "nan", "-nan", "<na>", "null", "none", "#n/a", "#n/a n/a", "#na", "1.#ind", "-1.#ind")
) | frozenset(("1.#qnan", "-1.#qnan", "#div/0!", "#value!", "#ref!", "#name?", "#null!", "#num!"))
"""How R, pandas and spreadsheets write a missing cell, in lower case."""

MARKS = {"comma": ",", "point": ".", "space": " ", "apostrophe": "'"}
"""Names of marks in settings, which need no quotes in a shell."""
_NAMES = {mark: name for name, mark in MARKS.items()}
_SPACES, _APOSTROPHES = " \u00a0\u202f\u2009", "'\u2019"
_SIGN = "[+\\-\u2212]?"
_CLASS = {",": ",", ".": r"\.", " ": f"[{_SPACES}]", "'": f"[{_APOSTROPHES}]"}
_LIKE = re.compile(rf"{_SIGN}(?:\d[\d.,{_SPACES}{_APOSTROPHES}]*|[.,]\d+)(?:[eE][+-]?\d+)?")
_MARKS = f",{_SPACES}{_APOSTROPHES}"
_SPECIAL = re.compile(f"[,.{_SPACES}{_APOSTROPHES}]")
_OTHER = {",": ".", ".": ","}


def looks_numeric(cell: str) -> bool:
    """Whether a cell is a number under some decimal and thousands mark ("1.234,5", "1e3"); not a missing cell.

    >>> [looks_numeric(text) for text in ("48,900", "-1.5e3", "red", "1-2", "")]
    [True, True, False, False, False]
    """
    return _LIKE.fullmatch(cell.strip()) is not None


@dataclass(frozen=True)
class NumberFormat:
    """How cells are read as numbers.

    Attributes:
        decimal: "." or ",".
        thousands: marks between thousands; "" for none.
        codes: texts that stand for a missing value, in lower case; a code that is a number stands for every spelling
            of it (-999 and -999.0).
    """

    decimal: str = "."
    thousands: str = ""
    codes: frozenset[str] = MISSING

    @cached_property
    def _numbers(self) -> frozenset[float]:
        found = (_float(code) for code in self.codes)
        return frozenset(value for value in found if value is not None)

    @cached_property
    def _grouped(self) -> re.Pattern[str]:
        marks = "|".join(_CLASS[mark] for mark in self.thousands)
        return re.compile(rf"({_SIGN}\d{{1,3}}(?:(?:{marks})\d{{3}})+)({_CLASS[self.decimal]}\d*)?")

    def is_missing(self, cell: str) -> bool:
        """Whether a cell is empty or has one of the codes."""
        text = cell.strip().lower()
        if not text or text in self.codes:
            return True
        return bool(self._numbers) and self.value(cell) != self.value(cell)

    def missing_places(self, cells: Sequence[str]) -> list[int]:
        """The indices of missing cells, which have no outer spaces."""
        if self._numbers:
            return [i for i, cell in enumerate(cells) if self.is_missing(cell)]
        codes = self.codes
        return [i for i, cell in enumerate(cells) if not cell or cell.lower() in codes]

    def values(self, cells: Sequence[str]) -> list[float | None]:
        """`value` of each cell."""
        if self.decimal == "." and not self._numbers:  # most columns: numbers as Python writes them
            try:
                plain = list(map(float, cells))
            except ValueError:
                plain = []
            if plain and all(map(math.isfinite, plain)) and "_" not in "".join(cells):
                return list(plain)
        return [self.value(cell) for cell in cells]

    def value(self, cell: str) -> float | None:
        """A finite number, NaN for a missing cell, None for any other text."""
        text = cell.strip()
        if not text or text.lower() in self.codes:
            return float("nan")
        if self.thousands and (match := self._grouped.fullmatch(text)):
            text = re.sub(r"[^\d+\-\u2212]", "", match[1]) + (match[2] or "").replace(",", ".")
        elif self.decimal == ",":
            if "." in text or text.count(",") > 1:
                return None
            text = text.replace(",", ".")
        value = _float(text)
        return float("nan") if value is not None and value in self._numbers else value


def _float(text: str) -> float | None:
    """A finite number; None for anything else. Python also reads 1_000 and "nan", which no table means as numbers."""
    try:
        value = float(text)
    except ValueError:
        if not text.startswith("\u2212"):
            return None
        return _float("-" + text[1:])
    return value if "_" not in text and abs(value) < float("inf") else None


def codes_of(settings: Sequence[str | float] | None) -> frozenset[str]:
    """The codes of `data.missing_codes`; null stands for the known ones. An empty cell is always missing."""
    if settings is None:
        return MISSING
    return frozenset({"", *(str(code).strip().lower() for code in settings)})


class Cell(NamedTuple):
    """A cell as an example for messages: its column, line and text."""

    column: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.text!r} (line {self.line}, column {self.column})"


def mark_of(setting: str | None, key: str, allowed: Sequence[str]) -> str | None:
    """The mark that a setting names ("comma" or ","); None for auto or null. Raises `UserError` for another value."""
    if setting in (None, "auto"):
        return None
    mark = "" if setting == "none" else MARKS.get(str(setting), str(setting))
    names = [_NAMES.get(m, "none") for m in allowed]
    if mark not in allowed:
        raise UserError(f"{key} must be auto, {', '.join(names[:-1])} or {names[-1]}; got {setting!r}.")
    return mark


def find_marks(
    columns: Iterable[tuple[str, Sequence[str]]],
    lines: Sequence[int],
    where: str,
    decimal: str | None = None,
    thousands: str | None = None,
    semicolons: bool = False,
) -> tuple[str, str, list[str]]:
    """Decimal mark and thousands marks of a table.

    Args:
        columns: name and cells of each column that is used.
        lines: of the rows.
        where: the file, for errors.
        decimal: "." or "," if the user gave it, else None.
        thousands: the mark that the user gave, "" for none, None if the table is to decide.
        semicolons: whether they separate the cells, as where commas are decimal marks: then "1.234" alone is
            ambiguous too.

    Returns:
        The decimal mark, the thousands marks ("" for none), and what was found, for a note.

    Raises:
        UserError: two decimal marks, or a cell with two readings.
    """
    seen = _evidence(columns, lines, thousands == "", semicolons)
    if thousands in (",", "."):
        if decimal == thousands:
            raise UserError(f"data.decimal and data.thousands must differ; got {_NAMES[thousands]} for both.")
        decimal = _OTHER[thousands]
    if decimal is None:
        point, comma = seen.get("decimal ."), seen.get("decimal ,")
        if point and comma:
            raise UserError(
                f"{where} has two decimal marks: {point} and {comma}. Write all numbers with one mark. If one of the "
                "marks stands between thousands, say which: data.thousands=comma or data.thousands=point."
            )
        decimal = "," if comma else "."
        other = "." if semicolons and not point and not comma and "either ." in seen else _OTHER[decimal]
        double = seen.get(f"either {other}")
        if double and thousands is None and f"thousands {other}" not in seen:
            raise UserError(_two_readings(where, double, other))
    other = _OTHER[decimal]
    marks = thousands
    if marks is None:
        found = [other] if f"thousands {other}" in seen or f"either {other}" in seen else []
        marks = "".join([*found, *(m for m in (" ", "'") if f"thousands {m}" in seen)])
    words = [f"decimal comma, as in {seen['decimal ,'].text!r}"] if decimal == "," and "decimal ," in seen else []
    for mark in marks:
        example = seen.get(f"thousands {mark}") or seen.get(f"either {mark}")
        words += [f"{_NAMES[mark]} between thousands, as in {example.text!r}"] if example else []
    return decimal, marks, words


def _two_readings(where: str, cell: Cell, mark: str) -> str:
    digits = re.sub(r"\D", "", cell.text)
    fraction = f"{float(cell.text.replace(mark, '.').replace(chr(0x2212), '-')):g}"
    whole = cell.text[0] + digits if cell.text[0] in "-\u2212" else digits
    name = _NAMES[mark]
    return (
        f"{where}: {cell} has two readings, {whole} and {fraction}. Say which: data.thousands={name} if the {name} "
        f"stands between thousands, data.decimal={name} if it is the decimal mark."
    )


def _evidence(
    columns: Iterable[tuple[str, Sequence[str]]], lines: Sequence[int], none: bool, semicolons: bool
) -> dict[str, Cell]:
    """The first example of each kind of cell: "decimal ,", "thousands .", "either ," and so on.

    Only columns of which at least half of the cells look like numbers count. With `none`, no mark stands between
    thousands.
    """
    seen: dict[str, Cell] = {}
    columns = list(columns)
    if not semicolons and not any(set(_MARKS) & set("".join(cells)) for _, cells in columns):
        return seen  # points alone: decimal marks
    for name, cells in columns:
        special = [(cell, line) for cell, line in zip(cells, lines, strict=True) if _SPECIAL.search(cell)]
        if not special or all(_PLAIN.fullmatch(cell) for cell, _ in special):
            if special and "decimal ." not in seen:
                plain = next(((c, i) for c, i in special if not _GROUPED["."].fullmatch(c)), None)
                if plain is not None:
                    seen["decimal ."] = Cell(name, plain[1], plain[0])
            if special:
                whole = next(((c, i) for c, i in special if _GROUPED["."].fullmatch(c)), None)
                if whole is not None:
                    seen.setdefault("either .", Cell(name, whole[1], whole[0]))
            continue
        full = [cell for cell in cells if cell]
        if sum(map(looks_numeric, full)) * 2 < len(full):
            continue
        for cell, line in special:
            for kind in _kinds(cell.strip(), none):
                seen.setdefault(kind, Cell(name, line, cell.strip()))
    return seen


_PLAIN = re.compile(r"[+-]?\d*\.\d*(?:[eE][+-]?\d+)?")
_GROUPED = {mark: re.compile(rf"{_SIGN}[1-9]\d{{0,2}}(?:{_CLASS[mark]}\d{{3}})") for mark in (",", ".")}
_MANY = {mark: re.compile(rf"{_SIGN}[1-9]\d{{0,2}}(?:{_CLASS[mark]}\d{{3}}){{2,}}") for mark in (",", ".")}
_BOTH = {
    mark: re.compile(rf"{_SIGN}\d{{1,3}}(?:{_CLASS[mark]}\d{{3}})+{_CLASS[_OTHER[mark]]}\d*") for mark in (",", ".")
}
_DECIMAL = {mark: re.compile(rf"{_SIGN}\d*{_CLASS[mark]}\d*(?:[eE][+-]?\d+)?") for mark in (",", ".")}
_SPACED = {mark: re.compile(rf"({_SIGN}\d{{1,3}}(?:{_CLASS[mark]}\d{{3}})+)([.,]\d*)?") for mark in (" ", "'")}


def _kinds(text: str, none: bool) -> list[str]:
    """What one cell says about the marks."""
    if not none:
        for mark, pattern in _SPACED.items():
            if match := pattern.fullmatch(text):
                return [f"thousands {mark}", *([f"decimal {match[2][0]}"] if match[2] else [])]
        for mark in (",", "."):
            if _BOTH[mark].fullmatch(text) or _MANY[mark].fullmatch(text):
                return [f"thousands {mark}", f"decimal {_OTHER[mark]}"]
            if _GROUPED[mark].fullmatch(text):
                return [f"either {mark}"]
    return [f"decimal {mark}" for mark in (",", ".") if _DECIMAL[mark].fullmatch(text)]
