"""What a logger is given, and what it must do; none by default."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class LoggedCell:
    """A finished cell: its name (data/model/method/seed-hash), flat configuration, and what its files hold.

    `history` has a row an epoch and member (a network's number, or "posterior" for a fit of its own), `scores` the
    values of metrics.csv by the keys that tables use (`joint_loglik_tau10`), without those that are no finite
    number; `figures` are PNG files.
    """

    name: str
    folder: Path
    output_dir: Path
    config: Mapping[str, Any]
    history: Sequence[Mapping[str, float | str]]
    scores: Mapping[str, float]
    figures: Sequence[Path]

    def series(self) -> dict[str, list[tuple[int, float]]]:
        """Name (`train/nll`, of several networks `train/nll/member1`, `fit/nll`) -> (epoch, value) of history."""
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
    """A frozen dataclass whose fields are its YAML's keys. What it raises is told, and ends no run."""

    def problems(self) -> list[str]:
        """Why it cannot log (a package that is not installed); asked before any work."""
        ...

    def log(self, cell: LoggedCell) -> None:
        """Tell of one finished cell; the same cell told again replaces or repeats it, as the service has it."""
        ...


@dataclass(frozen=True)
class NoLogger:
    """The default."""

    def problems(self) -> list[str]:
        return []

    def log(self, cell: LoggedCell) -> None:
        return None


def missing_package(logger: str, module: str, extra: str) -> list[str]:
    """One problem where a module cannot be found, without importing it."""
    if importlib.util.find_spec(module) is not None:
        return []
    return [
        f"logger={logger} needs the package {module}, which is not installed here. "
        f"Run pip install 'bnn-runner[{extra}]', or leave out logger={logger}."
    ]
