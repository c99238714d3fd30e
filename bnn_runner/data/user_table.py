"""A user's own table: regression with one or several targets, or classification.

Cells are treated as follows, and every treatment is said in the run's notes. Numbers are inputs,
standardised on the training part. A column of texts (up to 20 different ones) becomes one input for
each text. Missing cells (empty, "?", NA, NaN, null) are an error, or drop their rows, or are filled
by the training part's mean, as `missing` says; a row without a target is never filled. Labels are
numbered from 0. Dates, and texts among numbers, are errors that name line and column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.data.splits import Sizes
from bnn_runner.data.table_file import TextTable, read_table
from bnn_runner.data.tables import table_task
from bnn_runner.data.test_fraction import fraction_problems, halves_of
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
"""Whole numbers of at most so many different values, each five times on average, are taken for classes."""


@dataclass(frozen=True)
class _Read:
    """The table as numbers: inputs [N, D] (places of texts), targets [N, K] or [N], and what was done to it."""

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
        """Original inputs [M, D] as the numbers [M, width] that are scaled."""
        return expand(values, [c.width for c in self.columns], [bool(c.categories) for c in self.columns])


@dataclass(frozen=True, kw_only=True)
class OwnTable:
    """Rows of a text file; `test_fraction` of them, chosen by the seed (stratified for classes), is the test set.

    `target` and the entries of `columns` and `drop` are names, or places counted from 1.
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
        """What the file holds (it is read for that). Raises `UserError` for values or cells that cannot be."""
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
        """Read the file; `data_dir` is not used. Raises `UserError` as `spec` does, and for parts of one class."""
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
                f"{path}, column {names[empty[0]]}: no training point has a value, so there is no mean to fill in. "
                f"Leave the column out with data.drop=[{names[empty[0]]}]."
            )

        def filled(values: Tensor) -> Tensor:
            return torch.where(values.isnan(), fill.to(values), values) if self.missing == "mean" else values

        made = table_task(
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
        scale = made.encode
        assert scale is not None
        made = replace(
            made,
            feature_categories={c.name: c.categories for c in read.columns if c.categories},
            encode=lambda values: scale(filled(read.expand(values))),
        )
        return with_content(made, path)

    def _read(self) -> _Read:
        if self.path is None:
            raise UserError(NEED_PATH.format(choice="csv", example="mine.csv data.target=price"))
        try:
            stat = self.path.stat()
        except OSError as error:
            raise UserError(
                f"data.path={self.path} cannot be read ({error.strerror}). Give the file of a table."
            ) from None
        table = _table(self.path, stat.st_mtime_ns, stat.st_size)
        targets, inputs, notes = self._choose(table)
        table, dropped = self._without_missing(table, inputs, targets)
        notes += dropped
        kind, values, names, said = self._targets(table, targets)
        notes += said
        columns, problems = [], []
        for index in inputs:
            column, found = read_column(table, index)
            problems += found
            columns += [column] if column is not None else []
        raise_all(problems)
        notes += [
            f"column {c.name} holds texts: one input for each of {', '.join(c.categories)} (data.drop=[{c.name}] "
            "leaves it out)"
            for c in columns
            if c.categories
        ]
        target_names = tuple(column_names(table)[i] for i in targets) if kind == "regression" else ()
        stacked = torch.stack([c.values for c in columns], 1)
        return _Read(kind, tuple(columns), stacked, values, target_names, names, tuple(notes))

    def _choose(self, table: TextTable) -> tuple[list[int], list[int], list[str]]:
        """Places of targets and of inputs, and what was chosen without being asked."""
        names, notes = column_names(table), []
        wanted = self.target if isinstance(self.target, (list, tuple)) else [self.target]
        if self.target is None:
            wanted = [names[-1]]
            notes.append(f"target: the last column, {names[-1]} (data.target=NAME takes another)")
        targets = [place(names, name, "data.target", self.path) for name in wanted if name is not None]
        dropped = [place(names, name, "data.drop", self.path) for name in self.drop]
        if self.columns is not None:
            inputs = [place(names, name, "data.columns", self.path) for name in self.columns]
            if both := [names[i] for i in inputs if i in targets]:
                raise UserError(f"data.columns lists the target {both[0]}. Take it out, or name another data.target.")
        else:
            inputs = [i for i in range(len(names)) if i not in targets]
            counting = [i for i in inputs if is_row_number(table, i)]
            notes += [f"{names[i]} has no name and counts the rows: left out" for i in counting]
            inputs = [i for i in inputs if i not in counting]
        inputs = [i for i in dict.fromkeys(inputs) if i not in dropped]
        if not inputs or not targets:
            raise UserError(
                f"{self.path} has no {'inputs' if targets else 'target'} left. See data.columns and data.drop."
            )
        return list(dict.fromkeys(targets)), inputs, notes

    def _without_missing(self, table: TextTable, inputs: list[int], targets: list[int]) -> tuple[TextTable, list[str]]:
        """The table without the rows that `missing` drops. Raises `UserError` where it says error."""
        found = missing_cells(table, inputs + targets)
        if not found:
            return table, []
        names = column_names(table)
        if self.missing == "error":
            shown = "; ".join(f"line {table.lines[r]}, column {names[c]}" for r, c in found[:5])
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise UserError(
                f"{self.path} lacks values: {shown}{more}. Fill them in, or set data.missing=drop (leave their rows "
                "out) or data.missing=mean (fill in the training part's mean)."
            )
        goes = {r for r, c in found if self.missing == "drop" or c in targets}
        notes = [f"{len(goes)} of {len(table.rows)} rows left out: a value is missing"] if goes else []
        filled = sum(r not in goes for r, _ in found)
        if filled:
            notes.append(f"{filled} missing cells filled by the mean of the training part")
        kept = [r for r in range(len(table.rows)) if r not in goes]
        if len(kept) < 2:
            raise UserError(f"{self.path} has {len(kept)} rows without a missing value. At least 2 are needed.")
        rows, lines = tuple(table.rows[r] for r in kept), tuple(table.lines[r] for r in kept)
        return replace(table, rows=rows, lines=lines), notes

    def _targets(self, table: TextTable, targets: list[int]) -> tuple[Kind, Tensor, tuple[str, ...], list[str]]:
        """Kind, targets [N, K] or labels [N], class names, and notes. Raises `UserError` for cells that cannot be."""
        names = column_names(table)
        cells = [[table.number(row[i]) for i in targets] for row in table.rows]
        texts = [(r, k) for r, row in enumerate(cells) for k, value in enumerate(row) if value is None]
        if len(targets) > 1 and self.task == "classification":
            raise UserError("data.task=classification takes one target. Name one column by data.target.")
        kind: Kind = "regression"
        if self.task == "classification" or (self.task == "auto" and self._looks_like_classes(cells)):
            kind = "classification"
        where = f"{self.path}, column {names[targets[0]]}"
        if kind == "classification":
            # Texts among numbers make all of them texts: "1" and "1.0" are then two labels.
            raw: list[str | float] = [
                row[targets[0]] if texts else float(value or 0)
                for row, (value, *_) in zip(table.rows, cells, strict=True)
            ]
            labels, class_names = numbered(raw)
            raise_all(class_problems(class_names, where, len(raw)))
            said = list(map_note(class_names))
            if self.task == "auto":
                said.insert(
                    0,
                    f"target {names[targets[0]]} taken for {len(class_names)} classes (data.task=regression "
                    "takes it for a number)",
                )
            return kind, labels, class_names, said
        if texts:
            row, k = texts[0]
            cell = table.rows[row][targets[k]]
            raise UserError(
                f"{self.path}, line {table.lines[row]}, column {names[targets[k]]}: the target {cell!r} is no number. "
                "Mend it, or set data.task=classification if it is a label."
            )
        values = torch.tensor(cells, dtype=torch.float64)
        said = []
        if self.task == "auto":
            said = [
                f"target {', '.join(names[i] for i in targets)} taken for a number (data.task=classification "
                "takes it for labels)"
            ]
        return kind, values, (), said

    def _looks_like_classes(self, cells: list[list[float | None]]) -> bool:
        """Texts alone, or whole numbers of few different values; several targets never."""
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
    """The file as it is now; kept, since `spec` and `load` both want it."""
    return read_table(path)
