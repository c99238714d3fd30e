"""The epochs of a row, for tables in which some method trains further than the networks that others use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bnn_runner.report.grouping import ABSENT, Group
from bnn_runner.report.read_cells import CellRecord

NOTE = "epochs: number of networks × (epochs of their training + epochs of the method's own fit)."
SCHEDULED = "schedule.epochs"


def epochs_text(group: Group) -> str:
    """`10`; `5 × 10` for five networks; `5 + 5` where the method trains or samples further; a dash if unknown."""
    texts = {_of_cell(cell) for cell in group.done.values()}
    return "/".join(sorted(texts)) or ABSENT


def shows_epochs(groups: Sequence[Group]) -> bool:
    """Whether rows differ in their epochs and some method trains further, so that a reader must see by how much."""
    further = any(cell.epochs.get("own") for group in groups for cell in group.done.values())
    return further and len({epochs_text(group) for group in groups}) > 1


def without_scheduled(extra: Mapping[str, Sequence[str]], groups: Sequence[Group]) -> dict[str, Sequence[str]]:
    """The extra columns without schedule.epochs, where each method has one value and the epochs are shown anyway."""
    kept = dict(extra)
    if SCHEDULED not in kept or not shows_epochs(groups):
        return kept
    values: dict[tuple[str, str, str], set[str]] = {}
    for group, text in zip(groups, kept[SCHEDULED], strict=True):
        values.setdefault((group.key.data, group.key.model, group.key.method), set()).add(text)
    if all(len(found) == 1 for found in values.values()):
        del kept[SCHEDULED]
    return kept


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
