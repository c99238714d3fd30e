"""Logs finished cells; a failing logger is reported and ends nothing."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from bnn_runner.config.keys import flatten
from bnn_runner.loggers.base import LoggedCell, Logger, NoLogger
from bnn_runner.report.read_cells import CellRecord, read_cell


def log_finished(logger: Logger, folder: Path, output_dir: Path) -> str | None:
    """Log the finished cell in `folder`; returns what went wrong, in one line, or None."""
    if type(logger) is NoLogger:
        return None
    try:
        logger.log(logged_cell(folder, output_dir))
    except Exception as error:  # the clients of the services may raise anything
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"the logger failed ({type(error).__name__}: {first}); the cell itself is complete"
    return None


def logged_cell(folder: Path, output_dir: Path) -> LoggedCell:
    """What a logger receives of the finished cell in `folder`."""
    cell: CellRecord = read_cell(folder)
    return LoggedCell(
        name=cell.name,
        folder=folder,
        output_dir=output_dir,
        config=flatten(cell.config),
        history=_history(folder / "history.csv"),
        scores={c.key: s.value for c, s in cell.main_scores.items() if math.isfinite(s.value)},
        figures=sorted((folder / "figures").glob("*.png")),
    )


def _history(path: Path) -> list[dict[str, float | str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = [{k: float(v) for k, v in row.items() if v and k != "member"} for row in rows]
    finite = [{k: v for k, v in row.items() if math.isfinite(v)} for row in numbers]
    return [{"member": row["member"], **found} for row, found in zip(rows, finite, strict=True)]
