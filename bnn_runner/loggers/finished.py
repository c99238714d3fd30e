"""Telling a finished cell to the logger that was chosen: whatever goes wrong there is said, and ends nothing."""

from __future__ import annotations

import csv
import math
from pathlib import Path

from bnn_runner.config.keys import flatten
from bnn_runner.loggers.base import LoggedCell, Logger, NoLogger
from bnn_runner.report.read_cells import CellRecord, read_cell


def log_finished(logger: Logger, folder: Path, output_dir: Path) -> str | None:
    """Log the finished cell in `folder`; what went wrong, in one line, or None."""
    if type(logger) is NoLogger:
        return None
    try:
        logger.log(logged(folder, output_dir))
    except Exception as error:  # the services' clients raise whatever they like
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        return f"the logger failed ({type(error).__name__}: {first}); the cell is whole all the same"
    return None


def logged(folder: Path, output_dir: Path) -> LoggedCell:
    """What a logger is told of the finished cell in `folder`."""
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
