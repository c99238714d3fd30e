"""Files by which sweeper, jobs and summary communicate, in the sweep's scratch folder, as jobs may run elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bnn_runner.runtime.files import explain_write_error, write_json

PLAN = "plan.json"
JOBS = "jobs"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Member:
    """A job of the sweep as it is launched: number, overrides, cells and resolved configuration (`RunConfig.to_text`).

    Cells and configuration are missing where another sweeper planned the job.
    """

    number: int
    overrides: list[str]
    cells: list[str] = field(default_factory=list)
    config: str | None = None

    def described(self) -> dict[str, Any]:
        """The part of an outcome that is known before the job runs."""
        shown = " ".join(text.lstrip("+") for text in self.overrides) or "the default"
        return {"number": self.number, "overrides": shown, "cells": self.cells}


@dataclass(frozen=True)
class SweepState:
    """A sweep's plan: how many jobs were asked and done; those left alone; the groups that are launched."""

    asked: int
    done: int = 0
    left_alone: list[Member] = field(default_factory=list)
    groups: list[list[Member]] = field(default_factory=list)
    fail_fast: bool = False
    plan_only: bool = False

    def write(self, folder: Path) -> None:
        write_json(folder / PLAN, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> SweepState | None:
        """The plan in a sweep's folder; None where another sweeper left none."""
        try:
            found = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        found["left_alone"] = [Member(**m) for m in found["left_alone"]]
        found["groups"] = [[Member(**m) for m in group] for group in found["groups"]]
        return cls(**found)


def write_job(folder: Path, number: int, members: Sequence[Member]) -> None:
    """Leave the members of launched job `number`, with their configurations, where the job finds them."""
    (folder / JOBS).mkdir(parents=True, exist_ok=True)
    write_json(folder / JOBS / f"{number}.json", [asdict(m) for m in members])


def read_job(folder: Path, number: int) -> list[Member] | None:
    """The members of launched job `number`; None where another sweeper left none."""
    try:
        found = json.loads((folder / JOBS / f"{number}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return [Member(**fields) for fields in found]


def write_outcome(folder: Path, outcomes: Sequence[dict[str, Any]]) -> None:
    """Leave the outcomes of a launched job's members where the summary finds them; on a full disk, say so at once."""
    try:
        write_json(folder / OUTCOME, list(outcomes))
    except OSError as error:
        if (reason := explain_write_error(error)) is None:
            raise
        print(f"bnn-run: {reason}", file=sys.stderr)


def read_outcomes(scratch: Path) -> list[dict[str, Any]]:
    """Every outcome that is there, in the order of the jobs."""
    files = [*scratch.glob(f"*/{OUTCOME}"), scratch / OUTCOME]
    found = [o for path in files if path.is_file() for o in json.loads(path.read_text(encoding="utf-8"))]
    return sorted(found, key=lambda outcome: int(outcome["number"]))
