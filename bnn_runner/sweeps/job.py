"""The functions that Hydra calls: `job` for each job of a sweep, here or elsewhere (it is pickled by its name).

A job finds its resolved configuration in the sweep's scratch folder; what Hydra composed for it is not used.
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
from bnn_runner.sweeps.child_process import run_apart
from bnn_runner.sweeps.plan import Loader
from bnn_runner.sweeps.scratch_files import Member, SweepState, read_job, read_outcomes, write_outcome

Outcome = dict[str, Any]
"""How one job ended, as plain values: number, overrides, cells, status and message.

`printed` says that the message is on the screen already, `broken` that what ended one job ended all that ran with it.
"""


def job(config: DictConfig) -> None:
    """Run one job of a sweep, or several as lanes, and leave the outcomes in the job's scratch folder.

    Nothing but a request to stop leaves this function, so that a sweep continues.
    """
    del config
    hydra: Any = HydraConfig.get()
    folder, start = Path(hydra.runtime.output_dir), Path(hydra.runtime.cwd)
    added = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
    config_dir = Path(added[0]) if added else None
    overrides = list(hydra.overrides.task)
    ticket = Ticket(overrides, int(hydra.job.num), folder, Path(hydra.sweep.dir), config_dir, start)
    if asked := carry_out(ticket):
        _pass_back(asked)


@dataclass(frozen=True)
class Ticket:
    """A job of a sweep as it travels: overrides, number, its scratch folder and the sweep's, and where it was typed.

    `environment` is added to that of the process that runs it.
    """

    overrides: list[str]
    number: int
    folder: Path
    sweep: Path
    config_dir: Path | None
    start: Path
    environment: dict[str, str] = field(default_factory=dict)


def carry_out(ticket: Ticket) -> int:
    """Run a job of a sweep and leave its outcomes in its folder; the signal that asked to stop (or 0)."""
    outcomes, asked = _outcomes(ticket)
    write_outcome(ticket.folder, outcomes)
    return asked


def _outcomes(ticket: Ticket) -> tuple[list[Outcome], int]:
    """The outcomes of a job's members, and the signal that asked to stop (or 0)."""
    number, sweep = ticket.number, ticket.sweep
    state = SweepState.read(sweep)
    members = read_job(sweep, number) or [Member(number, ticket.overrides)]
    ended_badly = ("failed", "usage error")
    if state is not None and state.fail_fast and any(o["status"] in ended_badly for o in read_outcomes(sweep)):
        skipped = {"status": "not run", "message": "another job failed (fail_fast=true)", "printed": False}
        return [m.described() | skipped for m in members], 0
    count = os.environ.get("BNN_RUN_JOBS", "?") if state is None else len(state.groups)
    shown = " ... ".join(dict.fromkeys(m.described()["overrides"] for m in (members[0], members[-1])))
    print(f"\n[{number + 1}/{count}] {shown}", file=sys.stderr, flush=True)
    outcomes, asked = apart(members, ticket)
    if len(members) > 1 and not asked and any(o.get("broken") for o in outcomes):
        print(f"bnn-run: {len(members)} jobs that ran as one failed; each now runs by itself", file=sys.stderr)
        outcomes = []
        for member in members:
            own, asked = apart([member], ticket)
            outcomes += own
            if asked:
                break
    return outcomes, asked


def _pass_back(number: int) -> None:
    """A signal that asked us to stop, to whom it was meant for: a scheduler's handler, which requeues, or the sweep."""
    if number == signal.SIGTERM and requeued_by_slurm():
        raise SystemExit(0)  # without a result, which a launcher would take for the last
    handler = signal.getsignal(number)
    if callable(handler) and handler is not signal.default_int_handler:
        os.kill(os.getpid(), number)
        return
    raise KeyboardInterrupt


