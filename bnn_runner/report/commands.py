"""The commands that make what a table lacks: for every failed, cut, unfinished or never started seed of a row."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from bnn_runner.report.cells import Cell
from bnn_runner.report.tables import Row, Table


def missing_commands(table: Table) -> list[str]:
    """A command line for each row that lacks seeds: what a cell's command.txt says, with those seeds."""
    made = []
    for row in table.rows:
        if row.missing and (command := _command(row)):
            made.append(_with_seeds(command, list(row.missing)))
    return made


def _command(row: Row) -> str:
    cells: Sequence[Cell] = (*row.group.others, *row.group.done.values())
    for cell in cells:
        try:
            text = (cell.path / "command.txt").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text:
            return text
    return ""


def _with_seeds(command: str, seeds: Sequence[int]) -> str:
    words = [w for w in shlex.split(command) if not w.startswith("seed=")]
    many = ["-m"] if len(seeds) > 1 and "-m" not in words else []
    return shlex.join([words[0], *many, *words[1:], f"seed={','.join(map(str, seeds))}"])
