"""Your own table: regression with one or several targets, or classification.

Cells are treated as follows, and the run's notes list every treatment. Numbers are inputs, standardised on the
training part. A text column (up to 20 different values) becomes one input per value. Missing cells (empty, "?", NA,
NaN, null) are an error, remove their row, or are filled with the mean of the training part, as `missing` says; a
missing target is never filled. Labels are numbered from 0. Dates, and text among numbers, are errors that name line
and column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.data.holdout_fraction import fraction_problems, halves_of
from bnn_runner.data.splits import Sizes
from bnn_runner.data.table_file import TextTable, read_table
from bnn_runner.data.tables import table_task
from bnn_runner.data.user_columns import (
    Column,
    column_names,
    expand,
    is_row_number,
    missing_cells,
    place,
    read_column,
)
from bnn_runner.data.user_splits import (
    NEED_PATH,
    check_classes,
    class_problems,
    map_note,
    numbered,
    seeded_parts,
    with_content,
)
from bnn_runner.errors import UserError, raise_all
from bnn_runner.tasks import Kind, Task, TaskSpec

Name = str | int
FEW_LABELS = 10
"""Whole numbers with at most this many different values, each five times on average, are read as classes."""


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

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)

    def expand(self, values: Tensor) -> Tensor:
        """Original inputs [M, D] as numbers [M, width], before scaling."""
        return expand(values, [c.width for c in self.columns], [bool(c.categories) for c in self.columns])


@dataclass(frozen=True, kw_only=True)
class OwnTable:
    """Rows of a text file; `test_fraction` of them, drawn by the seed (stratified for classes), is the test set.

    `target` and the entries of `columns` and `drop` are names, or positions counted from 1.
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

    def spec(self) -> TaskSpec:
        """What the file contains (it is read for that). Raises `UserError` for invalid values or cells."""
        return self._spec(self._read())

    def _spec(self, read: _Read | None) -> TaskSpec:
        problems = fraction_problems(self.test_fraction)
        known = (0, 0) if problems or read is None else halves_of(len(read.inputs), self.test_fraction)
        raise_all(problems + self._sizes.problems(*known))
        assert read is not None
        outputs = len(read.class_names) or read.targets.shape[1]
        return TaskSpec("csv", read.kind, (read.width,), outputs, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

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
        wide = read.expand(read.inputs)
        fill = wide[parts.train].nanmean(0)
        empty = fill.isnan().nonzero().flatten().tolist()
        names = tuple(f"{c.name}={t}" if t else c.name for c in read.columns for t in c.categories or ("",))
        if empty:
            raise UserError(
                f"{path}, column {names[empty[0]]}: data.missing=mean requires a value in at least one training point. "
                f"Leave the column out with data.drop=[{names[empty[0]]}]."
            )

        def filled(values: Tensor) -> Tensor:
            return torch.where(values.isnan(), fill.to(values), values) if self.missing == "mean" else values

        task = table_task(
            spec,
            filled(wide),
            read.targets,
            parts,
            class_names=read.class_names,
            notes=notes,
            feature_names=tuple(c.name for c in read.columns),
            target_names=read.target_names,
            input_names=names,
        )
        scale = task.encode
        assert scale is not None
        task = replace(
            task,
            feature_categories={c.name: c.categories for c in read.columns if c.categories},
            encode=lambda values: scale(filled(read.expand(values))),
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
        table = _table(self.path, stat.st_mtime_ns, stat.st_size)
        targets, inputs, notes = self._select_columns(table)
        table, dropped = self._without_missing(table, inputs, targets)
        notes += dropped
        kind, values, names, target_notes = self._targets(table, targets)
        notes += target_notes
        columns, problems = [], []
        for index in inputs:
            column, found = read_column(table, index)
            problems += found
            columns += [column] if column is not None else []
        raise_all(problems)
        notes += [
            f"column {c.name} is text: one input for each of {', '.join(c.categories)} (data.drop=[{c.name}] "
            "leaves it out)"
            for c in columns
            if c.categories
        ]
        target_names = tuple(column_names(table)[i] for i in targets) if kind == "regression" else ()
        stacked = torch.stack([c.values for c in columns], 1)
        return _Read(kind, tuple(columns), stacked, values, target_names, names, tuple(notes))

    def _select_columns(self, table: TextTable) -> tuple[list[int], list[int], list[str]]:
        """Indices of targets and of inputs, and notes on automatic choices."""
        names, notes = column_names(table), []
        wanted = self.target if isinstance(self.target, (list, tuple)) else [self.target]
        if self.target is None:
            wanted = [names[-1]]
            notes.append(f"target: the last column, {names[-1]} (data.target=NAME selects another)")
        targets = [place(names, name, "data.target", self.path) for name in wanted if name is not None]
        dropped = [place(names, name, "data.drop", self.path) for name in self.drop]
        if self.columns is not None:
            inputs = [place(names, name, "data.columns", self.path) for name in self.columns]
            if both := [names[i] for i in inputs if i in targets]:
                raise UserError(
                    f"data.columns must not contain the target {both[0]}. Remove it, or change data.target."
                )
        else:
            inputs = [i for i in range(len(names)) if i not in targets]
            counting = [i for i in inputs if is_row_number(table, i)]
            notes += [f"{names[i]} has no name and numbers the rows: left out" for i in counting]
            inputs = [i for i in inputs if i not in counting]
        inputs = [i for i in dict.fromkeys(inputs) if i not in dropped]
        if not inputs or not targets:
            raise UserError(
                f"{self.path} must have {'an input' if targets else 'a target'} left. See data.columns and data.drop."
            )
        return list(dict.fromkeys(targets)), inputs, notes

    def _without_missing(self, table: TextTable, inputs: list[int], targets: list[int]) -> tuple[TextTable, list[str]]:
        """The table without the rows that `missing` drops. Raises `UserError` for missing=error."""
        found = missing_cells(table, inputs + targets)
        if not found:
            return table, []
        names = column_names(table)
        if self.missing == "error":
            shown = "; ".join(f"line {table.lines[r]}, column {names[c]}" for r, c in found[:5])
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UserError(
                f"{self.path} has missing values: {shown}{more}. Fill them in, or use data.missing=drop (without "
                "these rows) or data.missing=mean (filled with the mean of the training part)."
            )
        removed = {r for r, c in found if self.missing == "drop" or c in targets}
        notes = [f"{len(removed)} of {len(table.rows)} rows left out: a value is missing"] if removed else []
        filled = sum(r not in removed for r, _ in found)
        if filled:
            notes.append(f"{filled} missing cells filled with the mean of the training part")
        kept = [r for r in range(len(table.rows)) if r not in removed]
        if len(kept) < 2:
            raise UserError(f"{self.path} must have at least 2 rows without a missing value; got {len(kept)}.")
        rows, lines = tuple(table.rows[r] for r in kept), tuple(table.lines[r] for r in kept)
        return replace(table, rows=rows, lines=lines), notes

    def _targets(self, table: TextTable, targets: list[int]) -> tuple[Kind, Tensor, tuple[str, ...], list[str]]:
        """Kind, targets [N, K] or labels [N], class names, and notes. Raises `UserError` for invalid cells."""
        names = column_names(table)
        cells = [[table.number(row[i]) for i in targets] for row in table.rows]
        texts = [(r, k) for r, row in enumerate(cells) for k, value in enumerate(row) if value is None]
        if len(targets) > 1 and self.task == "classification":
            raise UserError("data.task=classification requires a single target. Name one column in data.target.")
        kind: Kind = "regression"
        if self.task == "classification" or (self.task == "auto" and self._looks_like_classes(cells)):
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
            raise UserError(
                f"{self.path}, line {table.lines[row]}, column {names[targets[k]]}: the target must be a number; got "
                f"{cell!r}. Correct it, or use data.task=classification if it is a label."
            )
        values = torch.tensor(cells, dtype=torch.float64)
        notes = []
        if self.task == "auto":
            notes = [
                f"target {', '.join(names[i] for i in targets)} is read as a number (data.task=classification "
                "reads it as labels)"
            ]
        return kind, values, (), notes

    def _looks_like_classes(self, cells: list[list[float | None]]) -> bool:
        """Only text, or whole numbers with few different values; never several targets."""
        if len(cells[0]) > 1:
            return False
        values = [row[0] for row in cells]
        if all(value is None for value in values):
            return True
        if any(value is None or not value.is_integer() for value in values):
            return False
        different = len(set(values))
        return different <= FEW_LABELS and len(values) >= 5 * different


@lru_cache(maxsize=1)
def _table(path: Path, modified: int, size: int) -> TextTable:
    """The parsed file; cached, since both `spec` and `load` need it."""
    return read_table(path)
