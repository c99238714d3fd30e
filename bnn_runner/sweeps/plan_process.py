"""Inspects the jobs of a sweep in a child process.

The child is forked from the same server as the jobs, so torch is imported only once, and the process that the user
started stays small, as it should on the login node of a cluster.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bnn_runner.errors import UserError
from bnn_runner.runtime.files import write_json
from bnn_runner.sweeps.child_process import run_in_child
from bnn_runner.sweeps.plan import Job, inspect_jobs
from bnn_runner.sweeps.plan_cache import PlanCache


def inspect_jobs_in_child(
    points: Mapping[int, Sequence[str]], config_dir: Path | None, start: Path, cache: PlanCache, read_only: bool
) -> dict[int, Job]:
    """Calls `inspect_jobs` in a child process.

    Raises:
        UserError: As `inspect_jobs`, or if the process ends without a result.
    """
    with tempfile.TemporaryDirectory(prefix="bnn-run-") as scratch:
        file = Path(scratch) / "jobs.json"
        code, stop_signal = run_in_child(_inspect_and_write, file, dict(points), config_dir, start, cache, read_only)
        if stop_signal:
            raise KeyboardInterrupt
        if not file.exists():
            raise UserError(
                f"Could not plan the sweep: the planning process ended with code {code}. Its output is above."
                " Run one of the jobs without -m to see whether it works."
            )
        result = json.loads(file.read_text(encoding="utf-8"))
    if "problems" in result:
        raise UserError(*result["problems"])
    return {job.number: job for job in map(_job, result["jobs"])}


def _inspect_and_write(file: Path, *arguments: Any) -> None:
    result: dict[str, Any]
    try:
        result = {"jobs": [asdict(job) for job in inspect_jobs(*arguments).values()]}
    except UserError as error:
        result = {"problems": list(error.problems)}
    write_json(file, _plain(result))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple, frozenset)):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, Path) else value


def _job(fields: dict[str, Any]) -> Job:
    return Job(
        number=fields["number"],
        overrides=tuple(fields["overrides"]),
        status=fields["status"],
        cells=tuple(map(Path, fields["cells"])),
        problems=tuple(fields["problems"]),
        trainings=frozenset(fields["trainings"]),
        lanes=fields["lanes"],
        config=fields["config"],
    )
