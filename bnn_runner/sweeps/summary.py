"""The summary at the end of a sweep, and its exit code, from the files of `scratch_files`."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bnn_runner.runtime.exit_codes import FAILED, OK, USAGE_ERROR
from bnn_runner.runtime.files import short_path
from bnn_runner.sweeps.scratch_files import SweepState, read_outcomes

_ORDER = ("done", "done before", "skipped", "interrupted", "failed", "failed before", "not run", "no result")


def print_summary(scratch: Path, jobs: int) -> int:
    """Prints how many jobs are done, and why the others are not.

    Args:
        scratch: The scratch folder of the sweep.
        jobs: Number of jobs, if another sweeper ran them.

    Returns:
        The exit code.
    """
    state = SweepState.read(scratch) or SweepState(jobs)
    outcomes = read_outcomes(scratch)
    ended = {o["number"] for o in outcomes}
    if state.plan_only:
        print("plan_only=true: nothing was run", file=sys.stderr)
        return USAGE_ERROR if outcomes else OK
    rows = [o | {"status": "failed" if o["status"] == "usage error" else o["status"]} for o in outcomes]
    no_result = {"status": "no result", "message": f"the job wrote no result. The launcher's logs are in {scratch}"}
    rows += [m.identity() | no_result for group in state.groups for m in group if m.number not in ended]
    left_alone = {"status": "failed before", "message": "left alone (retry_failed=false)"}
    rows += [m.identity() | left_alone for m in state.left_alone]
    counts = Counter(str(row["status"]) for row in rows)
    counts["done before"] += state.done
    if not state.groups and not state.done and not state.left_alone:  # another sweeper: only the number is known
        counts["no result"] += max(state.jobs - len(rows), 0)
    listed = ", ".join(f"{counts[name]} {name}" for name in _ORDER if counts[name]) or "nothing left to run"
    print(
        f"\nbnn-run: {state.jobs} job{'s' if state.jobs != 1 else ''}: {listed}",
        file=sys.stderr,
    )
    not_done = [row for row in rows if row["status"] not in ("done", "skipped")]
    for row in sorted(not_done, key=lambda row: int(row["number"])):
        reason = (row["message"].splitlines() or ["no reason given"])[0]
        print(f"  {row['status']:<8} {row['overrides']}: {reason}", file=sys.stderr)
        if (log := _log(row)) is not None:
            print(f"           {short_path(log)}", file=sys.stderr)
    return _exit_code(outcomes, not_done, counts["no result"])


def may_be_requeued(scratch: Path) -> bool:
    """Whether a job of a Slurm sweep has no outcome or was interrupted: Slurm may run it again and needs the plan."""
    state, outcomes = SweepState.read(scratch), read_outcomes(scratch)
    ended = {o["number"] for o in outcomes if o["status"] != "interrupted"}
    members = [] if state is None or state.plan_only else [m for group in state.groups for m in group]
    return (scratch / ".submitit").exists() and any(m.number not in ended for m in members)


def _log(row: dict[str, Any]) -> Path | None:
    """The log of the first unfinished cell, or else its status file."""
    for cell in map(Path, row.get("cells", ())):
        if not (cell / "DONE").exists():
            return next((path for name in ("log.txt", "FAILED") if (path := cell / name).exists()), None)
    return None


def _exit_code(outcomes: list[dict[str, Any]], not_done: list[dict[str, Any]], no_result: int) -> int:
    statuses = {o["status"] for o in outcomes}
    if no_result or not {str(row["status"]) for row in not_done} <= {"failed"} or statuses & {"failed", "interrupted"}:
        return FAILED
    return USAGE_ERROR if not_done else OK