def requeued_by_slurm() -> bool:
    """Whether this process belongs to a job that Slurm is about to run again."""
    name = os.environ.get("SLURM_JOB_ID")
    if name is None:
        return False
    try:
        shown = subprocess.run(
            ["scontrol", "show", "job", name], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    restarts = re.search(r"\bRestarts=(\d+)", shown.stdout)
    return restarts is not None and int(restarts[1]) > int(os.environ.get("SLURM_RESTART_COUNT", 0))


def apart(members: Sequence[Member], ticket: Ticket) -> tuple[list[Outcome], int]:
    """Run members in a process of their own: their outcomes, whatever ended it, and the signal that asked to stop."""
    with tempfile.TemporaryDirectory(prefix="bnn-run-") as scratch:
        result = Path(scratch) / "result.json"
        arguments = result, list(members), ticket.config_dir, ticket.start
        code, asked = run_apart(_run_into, *arguments, environment=ticket.environment)
        if result.exists():
            outcomes: list[Outcome] = json.loads(result.read_text(encoding="utf-8"))
        else:
            stopped = bool(asked or code > 128)
            status = "interrupted" if stopped else "failed"
            outcome = {"status": status, "message": _ended(code), "printed": False, "broken": not stopped}
            outcomes = [m.described() | outcome for m in members]
    if len(members) == 1 or not any(o.get("broken") for o in outcomes):
        for outcome in outcomes:
            _mark(outcome)
    return outcomes, asked


def _ended(code: int) -> str:
    if code >= 0:
        return f"the process of the run ended by itself with code {code}"
    name = signal.Signals(-code).name
    hint = ": did it run out of memory?" if name == "SIGKILL" else ""
    return f"the process of the run was ended by {name}{hint}"


def _mark(outcome: Outcome) -> None:
    """FAILED in cells that the run itself could not mark."""
    if outcome["status"] == "failed":
        for cell in map(Path, outcome["cells"]):
            if status_of(cell) == "open":
                with contextlib.suppress(OSError):  # a full disk
                    set_status(cell, "failed", f"{outcome['message']}\n\n{outcome.get('traceback', '')}")


def _run_into(result: Path, members: list[Member], config_dir: Path | None, start: Path) -> None:
    outcomes = run_members(members, config_dir, start)
    partial = result.with_suffix(".tmp")
    partial.write_text(json.dumps(outcomes), encoding="utf-8")
    partial.replace(result)


def run_members(members: Sequence[Member], config_dir: Path | None, start: Path) -> list[Outcome]:
    """Run the members' experiments together; the outcome of each.

    A member that another sweeper planned has no configuration yet: its overrides are resolved here.
    """

    def configs() -> list[RunConfig]:
        loader = Loader(config_dir, start)
        return [loader.load(m.overrides) if m.config is None else RunConfig.from_text(m.config) for m in members]

    return run_configs(configs, [m.described() for m in members], estimated=False)


def run_configs(
    configs: Callable[[], Sequence[RunConfig]], described: Sequence[Outcome], estimated: bool
) -> list[Outcome]:
    """Build and run experiments together; the outcome of each, whatever ends them.

    Args:
        configs: gives the resolved configurations.
        described: what is known of each outcome before.
        estimated: whether a run says what it will take.
    """

    def all_of_them(status: str, message: str, printed: bool, **more: Any) -> list[Outcome]:
        return [{**d, "status": status, "message": message, "printed": printed, **more} for d in described]

    keep_freed_memory()
    try:
        from bnn_runner import runner
        from bnn_runner.experiment import Experiment, build_experiment

        experiments: list[Experiment] = []
        for config in configs():
            experiments.append(build_experiment(config, experiments[-1] if experiments else None))
        ended = runner.run_together(experiments, estimated=estimated)
        return [
            {**d, "status": o.status, "message": o.message, "printed": False, "cells": [str(c) for c in o.cells]}
            for d, o in zip(described, ended, strict=True)
        ]
    except UserError as error:
        print_errors(error, "this was not run")
        return all_of_them("usage error", error.problems[0] if error.problems else "", True, broken=True)
    except RunFailed as error:
        return all_of_them("failed", str(error), False, broken=True)
    except Interrupted as error:
        if str(error):
            print(f"bnn-run: {error}", file=sys.stderr)
        return all_of_them("interrupted", str(error), True)
    except KeyboardInterrupt:
        return all_of_them("interrupted", "interrupted", True)
    except SystemExit as error:
        message = f"something in the run called exit({error.code!r})"
        return all_of_them("failed", message, False, broken=True, traceback=traceback.format_exc())
    except Exception as error:
        traceback.print_exc()
        first = (str(error).splitlines() or [""])[0]
        message = f"{type(error).__name__}: {first}"
        return all_of_them("failed", message, True, broken=True, traceback=traceback.format_exc())
