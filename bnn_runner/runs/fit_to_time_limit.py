"""Before training: estimates how long a run takes, and shortens it to a time limit if one is set."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bnn_runner.config.keys import digest
from bnn_runner.experiment import Experiment
from bnn_runner.runs.cell import cell_of
from bnn_runner.runs.cost_estimate import Cost, estimate
from bnn_runner.runs.session import CellRun, Session
from bnn_runner.runs.time_limit import Shortening, shorten
from bnn_runner.runtime.console import LONG_AFTER_SECONDS, duration
from bnn_runner.runtime.files import write_json
from bnn_runner.training.provider import NetworkProvider
from bnn_runner.training.state import Lane

SHORT_MINUTES = 20.0
"""For a longer run, the command of a smaller run of about this length is printed."""


def earlier_shortening(experiments: Sequence[Experiment], runs: int) -> Shortening | None:
    """Returns the shortening of an earlier run of the same cells; None without one, or without a time limit.

    Args:
        experiments: One for each cell.
        runs: Number of runs that these cells belong to; each has its own time limit.
    """
    first = experiments[0]
    if first.settings.time_limit is None or first.settings.force:
        return None
    try:
        changes = json.loads(_record(experiments, runs).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return Shortening.of(first, changes)


def fit_to_time_limit(
    cell_runs: Sequence[CellRun], runs: int, provider: NetworkProvider, session: Session
) -> tuple[Shortening, Cost]:
    """Estimates the cost of the cells, and the changes that fit them into the time limit.

    Args:
        cell_runs: The cells.
        runs: Number of runs that the cells belong to; each has its own time limit.
        provider: Knows which networks are in the cache.
        session: Device and console.

    Returns:
        The changes (none without a time limit), and the cost without them.
    """
    first = cell_runs[0].experiment
    cost = _cost(cell_runs, provider, session)
    minutes = first.settings.time_limit
    if minutes is None:
        return Shortening(), cost
    changes = _shorter(cost, 60 * minutes * runs, cell_runs)
    record = _record([c.experiment for c in cell_runs], runs)
    if changes or record.exists():  # a forced run may no longer need changes
        write_json(record, changes)
    return Shortening.of(first, changes), cost


def _record(experiments: Sequence[Experiment], runs: int) -> Path:
    """File that stores the changes of these cells."""
    request = digest([[cell_of(e).hash for e in experiments], experiments[0].settings.time_limit, runs])
    return experiments[0].settings.cache_path / "plans" / f"{request}.json"


def _cost(cell_runs: Sequence[CellRun], provider: NetworkProvider, session: Session) -> Cost:
    needed = [t for c in cell_runs for t in c.trainings if t.trained and t.pretrained is None]
    missing = [Lane(t.task, t.lane_seed, t.key) for t in needed if not provider.cache.has(t.key)]
    scored = [len(c.task.test) + sum(_other_points(c)) for c in cell_runs]
    config = replace(provider.config, noise_transform=needed[0].noise_transform if needed else None)
    tasks = [c.task for c in cell_runs]
    return estimate(cell_runs[0].experiment, config, tasks, missing, scored, session.device)


def _shorter(cost: Cost, limit_seconds: float, cell_runs: Sequence[CellRun]) -> dict[str, Any]:
    first = cell_runs[0]
    return shorten(cost, limit_seconds, first.task, _other_points(first), first.experiment.schedule, len(cell_runs))


def _other_points(cell_run: CellRun) -> list[int]:
    """Number of scored points of the validation part, of each out-of-distribution set and of each level of shift."""
    settings, task = cell_run.experiment.settings.eval, cell_run.task
    sizes = [(len(s), settings.max_ood) for name, s in task.splits().items() if name not in ("train", "test")]
    sizes += [(len(s), settings.max_shift) for s in task.shifted.values()]
    return [n if cap is None else min(n, cap) for n, cap in sizes]


def announcement(cost: Cost, cell_runs: Sequence[CellRun], runs: int, shortening: Shortening) -> list[str]:
    """Returns lines for the user: how long the run takes (if over a minute), and how it is or could be shortened."""
    first, lines = cell_runs[0], []
    if cost.total > LONG_AFTER_SECONDS:
        lines.append(f"this run will take about {duration(cost.total)} ({cost.describe()}); Ctrl-C keeps what is done")
    if shortening.changes:
        minutes = f"{shortening.limit_minutes:g} min"
        lines.append(f"SHORTENED to fit time_limit={minutes}: {shortening.summary()}; its rows are marked")
        lines.append(f"  the same run without a limit:  {first.shorter_command(shortening.changes)}")
        lines.append("  the full run:  this command without time_limit")
    elif cost.total > 60 * SHORT_MINUTES and (smaller := _shorter(cost, 60 * SHORT_MINUTES * runs, cell_runs)):
        lines.append(f"  for a run of about {SHORT_MINUTES:g} min:  {first.shorter_command(smaller)}")
    return lines
