"""New points in a table: inputs by name, whatever the order; rows that do not fit are marked."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bnn_runner.data.table_file import TableFormat, read_table
from bnn_runner.data.table_frames import text_of
from bnn_runner.data.table_numbers import NumberFormat, codes_of
from bnn_runner.data.user_checks import row_labels
from bnn_runner.errors import UserError, did_you_mean
from bnn_runner.runs.points import NewPoints, encoded, few
from bnn_runner.tasks import TableReading, Task


def points_of_table(path: Path, task: Task) -> NewPoints:
    """Points in the file of a table. Raises `UserError` if it is not readable, or none of its rows fits."""
    reading = task.reading or TableReading()
    wanted = TableFormat(missing_codes=reading.missing_codes)
    table = read_table(path, wanted)
    if task.feature_names and table.header is None and set(task.feature_names) <= set(table.rows[0]):
        table = read_table(path, TableFormat(header=True, missing_codes=reading.missing_codes))
    names = table.names
    _require_table(task, str(path))
    inputs, notes = _inputs(names, table.header is not None, task, str(path))
    positions = [names.index(name) for name in inputs.values()]
    numeric = [i for name, i in zip(inputs, positions, strict=True) if name not in task.feature_categories]
    assumed = NumberFormat(reading.decimal, reading.thousands) if task.reading is not None else None
    table = table.with_marks(numeric, wanted, assumed)
    others = [i for i in range(len(names)) if i not in positions]
    found = row_labels(table, others).reasons
    ids = {
        names[i]: table.column(i) for i in others if (i in found or names[i] in reading.ids) and any(table.column(i))
    }
    extra = [names[i] for i in others if names[i] not in ids and table.header is not None and table.header[i]]
    if extra:
        notes.append(f"ignored columns: {few(extra)} (the inputs are {few(task.feature_names)})")
    guesses = re.sub(r" \(data\.[^)]*\)", "", "; ".join(table.notes))  # settings of bnn-run
    notes.insert(0, f"{path.name}: {guesses}; {table.shown_first_row(positions)}")
    columns = {name: table.column(i) for name, i in zip(inputs, positions, strict=True)}
    return _points(columns, task, str(path), [f"{table.word} {line}" for line in table.lines], table.number, notes, ids)


def points_of_frame(frame: Any, task: Task, source: str) -> NewPoints:
    """Points in a pandas table. Raises `UserError` if none of its rows fits."""
    _require_table(task, source)
    reading = task.reading or TableReading()
    names = [str(name) for name in frame.columns]
    inputs, notes = _inputs(names, True, task, source)
    columns = {name: [text_of(v) for v in frame.iloc[:, names.index(column)]] for name, column in inputs.items()}
    ids = {name: [text_of(v) for v in frame.iloc[:, names.index(name)]] for name in reading.ids if name in names}
    number = NumberFormat(codes=codes_of(reading.missing_codes)).value
    return _points(columns, task, source, [f"row {i + 1}" for i in range(len(frame))], number, notes, ids)


def _require_table(task: Task, source: str) -> None:
    if len(task.spec.input_shape) != 1 or task.spec.vocabulary:
        raise UserError(
            f"data={task.spec.name} has inputs of shape {list(task.spec.input_shape)}; got a table ({source}"
            "). Give an .npz file with the array x, or images."
        )


def _inputs(names: Sequence[str], named: bool, task: Task, source: str) -> tuple[dict[str, str], list[str]]:
    """Input -> column: by name if the task and the table name their columns, else by position. And notes."""
    features = task.feature_names
    if features and named:
        missing = [name for name in features if name not in names]
        if missing:
            near = did_you_mean(missing[0], names)
            raise UserError(
                f"{source} is missing the input column{'s' if len(missing) > 1 else ''} {', '.join(missing)}.{near} "
                f"Its columns: {few(names)}."
            )
        return {name: name for name in features}, []
    width = len(features) or task.spec.input_shape[0]
    if len(names) != width:
        described = f": {few(features)}" if features else ""
        raise UserError(
            f"{source} must have {width} columns in the order of data={task.spec.name}{described}; got "
            f"{len(names)}. Leave out the target and any other column."
        )
    return dict(zip(features or names, names, strict=True)), [f"columns are matched by position ({few(names)})"]


def _points(
    columns: Mapping[str, Sequence[str]],
    task: Task,
    source: str,
    places: Sequence[str],
    to_number: Callable[[str], float | None],
    notes: list[str],
    ids: Mapping[str, Sequence[str]],
) -> NewPoints:
    """Points from columns of texts; rows with an unknown text or without a value are marked."""
    misfits: dict[int, list[str]] = {}
    numbers = [_column(name, cells, task, to_number, misfits) for name, cells in columns.items()]
    values = torch.tensor(numbers, dtype=torch.float64).T
    if not len(values):
        raise UserError(f"{source} must have one row per point; got no rows.")
    points = encoded(values, task, source)
    assert isinstance(points.inputs, torch.Tensor)
    finite = torch.isfinite(points.inputs).reshape(len(points), -1).all(1)
    for row in (~finite).nonzero().flatten().tolist():
        empty = [name for name, cells in columns.items() if to_number(cells[row]) != to_number(cells[row])]
        if row not in misfits:
            misfits[row] = [f"no value in {few(empty) or 'a column'}"]
    if misfits:
        fitting = [i for i in range(len(values)) if i not in misfits]
        first = min(misfits)
        if not fitting:
            raise UserError(
                f"{source}, {places[first]}: {'; '.join(misfits[first])}. Predictions require a value of each input in "
                "at least one row. Correct the table."
            )
        shown = "; ".join(f"{places[i]}: {'; '.join(misfits[i])}" for i in sorted(misfits)[:5])
        more = f"; and {len(misfits) - 5} more" if len(misfits) > 5 else ""
        notes.append(f"{len(misfits)} of {len(values)} rows not predicted, see their column note: {shown}{more}")
        points = points.subset(torch.tensor(fitting))
    labels = tuple(str(i + 1) for i in range(len(values)))
    return NewPoints(points, labels, "row", tuple(notes), ids, {i: "; ".join(why) for i, why in misfits.items()})


def _column(
    name: str,
    cells: Sequence[str],
    task: Task,
    to_number: Callable[[str], float | None],
    misfits: dict[int, list[str]],
) -> list[float]:
    """Values of one column: numbers as they are, categories as their index; NaN for other values, which are misfits."""
    categories = task.feature_categories.get(name)
    values: list[float] = []
    for row, cell in enumerate(cells):
        value = to_number(cell)
        if categories is not None:
            value = float(categories.index(cell)) if cell in categories else value if value != value else None
        if value is None:
            expected = f"one of {few(categories)}" if categories is not None else "a number"
            misfits.setdefault(row, []).append(f"column {name} must be {expected}; got {cell!r}")
        values.append(float("nan") if value is None else value)
    return values
