"""Runs the jobs of a sweep. Hydra's launchers call `job`, on this machine or another (it is pickled by its name).

A job reads its resolved configuration from the sweep's scratch folder; it does not use the one that Hydra composed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from bnn_runner.config.run_config import RunConfig
from bnn_runner.errors import Interrupted, RunFailed, UserError
from bnn_runner.runs.status import set_status, status_of
from bnn_runner.runtime.exit_codes import print_errors
from bnn_runner.sweeps.allocator import keep_freed_memory
from bnn_runner.sweeps.child_process import run_in_child
from bnn_runner.sweeps.plan import Loader
from bnn_runner.sweeps.scratch_files import Member, SweepState, read_job, read_outcomes, write_outcome

Outcome = dict[str, Any]
"""How one job ended, as plain values: number, overrides, cells, status and message.

`printed`: whether the message is on the screen already. `broken`: whether the same problem ended all jobs that ran
together.
"""


def job(config: DictConfig) -> None:
    """Runs one job of a sweep, or several as lanes, and writes the outcomes to the job's scratch folder.

    Only a stop request raises, so that a failed job does not end the sweep.
    """
    del config
    hydra: Any = HydraConfig.get()
    folder, start = Path(hydra.runtime.output_dir), Path(hydra.runtime.cwd)
    added = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
    config_dir = Path(added[0]) if added else None
    overrides = list(hydra.overrides.task)
    spec = JobSpec(overrides, int(hydra.job.num), folder, Path(hydra.sweep.dir), config_dir, start)
    if stop_signal := run_job(spec):
        _forward_stop(stop_signal)


@dataclass(frozen=True)
class JobSpec:
    """A job of a sweep, as plain values that can be sent to another process or machine.

    Attributes:
        overrides: Its overrides.
        number: Its number in the sweep.
        folder: Its scratch folder.
        sweep: The scratch folder of the sweep.
        config_dir: The folder given as --config-dir.
        start: The folder in which the command was typed.
        environment: Variables to add to the environment of its process.
    """

    overrides: list[str]
    number: int
    folder: Path
    sweep: Path
    config_dir: Path | None
    start: Path
    environment: dict[str, str] = field(default_factory=dict)


def run_job(spec: JobSpec) -> int:
    """Runs a job of a sweep and writes its outcomes to its folder. Returns the stop signal (0: none)."""
    outcomes, stop_signal = _run_job(spec)
    write_outcome(spec.folder, outcomes)
    return stop_signal


def _run_job(spec: JobSpec) -> tuple[list[Outcome], int]:
    """Runs the members of a job. Returns their outcomes, and the stop signal (0: none)."""
    number, sweep = spec.number, spec.sweep
    state = SweepState.read(sweep)
    members = read_job(sweep, number) or [Member(number, spec.overrides)]
    failures = ("failed", "usage error")
    if state is not None and state.fail_fast and any(o["status"] in failures for o in read_outcomes(sweep)):
        skipped = {"status": "not run", "message": "another job failed (fail_fast=true)", "printed": False}
        return [m.identity() | skipped for m in members], 0
    count = os.environ.get("BNN_RUN_JOBS", "?") if state is None else len(state.groups)
    shown = " ... ".join(dict.fromkeys(m.identity()["overrides"] for m in (members[0], members[-1])))
    print(f"\n[{number + 1}/{count}] {shown}", file=sys.stderr, flush=True)
    outcomes, stop_signal = run_members_in_child(members, spec)
    if len(members) > 1 and not stop_signal and any(o.get("broken") for o in outcomes):
        print(f"bnn-run: {len(members)} jobs that ran together failed; running them one by one", file=sys.stderr)
        outcomes = []
        for member in members:
            member_outcomes, stop_signal = run_members_in_child([member], spec)
            outcomes += member_outcomes
            if stop_signal:
                break
    return outcomes, stop_signal


def _forward_stop(number: int) -> None:
    """Forwards a stop signal: to the scheduler's handler in this process, which requeues the job, or to the sweep."""
    if number == signal.SIGTERM and requeued_by_slurm():
        raise SystemExit(0)  # without a result, which a launcher would take as final
    handler = signal.getsignal(number)
    if callable(handler) and handler is not signal.default_int_handler:
        os.kill(os.getpid(), number)
        return
    raise KeyboardInterrupt


