"""The epochs of a row, for tables in which some method trains further than the networks that others use."""

from __future__ import annotations

from collections.abc import Sequence

from bnn_runner.report.grouping import ABSENT
from bnn_runner.report.read_cells import CellRecord
from bnn_runner.report.tables import Row

NOTE = "epochs: number of networks × (epochs of their training + epochs of the method's own fit)."


def epochs_text(row: Row) -> str:
    """`10`; `5 × 10` for five networks; `5 + 5` where the method trains or samples further; a dash if unknown."""
    texts = {_of_cell(cell) for cell in row.group.done.values()}
    return "/".join(sorted(texts)) or ABSENT


def shows_epochs(rows: Sequence[Row]) -> bool:
    """Whether the rows differ in their epochs and some method trains further, so that a reader must see by how much."""
    further = any(cell.epochs.get("own") for row in rows for cell in row.group.done.values())
    return further and len({epochs_text(row) for row in rows}) > 1


def _of_cell(cell: CellRecord) -> str:
    found = cell.epochs
    if not found:
        return ABSENT
    training = "pretrained" if found["training"] is None else found["training"]
    parts = [str(part) for part in (training, found["own"]) if part]
    each, networks = " + ".join(parts) or "0", found["networks"]
    if networks == 1:
        return each
    return f"{networks} × ({each})" if len(parts) > 1 else f"{networks} × {each}"
