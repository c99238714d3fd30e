"""Commands for missing results: every failed, interrupted, unfinished or never started seed of a row."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from bnn_runner.report.read_cells import CellRecord
from bnn_runner.report.tables import Row, Table


def missing_commands(table: Table) -> list[str]:
    """A command line for each row with missing seeds: that of a cell's command.txt, with these seeds."""
    found = [with_words(r, {"seed": ",".join(map(str, r.missing))}) for r in table.rows if r.missing]
    return [command for command in found if command]


def with_words(row: Row, changes: Mapping[str, str]) -> str:
    """The command of one of the row's cells with other values, a sweep if one is a list; empty if no cell has one."""
    cells: Sequence[CellRecord] = (*row.group.others, *row.group.done.values())
    command = next(filter(None, map(_command, cells)), "")
    if not command:
        return ""
    program, *words = [w for w in shlex.split(command) if w.split("=")[0] not in changes and w != "-m"]
    many = ["-m"] if any("," in value for value in changes.values()) else []
    return shlex.join([program, *many, *words, *(f"{name}={value}" for name, value in changes.items())])


def _command(cell: CellRecord) -> str:
    try:
        return (cell.path / "command.txt").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
