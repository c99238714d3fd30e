"""A section of a report is one object: the flag that asks for it, its tables and its figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bnn_runner.report.filters import Filter
from bnn_runner.report.grid import Grid
from bnn_runner.report.numbers import Summary
from bnn_runner.report.read_cells import CellRecord
from bnn_runner.report.tables import Table


@dataclass(frozen=True)
class Request:
    """What a section may use: the cells that passed the filters, their table, and how the report was requested."""

    table: Table
    cells: Sequence[CellRecord]
    filters: Sequence[Filter] = ()
    summary: Summary = "mean"
    value: str = field(default="")
    """What was given with the section's flag; empty for a switch."""


@dataclass(frozen=True)
class Section:
    """One kind of table that a report can add, named in `sections.SECTIONS`.

    Args:
        flag: as typed, `--ranks`; empty for a section that appears wherever it has a table.
        help: its line in `bnn-report --help`.
        tables: the tables it adds; raises `UserError` where the cells do not allow any.
        figure: draws its picture and returns the file, None where there is nothing to draw.
        metavar: what the flag's value is called; None makes the flag a switch.
        stem: what its picture is called, after the name of the report; by default the flag.
        example: arguments of an example command and its meaning, for the help.
    """

    flag: str
    help: str
    tables: Callable[[Request], Sequence[Grid]]
    figure: Callable[[Request, Path], Path | None] | None = None
    metavar: str | None = None
    example: tuple[str, str] | None = None
    stem: str = ""

    @property
    def name(self) -> str:
        """The flag as a name, for files and parsed arguments."""
        return self.stem or self.flag.lstrip("-").replace("-", "_")
