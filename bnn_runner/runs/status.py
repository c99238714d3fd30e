"""The status of a cell: a file in its folder, written last (DONE, FAILED or INTERRUPTED, with the reason).

Imports nothing heavy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from bnn_runner.runtime.files import write_text

Status = Literal["done", "failed", "interrupted", "open"]
_FILES: dict[Status, str] = {"done": "DONE", "failed": "FAILED", "interrupted": "INTERRUPTED"}


def status_of(folder: Path) -> Status:
    """Returns the status of a cell; 'open' without a status file (never started, running, or killed)."""
    for status, name in _FILES.items():
        if (folder / name).exists():
            return status
    return "open"


def set_status(folder: Path, status: Status, text: str) -> None:
    """Writes the status file and deletes the others.

    Args:
        folder: The folder of the cell.
        status: The new status; 'open' writes no file.
        text: Content of the file: the reason.
    """
    for other, name in _FILES.items():
        if other != status:
            (folder / name).unlink(missing_ok=True)
    if status in _FILES:
        write_text(folder / _FILES[status], text if text.endswith("\n") else text + "\n")


def facts_of(folder: Path) -> dict[str, Any]:
    """Returns the content of cell.json; {} if it is missing or damaged."""
    try:
        facts: dict[str, Any] = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
        return facts
    except (OSError, json.JSONDecodeError):
        return {}
