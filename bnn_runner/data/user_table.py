"""Your own table: regression with one or several targets, or classification.

Cells are treated as follows, and the run's notes list every treatment. Numbers are inputs, standardised on the
training part. A text column (up to 20 different values) becomes one input per value. Missing cells (empty, "?", NA,
NaN, null; `missing_codes` sets others) are an error, remove their row, or are filled with the mean of the training
part, as `missing` says; a missing target is never filled. Columns that number or name the rows are left out, unless
`keep` or `columns` has them. Labels are numbered from 0. Dates, and text among numbers, are errors that name line and
column.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.data.holdout_fraction import fraction_problems, halves_of
from bnn_runner.data.splits import Sizes
from bnn_runner.data.table_file import TableFormat, TextTable, read_table
from bnn_runner.data.table_numbers import mark_of
from bnn_runner.data.tables import Scaling, table_task
from bnn_runner.data.typed import typed
from bnn_runner.data.user_checks import columns_to_check, is_constant, row_labels
from bnn_runner.data.user_columns import Column, Unread, codes_in, expand, missing_cells, place, read_column
from bnn_runner.data.user_splits import (
    NEED_PATH,
    check_classes,
    class_problems,
    looks_like_classes,
    map_note,
    numbered,
    seeded_parts,
    with_content,
)
from bnn_runner.errors import UserError, raise_all
from bnn_runner.tasks import Kind, TableReading, Task, TaskSpec

Name = str | int | float
LARGEST_TARGET = 1e37
"""Targets are standardised in float32, which ends at 3.4e38."""


@dataclass(frozen=True)
class _Read:
    """The table as numbers: inputs [N, D] (indices of text), targets [N, K] or [N], and notes on its treatment."""

    kind: Kind
    columns: tuple[Column, ...]
    inputs: Tensor
    targets: Tensor
    target_names: tuple[str, ...]
    class_names: tuple[str, ...]
    notes: tuple[str, ...]
    reading: TableReading

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)


@dataclass(frozen=True)
class TableEncoder:
    """Original inputs [M, D] of a table (indices of text, NaN for a missing cell) to the inputs of the network.

    Attributes:
        widths: number of inputs of each column.
        texts: whether each column is text.
        scaling: of the inputs.
        fill: means of the training part for missing cells [width]; None leaves them missing.
    """

    widths: tuple[int, ...]
    texts: tuple[bool, ...]
    scaling: Scaling | None = None
    fill: Tensor | None = None

    def wide(self, values: Tensor) -> Tensor:
        """The numbers [M, width] before scaling."""
        wide = expand(values.double(), self.widths, self.texts)
        return wide if self.fill is None else torch.where(wide.isnan(), self.fill.to(wide), wide)

    def __call__(self, values: Tensor) -> Tensor:
        assert self.scaling is not None
        return self.scaling(self.wide(values))


@dataclass(frozen=True, kw_only=True)
class OwnTable:
    """Rows of a file; `test_fraction` of them, drawn by the seed (stratified for classes), is the test set.

    `target` and the entries of `columns`, `drop` and `keep` are names, or positions counted from 1. `header`,
    `decimal`, `thousands`, `encoding`, `skip_rows`, `comment` and `missing_codes` are those of `TableFormat`.
    """

    path: Path | None
    target: Name | tuple[Name, ...] | None
    task: Literal["auto", "regression", "classification"]
    columns: tuple[Name, ...] | None
    drop: tuple[Name, ...]
    missing: Literal["error", "drop", "mean"]
    test_fraction: float
    val_fraction: float
    train_size: int | None
    test_size: int | None
    keep: tuple[Name, ...]
    header: Literal["auto"] | bool
    decimal: str
    thousands: str
    encoding: str | None
    skip_rows: int | tuple[int, ...] | None
    comment: str | None
    missing_codes: tuple[str | float, ...] | None

    def spec(self) -> TaskSpec:
        """What the file contains (it is read for that). Raises `UserError` for invalid values or cells."""
        return self._spec(self._read())

    def _spec(self, read: _Read) -> TaskSpec:
        problems = fraction_problems(self.test_fraction)
        known = (0, 0) if problems else halves_of(len(read.inputs), self.test_fraction)
        raise_all(problems + self._sizes.problems(*known))
        outputs = len(read.class_names) or read.targets.shape[1]
        return TaskSpec("csv", read.kind, (read.width,), outputs, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    @property
    def _format(self) -> TableFormat:
        mark_of(self.decimal, "data.decimal", (",", "."))
        mark_of(self.thousands, "data.thousands", (",", ".", " ", "'", ""))
        skip = self.skip_rows
        if isinstance(skip, bool) or any(n < 0 for n in ((skip,) if isinstance(skip, int) else skip or ())):
            raise UserError(f"data.skip_rows must be a number of lines, or a list of line numbers; got {skip}.")
        comment = None if self.comment in ("auto", "") else self.comment
        encoding = None if self.encoding == "auto" else self.encoding
        return TableFormat(self.header, self.decimal, self.thousands, encoding, skip, comment, self.missing_codes)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the file; `data_dir` is not used. Raises `UserError` as `spec` does, and for a single training class."""
        read = self._read()
        spec, path = self._spec(read), self.path
        assert path is not None
        labels = read.targets if read.kind == "classification" else None
        parts = seeded_parts(len(read.inputs), labels, self.test_fraction, self._sizes, seed)
        notes = read.notes
        if labels is not None:
            notes += check_classes(labels, parts, read.class_names)
        encoder = TableEncoder(tuple(c.width for c in read.columns), tuple(bool(c.categories) for c in read.columns))
        fill = encoder.wide(read.inputs)[parts.train].nanmean(0)
        empty = fill.isnan().nonzero().flatten().tolist()
        names = tuple(f"{c.name}={t}" if t else c.name for c in read.columns for t in c.categories or ("",))
        owners = tuple(c.name for c in read.columns for _ in range(c.width))
        if empty:
            drop = typed("data.drop", [*self.drop, *dict.fromkeys(owners[i] for i in empty)])
            raise UserError(
                f"{path}, column {names[empty[0]]}: data.missing=mean requires a value in at least one training point. "
                f"Leave the column out with {drop}."
            )
        if self.missing == "mean":
            encoder = replace(encoder, fill=fill)
        task = table_task(
            spec,
            encoder.wide(read.inputs),
            read.targets,
            parts,
            class_names=read.class_names,
            notes=notes,
            feature_names=tuple(c.name for c in read.columns),
            target_names=read.target_names,
            input_names=names,
            known_constant=tuple(c.name for c in read.columns if is_constant(c)),
        )
        assert isinstance(task.encode, Scaling)
        task = replace(
            task,
            feature_categories={c.name: c.categories for c in read.columns if c.categories},
            encode=replace(encoder, scaling=task.encode),
            reading=read.reading,
        )
        return with_content(task, path)

    def _read(self) -> _Read:
        if self.path is None:
            raise UserError(NEED_PATH.format(choice="csv", example="mine.csv data.target=price"))
        try:
            stat = self.path.stat()
        except OSError as error:
            raise UserError(
                f"Could not read data.path={self.path}: {error.strerror}. Give the file of a table."
            ) from None
        table = _table(self.path, stat.st_mtime_ns, stat.st_size, self._format)
        targets, inputs, ids, left_out, notes = self._select_columns(table)
        table = table.with_marks([*targets, *inputs], self._format)
        notes.insert(0, _as_read(table, [*inputs, *targets]))
        table, dropped = self._without_missing(table, inputs, targets)
        notes += dropped
        kind, values, names, target_notes = self._targets(table, targets)
        notes += target_notes
        unread = Unread()
        columns = [column for index in inputs if (column := read_column(table, index, unread)) is not None]
        all_names = table.names
        unread.raise_any(table, [all_names[place(all_names, n, "data.drop", self.path)] for n in self.drop])
        if odd := [*filter(None, [left_out]), *columns_to_check(table, columns)]:
            notes.append(f"check these columns: {'; '.join(odd)}")
        notes += [
            f"column {c.name} is text: one input for each of {', '.join(c.categories)} "
            f"({typed('data.drop', [*self.drop, c.name])} leaves it out)"
            for c in columns
            if c.categories
        ]
        target_names = tuple(all_names[i] for i in targets) if kind == "regression" else ()
        stacked = torch.stack([c.values for c in columns], 1)
        reading = TableReading(
            tuple(all_names[i] for i in ids), table.numbers.decimal, table.numbers.thousands, self.missing_codes
        )
        return _Read(kind, tuple(columns), stacked, values, target_names, names, tuple(filter(None, notes)), reading)

    def _select_columns(self, table: TextTable) -> tuple[list[int], list[int], list[int], str, list[str]]:
        """Indices of targets, of inputs and of columns that name the rows; what is left out; notes on other choices."""
        names, notes = table.names, []
        left_out = ""
        labels = row_labels(table, range(len(names)))
        wanted = self.target if isinstance(self.target, (list, tuple)) else [self.target]
        if self.target is None:
            last = next((i for i in reversed(range(len(names))) if i not in labels.reasons), len(names) - 1)
            wanted = [names[last]]
            notes.append(f"target: the last column, {names[last]} ({typed('data.target', 'NAME')} selects another)")
        targets = [place(names, name, "data.target", self.path) for name in wanted if name is not None]
        dropped = [place(names, name, "data.drop", self.path) for name in self.drop]
        kept = [place(names, name, "data.keep", self.path) for name in self.keep]
        others = [i for i in range(len(names)) if i not in targets and i not in dropped]
        if self.columns is not None:
            inputs = [place(names, name, "data.columns", self.path) for name in self.columns]
            if both := [names[i] for i in inputs if i in targets]:
                raise UserError(
                    f"data.columns must not contain the target {both[0]}. Remove it, or change data.target."
                )
        else:
            inputs = [i for i in others if i not in labels.reasons or i in kept]
            if not inputs and (counts := [i for i in others if labels.reasons[i] == "counts the rows"]):
                inputs = counts[:1]
                notes.append(f"input: {names[inputs[0]]}, although it counts the rows, as there is no other column")
            left_out = labels.note(table, [*targets, *inputs, *dropped])
        inputs = [i for i in dict.fromkeys(inputs) if i not in dropped]
        if not inputs or not targets:
            raise UserError(
                f"{self.path} must have {'an input' if targets else 'a target'} left. See data.columns and data.drop."
            )
        ids = [i for i in labels.reasons if i not in inputs and i not in targets and any(table.column(i))]
        return list(dict.fromkeys(targets)), inputs, ids, left_out, notes

    def _without_missing(self, table: TextTable, inputs: list[int], targets: list[int]) -> tuple[TextTable, list[str]]:
        """The table without the rows that `missing` drops. Raises `UserError` for missing=error."""
        found = missing_cells(table, inputs + targets)
        if not found:
            return table, []
        codes = Counter(table.rows[r][c] for r, c in found if table.rows[r][c])
        kept_codes = [code for code in codes if code.lower() not in ("none", "null")]
        words = [code for code in codes if code not in kept_codes]
        as_text = ""
        if words:
            shown = ", ".join(f"{word!r} ({codes[word]} cells)" for word in words)
            as_text = f" {typed('data.missing_codes', kept_codes)} reads {shown} as text."
        if self.missing == "error":
            raise UserError(
                f"{self.path} has {len(found)} missing values: {_by_column(table, found)}. Fill them in, or use "
                "data.missing=drop (without these rows) or data.missing=mean (filled with the mean of the training "
                f"part).{as_text}"
            )
        removed = {r for r, c in found if self.missing == "drop" or c in targets}
        notes = [f"{len(removed)} of {len(table.rows)} rows left out: a value is missing"] if removed else []
        filled = sum(r not in removed for r, _ in found)
        if filled:
            notes.append(f"{filled} missing cells filled with the mean of the training part")
        if as_text:
            notes[-1] += f".{as_text}"
        kept = [r for r in range(len(table.rows)) if r not in removed]
        if len(kept) < 2:
            raise UserError(
                f"{self.path} must have at least 2 rows without a missing value; got {len(kept)}: "
                f"{_by_column(table, found)}.{as_text} Leave columns with many missing values out (data.drop), or use "
                "data.missing=mean."
            )
        rows, lines = tuple(table.rows[r] for r in kept), tuple(table.lines[r] for r in kept)
        return replace(table, rows=rows, lines=lines), notes

    def _targets(self, table: TextTable, targets: list[int]) -> tuple[Kind, Tensor, tuple[str, ...], list[str]]:
        """Kind, targets [N, K] or labels [N], class names, and notes. Raises `UserError` for invalid cells."""
        names = table.names
        cells = list(zip(*(table.numbers.values(table.column(i)) for i in targets), strict=True))
        texts = [(r, k) for r, row in enumerate(cells) for k, value in enumerate(row) if value is None]
        if len(targets) > 1 and self.task == "classification":
            raise UserError("data.task=classification requires a single target. Name one column in data.target.")
        kind: Kind = "regression"
        guessed = self.task == "auto" and len(targets) == 1 and looks_like_classes([row[0] for row in cells])
        if self.task == "classification" or guessed:
            kind = "classification"
        where = f"{self.path}, column {names[targets[0]]}"
        if kind == "classification":
            # Text among numbers makes all labels text: "1" and "1.0" are then different labels.
            raw: list[str | float] = [
                row[targets[0]] if texts else float(value or 0)
                for row, (value, *_) in zip(table.rows, cells, strict=True)
            ]
            labels, class_names = numbered(raw)
            raise_all(class_problems(class_names, where, len(raw)))
            notes = list(map_note(class_names))
            if self.task == "auto":
                notes.insert(
                    0,
                    f"target {names[targets[0]]} is read as {len(class_names)} classes (data.task=regression "
                    "reads it as a number)",
                )
            return kind, labels, class_names, notes
        if texts:
            row, k = texts[0]
            cell = table.rows[row][targets[k]]
            many = f" ({len(texts)} cells are not)" if len(texts) > 1 else ""
            raise UserError(
                f"{self.path}, {table.word} {table.lines[row]}, column {names[targets[k]]}: the target must be a "
                f"number; got {cell!r}{many}. Correct it, or use data.task=classification if it is a label."
            )
        values = torch.tensor(cells, dtype=torch.float64)
        if float(values.abs().max()) > LARGEST_TARGET:
            row, k = divmod(int(values.abs().argmax()), len(targets))
            code = typed("data.missing_codes", [*codes_in(table), float(values[row, k])])
            raise UserError(
                f"{self.path}, {table.word} {table.lines[row]}, column {names[targets[k]]}: the target must be below "
                f"{LARGEST_TARGET:g}; got {float(values[row, k]):g}. Correct it, or read it as missing: {code} "
                "data.missing=drop."
            )
        notes = []
        if self.task == "auto":
            notes = [
                f"target {', '.join(names[i] for i in targets)} is read as a number (data.task=classification "
                "reads it as labels)"
            ]
        return kind, values, (), notes


def _as_read(table: TextTable, columns: list[int]) -> str:
    """What was guessed about the file, and its first row."""
    return f"{table.path.name}: {'; '.join(table.notes)}; {table.shown_first_row(columns)}"


def _by_column(table: TextTable, found: list[tuple[int, int]]) -> str:
    """Missing cells by column, with the first line of each."""
    by_column: dict[int, list[int]] = {}
    for row, column in found:
        by_column.setdefault(column, []).append(row)
    shown = []
    for column, rows in list(by_column.items())[:8]:
        count = f"{len(rows)} cells, the first in " if len(rows) > 1 else ""
        texts = Counter(table.rows[r][column] for r in rows if table.rows[r][column])
        written = f" ({', '.join(map(repr, list(texts)[:5]))})" if texts else ""
        shown.append(f"{count}{table.word} {table.lines[rows[0]]}, column {table.names[column]}{written}")
    more = f"; and {len(by_column) - 8} more columns" if len(by_column) > 8 else ""
    return "; ".join(shown) + more


@lru_cache(maxsize=1)
def _table(path: Path, modified: int, size: int, wanted: TableFormat) -> TextTable:
    """The parsed file; cached, since both `spec` and `load` need it."""
    return read_table(path, wanted)
