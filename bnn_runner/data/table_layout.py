"""Where the table is within a file: separator, comments, titles, header, units, row names and footnotes.

Each step takes rows of cells with their line numbers, and returns what is left with a note on what it found.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bnn_runner.data.table_numbers import MISSING, looks_numeric
from bnn_runner.errors import UserError

SEPARATORS = ("\t", ";", "|", ",")
"""In the order of preference where several split the lines equally well."""
SAMPLE = 60
"""Lines at which the separator is detected."""
_BLANKS = re.compile(r'"((?:[^"]|"")*)"|(\S+)')
_SEP = re.compile(r'"?sep=(\\t|.)"?\s*', re.IGNORECASE)


@dataclass
class Rows:
    """Rows of cells without outer spaces, and the line number of each, counted from 1."""

    cells: list[tuple[str, ...]]
    lines: list[int]

    def without(self, drop: Sequence[int]) -> Rows:
        """The rows but those at the indices `drop`."""
        gone = set(drop)
        kept = [i for i in range(len(self.cells)) if i not in gone]
        return Rows([self.cells[i] for i in kept], [self.lines[i] for i in kept])

    @property
    def width(self) -> int:
        """The most frequent number of cells."""
        return Counter(map(len, self.cells)).most_common(1)[0][0] if self.cells else 0


def places(lines: Sequence[int], word: str = "line") -> str:
    """Line numbers for a message.

    >>> places([3]), places([3, 4, 5]), places([3, 9])
    ('line 3', 'lines 3 to 5', 'lines 3 and 9')
    """
    if len(lines) == 1:
        return f"{word} {lines[0]}"
    if lines[-1] - lines[0] == len(lines) - 1 and len(lines) > 2:
        return f"{word}s {lines[0]} to {lines[-1]}"
    shown = list(map(str, lines[:5]))
    if len(lines) > 5:
        return f"{word}s {', '.join(shown)} and {len(lines) - 5} more"
    return f"{word}s {', '.join(shown[:-1])} and {shown[-1]}"


# ------------------------------------------------------------------------------------ from text to rows


def stated_separator(lines: list[str]) -> str | None:
    """The separator that a first line `sep=;` states, as spreadsheets write it; the line is then blanked."""
    match = _SEP.fullmatch(lines[0]) if lines else None
    if match is None:
        return None
    lines[0] = ""
    return "\t" if match[1] == "\\t" else match[1]


def skip(lines: list[str], rows: int | Sequence[int] | None) -> None:
    """Blanks the first `rows` lines, or those with the given numbers."""
    chosen = range(1, rows + 1) if isinstance(rows, int) else rows or ()
    for number in chosen:
        if 1 <= number <= len(lines):
            lines[number - 1] = ""


def skip_comments(lines: list[str], mark: str | None) -> tuple[list[int], str]:
    """Blanks the lines that begin with `mark` (None: with # or %, if these are fewer than half of all).

    Returns:
        Their numbers, and the text of the last one before the table without its mark: it may be the header.
    """
    full = [i for i, line in enumerate(lines) if line.strip()]
    found: list[int] = []
    for start in (mark,) if mark else ("#", "%"):
        found = [i for i in full if lines[i].lstrip().startswith(start) and not _is_code(lines[i])]
        if mark or 0 < 2 * len(found) < len(full):
            break
        found = []
    first = next((i for i in full if i not in set(found)), -1)
    before = [i for i in found if i < first]
    header = lines[before[-1]].lstrip() if before else ""
    for i in found:
        lines[i] = ""
    stripped = header[len(mark or "#") :].strip()
    return [i + 1 for i in found], ("#" + stripped if stripped[:1] in (",", ";", "\t", "|") else stripped)


def _is_code(line: str) -> bool:
    """Whether a line begins with a missing value as spreadsheets write it, such as #DIV/0!."""
    return re.split(r"[,;\t| ]", line.strip())[0].strip('"').lower() in MISSING


def find_separator(lines: Sequence[str]) -> str:
    """The separator that splits most lines into equally many cells, most of them numbers; a space for white space."""
    sample = [line for line in lines if line.strip()][:SAMPLE]
    scores: dict[str, tuple[bool, float, int]] = {}
    for separator in (*SEPARATORS, " "):
        try:
            rows = [split_line(line, separator) for line in sample]
        except csv.Error:
            continue
        rows = [[cell.strip() for cell in row] for row in rows]
        width, count = Counter(map(len, rows)).most_common(1)[0] if rows else (1, 0)
        regular = [row for row in rows if len(row) == width]
        cells = [cell for row in regular[1:] or regular for cell in row]
        numeric = sum(looks_numeric(cell) for cell in cells) / max(len(cells), 1)
        if width < 2 or (separator == " " and (numeric < 0.5 or count < len(rows) - 1)):
            continue
        scores[separator] = (count * 10 >= 7 * len(rows), round(numeric, 1), 0 if separator == " " else 1)
    if not scores:
        return next((s for s in SEPARATORS if any(s in line for line in sample)), ",")
    return max(scores, key=lambda s: scores[s])


def split_line(line: str, separator: str) -> list[str]:
    """The cells of one line; quotes are removed."""
    if separator == " ":
        return [m[2] if m[1] is None else m[1].replace('""', '"') for m in _BLANKS.finditer(line)]
    return next(csv.reader([line], delimiter=separator, skipinitialspace=separator != "\t"), [])


def split_text(path: Path, lines: Sequence[str], separator: str) -> Rows:
    """Rows of cells; empty rows are left out. Raises `UserError` for a quote that is not closed."""
    cells: list[tuple[str, ...]] = []
    numbers: list[int] = []
    if separator == " ":
        for number, line in enumerate(lines, 1):
            if line.strip():
                cells.append(tuple(cell.strip() for cell in split_line(line, separator)))
                numbers.append(number)
        return Rows(cells, numbers)
    reader = csv.reader(
        io.StringIO("\n".join(lines) + "\n", newline=""), delimiter=separator, skipinitialspace=separator != "\t"
    )
    end = 0
    try:
        for row in reader:
            begin, end = end + 1, min(reader.line_num, len(lines))
            if end > begin:
                _check_quotes(path, lines, begin, end, separator, len(row))
            stripped = tuple([cell.strip() for cell in row])
            if any(stripped):
                cells.append(stripped)
                numbers.append(begin)
    except csv.Error as error:
        raise UserError(
            f"{path}, line {end + 1}: {error}. Probably a quote in this line is not closed. Close or remove it."
        ) from None
    return Rows(cells, numbers)


def _check_quotes(path: Path, lines: Sequence[str], begin: int, end: int, separator: str, width: int) -> None:
    """Raises `UserError` if a quoted cell swallowed rows: its quote is not closed, or closed by that of another row."""
    between = lines[begin : end - 1]
    open_end = "".join(lines[begin - 1 : end]).count('"') % 2
    if open_end or any(line.count(separator) >= max(width - 1, 1) for line in between):
        raise UserError(
            f"{path}, line {begin}: a quoted cell reaches to line {end}. Probably a quote in line {begin} is not "
            "closed. Close or remove it."
        )


# --------------------------------------------------------------------------------- rows that are no points


def skip_titles(rows: Rows) -> tuple[Rows, list[int]]:
    """The rows without leading titles: text in the first cell alone, or in few cells above a header.

    Returns:
        The rows, and the lines of the titles.
    """
    if not rows.cells:
        return rows, []
    width, count, short = rows.width, 0, False
    for row in rows.cells[:-1]:
        full = [cell for cell in row if cell]
        single = len(full) == 1 and bool(row[0])
        few = 2 * len(full) < width and len(row) != width
        if width < 2 or not (single or few) or any(map(looks_numeric, full[:1])):
            break
        count, short = count + 1, short or not single
    below = rows.cells[count]
    if short and (len(below) != width or any(map(looks_numeric, below))):
        return rows, []
    return rows.without(range(count)), rows.lines[:count]


def skip_footnotes(rows: Rows, header: Sequence[str] | None) -> tuple[Rows, list[int]]:
    """The rows without closing ones that have text in the first cell alone, and without repeats of the header."""
    width, drop = rows.width, list[int]()
    for i in range(len(rows.cells) - 1, 0, -1):
        row = rows.cells[i]
        full = [cell for cell in row if cell]
        if len(full) != 1 or not row[0] or looks_numeric(row[0]) or (len(row) == width and width < 3) or width < 2:
            break
        drop.append(i)
    if header is not None and any(header):
        drop += [i for i, row in enumerate(rows.cells) if row == tuple(header)]
    return rows.without(drop), sorted(rows.lines[i] for i in set(drop))


def skip_units(rows: Rows) -> tuple[Rows, tuple[str, ...] | None]:
    """The rows without a first one that has texts where all others have numbers: units."""
    width = rows.width
    if len(rows.cells) < 3 or len(rows.cells[0]) != width:
        return rows, None
    first, below = rows.cells[0], [row for row in rows.cells[1:SAMPLE] if len(row) == width]
    numeric = [i for i in range(width) if below and _numeric_share([row[i] for row in below]) == 1]
    texts = [i for i in numeric if first[i] and not looks_numeric(first[i]) and first[i].lower() not in MISSING]
    numbers = [i for i in numeric if looks_numeric(first[i])]
    if numbers or not texts or 2 * len(texts) < len(numeric) or len(numeric) < 2:
        return rows, None
    return rows.without([0]), first


# -------------------------------------------------------------------------------------------------- header


def has_header(rows: Rows) -> bool:
    """Whether the first row names the columns, from what the rows below it hold.

    - Text over a column of numbers is a name, unless the row has numbers that no header would have (5.1).
    - All cells are numbers, or text over text: the row is a header if its numbers count (0, 1, 2, 3; years), and its
      texts do not occur again in their columns.
    """
    first = rows.cells[0]
    below = [row for row in rows.cells[1:200] if len(row) == len(first)]
    if not below:
        return not any(map(looks_numeric, first))
    missing = [not cell or cell.lower() in MISSING for cell in first]
    numbers = [i for i, cell in enumerate(first) if looks_numeric(cell)]
    texts = [i for i in range(len(first)) if i not in numbers and not missing[i]]
    columns = [[row[i] for row in below] for i in range(len(first))]
    over_numbers = [i for i in texts if _numeric_share(columns[i]) > 0.9]
    again = [i for i in texts if first[i] in columns[i]]
    if not numbers:
        return bool(over_numbers) or (bool(texts) and not again)
    regular = _is_sequence([first[i] for i in numbers]) and not _is_sequence([below[0][i] for i in numbers])
    if over_numbers:
        whole = all(first[i].isdigit() and first[i] not in columns[i] for i in numbers)
        return regular or (whole and len(over_numbers) >= len(numbers))
    if texts:
        return regular and not again
    if not first[0] and _counts([row[0] for row in below]):  # the index of a data frame, whose columns are numbered
        return regular or numbers == [1]
    fractions = any("." in cell or "," in cell for i in numbers for cell in columns[i])
    return regular and len(numbers) >= 3 and (fractions or len(numbers) >= 4)


def _is_sequence(texts: Sequence[str]) -> bool:
    """Whether numbers name columns: they count from 0 or 1, or at least three grow by equal steps."""
    try:
        values = [float(text) for text in texts]
    except ValueError:
        return False
    if values in ([float(i) for i in range(len(values))], [float(i) for i in range(1, len(values) + 1)]):
        return all(text.isdigit() for text in texts)
    steps = [b - a for a, b in pairwise(values)]
    return len(values) >= 3 and steps[0] > 0 and all(abs(step - steps[0]) <= 1e-6 * abs(steps[0]) for step in steps)


def _counts(cells: Sequence[str]) -> bool:
    """Whether cells are whole numbers that grow by one."""
    try:
        values = [int(cell) for cell in cells]
    except ValueError:
        return False
    return all(b - a == 1 for a, b in pairwise(values))


def _numeric_share(cells: Sequence[str]) -> float:
    full = [cell for cell in cells if cell and cell.lower() not in MISSING]
    return sum(map(looks_numeric, full)) / len(full) if full else 0.0
