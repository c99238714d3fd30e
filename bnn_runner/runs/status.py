"""A cell's status is a file in its folder, written last: DONE, FAILED or INTERRUPTED with the reason.

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
    """By its status file; open when there is none (never begun, running, or killed)."""
    for status, name in _FILES.items():
        if (folder / name).exists():
            return status
    return "open"


def set_status(folder: Path, status: Status, text: str) -> None:
    """Write the status file and remove the others."""
    for other, name in _FILES.items():
        if other != status:
            (folder / name).unlink(missing_ok=True)
    if status in _FILES:
        write_text(folder / _FILES[status], text if text.endswith("\n") else text + "\n")


def facts_of(folder: Path) -> dict[str, Any]:
    """cell.json of an earlier run, or nothing."""
    try:
        facts: dict[str, Any] = json.loads((folder / "cell.json").read_text(encoding="utf-8"))
        return facts
    except (OSError, json.JSONDecodeError):
        return {}
