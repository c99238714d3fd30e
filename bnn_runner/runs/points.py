"""New points prepared for the network, and their rows in a table of predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bnn_runner.errors import UserError
from bnn_runner.tasks import Split, Task

if TYPE_CHECKING:
    import pandas as pd

_FEW = 8


@dataclass(frozen=True)
class NewPoints:
    """Points prepared for the network.

    Attributes:
        points: The points that fit, in their order.
        labels: Name of each row: its number or its file; also of rows that do not fit.
        label_name: What the labels are: 'row' or 'file'.
        notes: Lines for the user, such as ignored columns.
        ids: Columns that name the rows, for the table of predictions.
        misfits: Index of each row that does not fit -> the reason.
    """

    points: Split
    labels: tuple[str, ...]
    label_name: str
    notes: tuple[str, ...] = ()
    ids: Mapping[str, Sequence[str]] = field(default_factory=dict)
    misfits: Mapping[int, str] = field(default_factory=dict)

    def all_rows(self, table: pd.DataFrame) -> pd.DataFrame:
        """Returns predictions with one row for each row of the input, and the columns of `ids` first.

        Rows that do not fit are empty, and the column `note` says why; there is no such column without them.
        """
        rows = len(self.labels)
        if self.misfits:
            fitting = [i for i in range(rows) if i not in self.misfits]
            table = table.set_axis(fitting).reindex(range(rows))
            table["note"] = [self.misfits.get(i, "") for i in range(rows)]
        for position, (name, values) in enumerate(self.ids.items()):
            table.insert(position, name if name not in table.columns else f"{name}_", list(values))
        return table


def numbered(points: Split, notes: Sequence[str] = ()) -> NewPoints:
    """Points that are called by their row, counted from 1."""
    return NewPoints(points, tuple(str(i + 1) for i in range(len(points))), "row", tuple(notes))


def encoded(original: Tensor, task: Task, source: str) -> Split:
    """Prepares points as the run prepared its own, and checks their shape against the network's inputs."""
    points = task.new_points(original)
    shape = points.gather(torch.arange(1))[0].shape[1:]
    if tuple(shape) != task.spec.input_shape:
        raise UserError(
            f"{source} has points of shape {list(original.shape[1:])}, which become network inputs of shape "
            f"{list(shape)}; the network of data={task.spec.name} takes {list(task.spec.input_shape)}."
        )
    return points


def few(names: Sequence[str]) -> str:
    """The first names of a list, for messages."""
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")
