"""The closing summary of a sweep and its exit code, from the files of `scratch_files`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bnn_runner.runtime.exit_codes import FAILED, OK, USAGE_ERROR
from bnn_runner.runtime.files import short_path
from bnn_runner.sweeps.scratch_files import SweepState, read_outcomes

_ORDER = ("done", "done before", "skipped", "interrupted", "failed", "failed before", "not run", "no result")


def sum_up(scratch: Path, jobs: int) -> int:
    """Print how many jobs are done, and why the others are not. Returns the exit code."""
    plan = SweepState.read(scratch) or SweepState(jobs)
    outcomes = read_outcomes(scratch)
    ended = {o["number"] for o in outcomes}
    if plan.plan_only:
        print("plan_only=true: nothing was run", file=sys.stderr)
        return USAGE_ERROR if outcomes else OK
    rows = [o | {"status": "failed" if o["status"] == "usage error" else o["status"]} for o in outcomes]
    lost = {"status": "no result", "message": f"it left no result. The launcher's logs are in {scratch}"}
    rows += [m.described() | lost for group in plan.groups for m in group if m.number not in ended]
    alone = {"status": "failed before", "message": "left alone (retry_failed=false)"}
    rows += [m.described() | alone for m in plan.left_alone]
    counts = Counter(str(row["status"]) for row in rows)
    counts["done before"] += plan.done
    if not plan.groups and not plan.done and not plan.left_alone:  # another sweeper's jobs are known by number only
        counts["no result"] += max(plan.asked - len(rows), 0)
    listed = ", ".join(f"{counts[name]} {name}" for name in _ORDER if counts[name]) or "nothing left to run"
    print(
        f"\nbnn-run: {plan.asked} job{'s' if plan.asked != 1 else ''}: {listed}",
        file=sys.stderr,
    )
    bad = [row for row in rows if row["status"] not in ("done", "skipped")]
    for row in sorted(bad, key=lambda row: int(row["number"])):
        reason = (row["message"].splitlines() or ["no reason given"])[0]
        print(f"  {row['status']:<8} {row['overrides']}: {reason}", file=sys.stderr)
        if (log := _log(row)) is not None:
            print(f"           {short_path(log)}", file=sys.stderr)
    return _exit_code(outcomes, bad, counts["no result"])


def unfinished(scratch: Path) -> bool:
    """Whether a launched job left no outcome or was interrupted: a scheduler may run it again by the plan."""
    plan, outcomes = SweepState.read(scratch), read_outcomes(scratch)
    ended = {o["number"] for o in outcomes if o["status"] != "interrupted"}
    members = [] if plan is None or plan.plan_only else [m for group in plan.groups for m in group]
    return (scratch / ".submitit").exists() and any(m.number not in ended for m in members)


def _log(row: dict[str, Any]) -> Path | None:
    """The log of the first cell that is not finished, or what its status file says."""
    for cell in map(Path, row.get("cells", ())):
        if not (cell / "DONE").exists():
            return next((path for name in ("log.txt", "FAILED") if (path := cell / name).exists()), None)
    return None


def _exit_code(outcomes: list[dict[str, Any]], bad: list[dict[str, Any]], lost: int) -> int:
    statuses = {o["status"] for o in outcomes}
    if lost or not {str(row["status"]) for row in bad} <= {"failed"} or statuses & {"failed", "interrupted"}:
        return FAILED
    return USAGE_ERROR if bad else OK
