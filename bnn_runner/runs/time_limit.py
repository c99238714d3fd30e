"""The time limit: a run that would take longer is shortened openly, and only when a limit is given.

A shortened run is an ordinary run of a smaller experiment (fewer test points, fewer training points, fewer epochs of a
whole schedule), so its row is reproducible and marked; the command that gives it is printed. What was decided is kept,
so that the same command finds the same cell again.
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
"""Shares of the limit; the rest is for reading the data, figures and the estimate's own error."""
FEWEST_POINTS, FEWEST_OTHERS = 200, 50


@dataclass(frozen=True)
class Shortening:
    """What the time limit changed: {dotted key: value used}, and the values before."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    limit_minutes: float = 0.0

    @classmethod
    def of(cls, experiment: Experiment, changes: Mapping[str, Any]) -> Shortening:
        """The changes of an experiment that has a time limit."""
        before = {key: experiment.run.get(key) for key in changes}
        return cls(changes, before, experiment.settings.time_limit or 0.0)

    def summary(self) -> str:
        words = [
            f"{key} {self.before[key] if self.before[key] is not None else 'all'} -> {value}"
            for key, value in self.changes.items()
        ]
        return ", ".join(words)

    def notes(self) -> list[str]:
        return [f"shortened by time_limit={self.limit_minutes:g} min: {self.summary()}"] if self.changes else []

    def facts(self) -> dict[str, Any] | None:
        """For cell.json: {key: [value before, value used]}; None for a run that is whole."""
        return {key: [self.before[key], value] for key, value in self.changes.items()} or None


def shorten(
    cost: Cost, limit: float, task: Task, others: Sequence[int], schedule: Schedule, replicates: int = 1
) -> dict[str, Any]:
    """Smaller settings under which a run of this cost fits the limit; empty where it fits as it is.

    `others` are the numbers of validation and out-of-distribution points that are scored. In this
    order: these and the test points, so that evaluation takes at most 20 % of the limit; training
    points, so that the posterior's fit takes at most 25 %; epochs of the whole schedule, so that
    training takes at most 45 %; training points again where even one epoch would not fit.
    """
    changes: dict[str, Any] = {}
    if cost.total <= limit:
        return changes
    if cost.evaluation > EVALUATION_SHARE * limit:
        fits = EVALUATION_SHARE * limit / replicates / max(cost.evaluation_per_point, 1e-9)
        rest = sum(others)
        if rest > fits / 2:
            cap = max(FEWEST_OTHERS, _round_down(fits / 2 / len(others)))
            changes["eval.max_ood"] = cap
            if task.shifted:
                changes["eval.max_shift"] = cap
            rest = sum(min(n, cap) for n in others)
        test = max(FEWEST_POINTS, _round_down(fits - rest))
        if test < len(task.test):
            changes["data.test_size"] = test
    points = len(task.train)
    kept = points
    if cost.fit > FIT_SHARE * limit:
        kept = min(points, max(FEWEST_POINTS, int(FIT_SHARE * limit / replicates / max(cost.fit_per_point, 1e-9))))
    training = cost.training * kept / points
    spent = min(cost.evaluation, EVALUATION_SHARE * limit) + min(cost.fit, FIT_SHARE * limit)
    allowed = max(TRAINING_SHARE * limit, 0.9 * limit - spent)
    if training > allowed:
        epoch = training / schedule.epochs
        used = max(1, int(allowed / epoch))
        if epoch > allowed:
            kept = max(FEWEST_POINTS, int(kept * allowed / epoch))
        changes["schedule.epochs"] = used
        if schedule.warmup_epochs > used:
            changes["schedule.warmup_epochs"] = float(used)
    if kept < points:
        changes["data.train_size"] = _round_down(kept)
    return changes


def _round_down(value: float) -> int:
    """To two digits, so that the smaller command reads well."""
    whole = max(1, int(value))
    step = 10 ** max(0, len(str(whole)) - 2)
    return whole // step * step