def requeued_by_slurm() -> bool:
    """Whether this process belongs to a job that Slurm is about to run again."""
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is None:
        return False
    try:
        result = subprocess.run(
            ["scontrol", "show", "job", job_id], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    restarts = re.search(r"\bRestarts=(\d+)", result.stdout)
    return restarts is not None and int(restarts[1]) > int(os.environ.get("SLURM_RESTART_COUNT", 0))


def run_members_in_child(members: Sequence[Member], spec: JobSpec) -> tuple[list[Outcome], int]:
    """Runs members together in their own process.

    Returns:
        Their outcomes, however the process ended, and the stop signal (0: none).
    """
    with tempfile.TemporaryDirectory(prefix="bnn-run-") as scratch:
        result = Path(scratch) / "result.json"
        arguments = result, list(members), spec.config_dir, spec.start
        code, stop_signal = run_in_child(_run_and_write, *arguments, environment=spec.environment)
        if result.exists():
            outcomes: list[Outcome] = json.loads(result.read_text(encoding="utf-8"))
        else:
            stopped = bool(stop_signal or code > 128)
            status = "interrupted" if stopped else "failed"
            outcome = {"status": status, "message": _describe_exit(code), "printed": False, "broken": not stopped}
            outcomes = [m.identity() | outcome for m in members]
    if len(members) == 1 or not any(o.get("broken") for o in outcomes):
        for outcome in outcomes:
            _mark_failed(outcome)
    return outcomes, stop_signal


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"the process of the run exited with code {code}"
    name = signal.Signals(-code).name
    hint = ": did it run out of memory?" if name == "SIGKILL" else ""
    return f"the process of the run was killed by {name}{hint}"


def _mark_failed(outcome: Outcome) -> None:
    """Writes FAILED in the cells of a failed job that the job itself could not mark."""
    if outcome["status"] == "failed":
        for cell in map(Path, outcome["cells"]):
            if status_of(cell) == "open":
                with contextlib.suppress(OSError):  # a full disk
                    set_status(cell, "failed", f"{outcome['message']}\n\n{outcome.get('traceback', '')}")


def _run_and_write(result: Path, members: list[Member], config_dir: Path | None, start: Path) -> None:
    outcomes = run_members(members, config_dir, start)
    partial = result.with_suffix(".tmp")
    partial.write_text(json.dumps(outcomes), encoding="utf-8")
    partial.replace(result)


def run_members(members: Sequence[Member], config_dir: Path | None, start: Path) -> list[Outcome]:
    """Runs the experiments of members together. Returns the outcome of each.

    If another sweeper planned the jobs, the members have no configuration yet; their overrides are resolved here.
    """

    def configs() -> list[RunConfig]:
        loader = Loader(config_dir, start)
        return [loader.load(m.overrides) if m.config is None else RunConfig.from_text(m.config) for m in members]

    return run_configs(configs, [m.identity() for m in members], estimated=False)


def run_configs(
    configs: Callable[[], Sequence[RunConfig]], identities: Sequence[Outcome], estimated: bool
) -> list[Outcome]:
    """Builds and runs experiments together. Raises nothing: every error becomes an outcome.

    Args:
        configs: Returns the resolved configurations.
        identities: The fields of each outcome that are known in advance.
        estimated: Whether to estimate and print the duration of the run.

    Returns:
        The outcome of each experiment.
    """

    def same_for_all(status: str, message: str, printed: bool, **more: Any) -> list[Outcome]:
        return [{**i, "status": status, "message": message, "printed": printed, **more} for i in identities]

    keep_freed_memory()
    try:
        from bnn_runner import runner
        from bnn_runner.experiment import Experiment, build_experiment

        experiments: list[Experiment] = []
        for config in configs():
            experiments.append(build_experiment(config, experiments[-1] if experiments else None))
        outcomes = runner.run_together(experiments, estimated=estimated)
        return [
            {**i, "status": o.status, "message": o.message, "printed": False, "cells": [str(c) for c in o.cells]}
            for i, o in zip(identities, outcomes, strict=True)
        ]
    except UserError as error:
        print_errors(error, "this was not run")
        return same_for_all("usage error", error.problems[0] if error.problems else "", True, broken=True)
    except RunFailed as error:
        return same_for_all("failed", str(error), False, broken=True)
    except Interrupted as error:
        if str(error):
            print(f"bnn-run: {error}", file=sys.stderr)
        return same_for_all("interrupted", str(error), True)
    except KeyboardInterrupt:
        return same_for_all("interrupted", "interrupted", True)
    except SystemExit as error:
        message = f"something in the run called exit({error.code!r})"
        return same_for_all("failed", message, False, broken=True, traceback=traceback.format_exc())
    except Exception as error:
        traceback.print_exc()
        first_line = (str(error).splitlines() or [""])[0]
        message = f"{type(error).__name__}: {first_line}"
        return same_for_all("failed", message, True, broken=True, traceback=traceback.format_exc())
