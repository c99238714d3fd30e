"""The time limit: shortens a run that would take longer, only if a limit is set.

A shortened run is an ordinary run of a smaller experiment: fewer test points, fewer training points, fewer epochs (of
a complete schedule). So it is reproducible; its command is printed and its rows are marked. The changes are stored, so
that the same command finds the same cell again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bnn_runner.experiment import Experiment
from bnn_runner.runs.cost_estimate import Cost
from bnn_runner.tasks import Task
from bnn_runner.training.schedules import Schedule

EVALUATION_SHARE, FIT_SHARE, TRAINING_SHARE = 0.2, 0.25, 0.45
"""Shares of the limit; the rest is for reading the data, figures and errors of the estimate."""
FEWEST_POINTS, FEWEST_OTHERS = 200, 50


@dataclass(frozen=True)
class Shortening:
    """What the time limit changed.

    Attributes:
        changes: Dotted key -> value used.
        before: Dotted key -> value before.
        limit_minutes: The time limit.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    limit_minutes: float = 0.0

    @classmethod
    def of(cls, experiment: Experiment, changes: Mapping[str, Any]) -> Shortening:
        """Describes the changes of an experiment that has a time limit."""
        before = {key: experiment.run.get(key) for key in changes}
        return cls(changes, before, experiment.settings.time_limit or 0.0)

    def summary(self) -> str:
        return ", ".join(
            f"{key} {self.before[key] if self.before[key] is not None else 'all'} -> {value}"
            for key, value in self.changes.items()
        )

    def notes(self) -> list[str]:
        return [f"shortened by time_limit={self.limit_minutes:g} min: {self.summary()}"] if self.changes else []

    def facts(self) -> dict[str, Any] | None:
        """Returns {key: [value before, value used]} for cell.json; None for a run that is not shortened."""
        return {key: [self.before[key], value] for key, value in self.changes.items()} or None


def shorten(
    cost: Cost, limit: float, task: Task, others: Sequence[int], schedule: Schedule, replicates: int = 1
) -> dict[str, Any]:
    """Returns smaller settings with which a run fits into the time limit; {} if it fits already.

    In this order: fewer validation, out-of-distribution and test points, until evaluation takes at most 20 % of the
    limit; fewer training points, until the fit of the posterior takes at most 25 %; fewer epochs, until training takes
    at most 45 %; still fewer training points if not even one epoch fits.

    Args:
        cost: The estimated cost of the whole run.
        limit: The limit in seconds.
        task: The data.
        others: Number of scored points of each split other than test.
        schedule: The training schedule.
        replicates: Number of cells that share the limit.

    Returns:
        Dotted key -> value.
    """
    changes: dict[str, Any] = {}
    if cost.total <= limit:
        return changes
    if cost.evaluation > EVALUATION_SHARE * limit:
        affordable = EVALUATION_SHARE * limit / replicates / max(cost.evaluation_per_point, 1e-9)  # scored points
        other_points = sum(others)
        if other_points > affordable / 2:
            cap = max(FEWEST_OTHERS, _round_down(affordable / 2 / len(others)))
            changes["eval.max_ood"] = cap
            if task.shifted:
                changes["eval.max_shift"] = cap
            other_points = sum(min(n, cap) for n in others)
        test_points = max(FEWEST_POINTS, _round_down(affordable - other_points))
        if test_points < len(task.test):
            changes["data.test_size"] = test_points
    points = len(task.train)
    kept = points
    if cost.fit > FIT_SHARE * limit:
        kept = min(points, max(FEWEST_POINTS, int(FIT_SHARE * limit / replicates / max(cost.fit_per_point, 1e-9))))
    training = cost.training * kept / points
    reserved = min(cost.evaluation, EVALUATION_SHARE * limit) + min(cost.fit, FIT_SHARE * limit)
    allowed = max(TRAINING_SHARE * limit, 0.9 * limit - reserved)
    if training > allowed:
        epoch_seconds = training / schedule.epochs
        epochs = max(1, int(allowed / epoch_seconds))
        if epoch_seconds > allowed:
            kept = max(FEWEST_POINTS, int(kept * allowed / epoch_seconds))
        changes["schedule.epochs"] = epochs
        if schedule.warmup_epochs > epochs:
            changes["schedule.warmup_epochs"] = float(epochs)
    if kept < points:
        changes["data.train_size"] = _round_down(kept)
    return changes


def _round_down(value: float) -> int:
    """Rounds down to two significant digits, so that the command of the smaller run is readable."""
    whole = max(1, int(value))
    step = 10 ** max(0, len(str(whole)) - 2)
    return whole // step * step
