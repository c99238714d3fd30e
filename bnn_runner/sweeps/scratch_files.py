"""Files in the sweep's scratch folder, through which sweeper, jobs (on any machine) and summary communicate."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bnn_runner.config.overrides import as_typed
from bnn_runner.runtime.files import explain_write_error, write_json

PLAN = "plan.json"
JOBS = "jobs"
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Member:
    """A job of the sweep as it is launched.

    Attributes:
        number: Its number in the sweep.
        overrides: Its overrides.
        cells: Folders of its cells; empty if another sweeper planned the job.
        config: Its resolved configuration (`RunConfig.to_text`); None if another sweeper planned the job.
    """

    number: int
    overrides: list[str]
    cells: list[str] = field(default_factory=list)
    config: str | None = None

    def identity(self) -> dict[str, Any]:
        """Returns the fields of an outcome that are known before the job runs."""
        shown = " ".join(map(as_typed, self.overrides)) or "the default"
        return {"number": self.number, "overrides": shown, "cells": self.cells}


@dataclass(frozen=True)
class SweepState:
    """The state of a sweep.

    Attributes:
        jobs: Number of jobs.
        done: Number of jobs that were done before.
        left_alone: Jobs that failed before and do not run again.
        groups: The launched jobs; a group of several runs together.
        fail_fast: Whether a failed job ends the sweep.
        plan_only: Whether only the plan is printed.
    """

    jobs: int
    done: int = 0
    left_alone: list[Member] = field(default_factory=list)
    groups: list[list[Member]] = field(default_factory=list)
    fail_fast: bool = False
    plan_only: bool = False

    def write(self, folder: Path) -> None:
        write_json(folder / PLAN, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> SweepState | None:
        """Reads the state from a sweep's folder; None if another sweeper launched the jobs."""
        try:
            fields = json.loads((folder / PLAN).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        fields["left_alone"] = [Member(**m) for m in fields["left_alone"]]
        fields["groups"] = [[Member(**m) for m in group] for group in fields["groups"]]
        return cls(**fields)


def write_job(folder: Path, number: int, members: Sequence[Member]) -> None:
    """Writes the members of launched job `number`, with their configurations, to the sweep's folder."""
    (folder / JOBS).mkdir(parents=True, exist_ok=True)
    write_json(folder / JOBS / f"{number}.json", [asdict(m) for m in members])


def read_job(folder: Path, number: int) -> list[Member] | None:
    """Reads the members of launched job `number`; None if another sweeper launched it."""
    try:
        members = json.loads((folder / JOBS / f"{number}.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return [Member(**fields) for fields in members]


def write_outcome(folder: Path, outcomes: Sequence[dict[str, Any]]) -> None:
    """Writes the outcomes of a launched job's members to its folder; if the disk is full, prints that instead."""
    try:
        write_json(folder / OUTCOME, list(outcomes))
    except OSError as error:
        if (reason := explain_write_error(error)) is None:
            raise
        print(f"bnn-run: {reason}", file=sys.stderr)


def read_outcomes(scratch: Path) -> list[dict[str, Any]]:
    """Reads all outcomes so far, in the order of the jobs."""
    files = [*scratch.glob(f"*/{OUTCOME}"), scratch / OUTCOME]
    outcomes = [o for path in files if path.is_file() for o in json.loads(path.read_text(encoding="utf-8"))]
    return sorted(outcomes, key=lambda outcome: int(outcome["number"]))
