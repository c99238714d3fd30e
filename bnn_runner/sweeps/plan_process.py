"""A sweep is planned in a process of its own, forked from the server of its jobs, so that torch is imported once.

The process that a person starts stays small, as it should on the login node of a cluster.
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
from bnn_runner.sweeps.child_process import run_apart
from bnn_runner.sweeps.plan import Job, look_into
from bnn_runner.sweeps.plan_cache import Memory


def look_apart(
    points: Mapping[int, Sequence[str]], config_dir: Path | None, start: Path, memory: Memory, look_only: bool
) -> dict[int, Job]:
    """What `look_into` finds, in another process. Raises `UserError` where that ends without an answer."""
    with tempfile.TemporaryDirectory(prefix="bnn-run-") as scratch:
        answer = Path(scratch) / "jobs.json"
        code, asked = run_apart(_answer, answer, dict(points), config_dir, start, memory, look_only)
        if asked:
            raise KeyboardInterrupt
        if not answer.exists():
            raise UserError(
                f"Could not plan the sweep: the planning process ended with code {code}. Its output is above."
                " Run one of the jobs without -m to see whether it works."
            )
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "problems" in found:
        raise UserError(*found["problems"])
    return {job.number: job for job in map(_job, found["jobs"])}


def _answer(answer: Path, *asked: Any) -> None:
    found: dict[str, Any]
    try:
        found = {"jobs": [asdict(job) for job in look_into(*asked).values()]}
    except UserError as error:
        found = {"problems": list(error.problems)}
    write_json(answer, _plain(found))


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
