"""The contract of a logger, and the default, which logs nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class LoggedCell:
    """A finished cell: its name (data/model/method/seed-hash), flat configuration, and the content of its files.

    `history` has one row per epoch and member (the number of a network, or "posterior" for a fit of its own);
    `scores` are the finite values of metrics.csv by the keys of the tables (`joint_loglik_tau10`); `figures` are PNG
    files.
    """

    name: str
    folder: Path
    output_dir: Path
    config: Mapping[str, Any]
    history: Sequence[Mapping[str, float | str]]
    scores: Mapping[str, float]
    figures: Sequence[Path]

    def series(self) -> dict[str, list[tuple[int, float]]]:
        """Name (`train/nll`, `train/nll/member1` for several networks, `fit/nll`) -> (epoch, value) pairs."""
        members = {row["member"] for row in self.history} - {"posterior"}
        found: dict[str, list[tuple[int, float]]] = {}
        for row in self.history:
            fit = row["member"] == "posterior"
            suffix = f"/member{row['member']}" if len(members) > 1 and not fit else ""
            for key, value in row.items():
                if key not in ("member", "epoch"):
                    found.setdefault(f"{'fit' if fit else 'train'}/{key}{suffix}", []).append(
                        (int(row["epoch"]), float(value))
                    )
        return found


@runtime_checkable
class Logger(Protocol):
    """A frozen dataclass whose fields are its YAML's keys. An exception of a logger is reported and ends no run."""

    def problems(self) -> list[str]:
        """Why it cannot log (a missing package), as sentences; called before any work."""
        ...

    def log(self, cell: LoggedCell) -> None:
        """Log one finished cell; logging it again replaces or repeats it, depending on the service."""
        ...


@dataclass(frozen=True)
class NoLogger:
    """The default."""

    def problems(self) -> list[str]:
        return []

    def log(self, cell: LoggedCell) -> None:
        return None


def missing_package(logger: str, module: str, extra: str) -> list[str]:
    """A problem if a module is not installed; it is not imported."""
    if importlib.util.find_spec(module) is not None:
        return []
    return [
        f"logger={logger} requires the package {module}, which is not installed. "
        f"Run pip install 'bnn-runner[{extra}]', or leave out logger={logger}."
    ]
