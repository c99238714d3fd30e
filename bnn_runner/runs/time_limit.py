"""The time limit: what a run would cost, measured on its first steps, and how it is shortened honestly.

A shortened run is an ordinary run of a smaller experiment (fewer test points, fewer training
points, fewer epochs of a whole schedule), so its row is reproducible and marked; the command that
gives it is printed. What was decided is kept, so that the same command finds the same cell again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bnn_runner.base import FitContext, Network, Posterior, Settles
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.experiment import Experiment
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.training_rule import TuningState
from bnn_runner.posteriors.networks import NetworkEnsemble
from bnn_runner.runtime.console import LONG_AFTER_SECONDS, duration
from bnn_runner.runtime.files import write_json
from bnn_runner.tasks import Task
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig

AUTO_MINUTES_ON_CPU = 20.0
EVALUATION_SHARE, FIT_SHARE, TRAINING_SHARE = 0.2, 0.25, 0.45
"""Shares of the limit; the rest is for reading the data, figures and the estimate's own error."""
FEWEST_POINTS, FEWEST_OTHERS = 200, 50
_PROBE_POINTS, _PROBE_SECONDS, _MOST_PROBE_POINTS, _UPDATE_POINTS = 32, 2.0, 1024, 256


@dataclass(frozen=True)
class Shortening:
    """What the time limit changed: {dotted key: used}, and what was asked for."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)
    limit_minutes: float = 0.0

    def summary(self) -> str:
        words = [
            f"{key} {self.asked[key] if self.asked[key] is not None else 'all'} -> {value}"
            for key, value in self.changes.items()
        ]
        return ", ".join(words)

    def notes(self) -> list[str]:
        return [f"shortened by time_limit={self.limit_minutes:g} min: {self.summary()}"] if self.changes else []

    def describe(self) -> dict[str, Any] | None:
        """For cell.json: {key: [asked, used]}; None for a run that is whole."""
        return {key: [self.asked[key], value] for key, value in self.changes.items()} or None


@dataclass(frozen=True)
class Cost:
    """Seconds of a run, by part; the last two are a point's."""

    training: float = 0.0
    fit: float = 0.0
    evaluation: float = 0.0
    fit_per_point: float = 0.0
    evaluation_per_point: float = 0.0

    @property
    def total(self) -> float:
        return self.training + self.fit + self.evaluation

    def told(self) -> str:
        parts = {"training": self.training, "posterior": self.fit, "evaluation": self.evaluation}
        return ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())


def limit_seconds(time_limit: float | str | None, device: torch.device) -> float | None:
    """The limit in force: minutes as given; auto is 20 minutes on a CPU and none on an accelerator."""
    if time_limit == "auto":
        return AUTO_MINUTES_ON_CPU * 60 if device.type == "cpu" else None
    return None if not time_limit else 60 * float(time_limit)


def estimate(
    experiment: Experiment,
    config: TrainingConfig,
    tasks: Sequence[Task],
    missing: Sequence[Lane],
    scored_points: Sequence[int],
    device: torch.device,
) -> Cost:
    """What a run would cost: a few real training steps, and posteriors of two small subsets, timed.

    A fit that takes longer than two seconds is left there, and its time taken from how far it came.

    `missing` are the trainings that the cache lacks; `scored_points` how many points each task evaluates.
    """
    training = _training_seconds(config, missing, device)
    points = sum(len(t.train) for t in tasks)
    if training < 20 and points + sum(scored_points) < 5000:
        return Cost(training, 0.0, 0.0)
    _posterior_seconds(experiment, config, tasks[0], 8, device)  # the first call of anything is slower
    few = _PROBE_POINTS
    first = _posterior_seconds(experiment, config, tasks[0], few, device)
    many = min(_MOST_PROBE_POINTS, max(2 * few, int(few * _PROBE_SECONDS / max(sum(first), 1e-6))))
    second = _posterior_seconds(experiment, config, tasks[0], many, device)
    # Half the plain average is a floor: on a busy machine the difference of two times may come out as nothing.
    fit_slope, eval_slope = (max((second[i] - first[i]) / (many - few), 0.5 * second[i] / many) for i in (0, 1))
    fit = sum(first[0] + fit_slope * len(t.train) for t in tasks)
    evaluation = sum(first[1] + eval_slope * n for n in scored_points)
    return Cost(training, fit, evaluation, fit_slope, eval_slope)


def _training_seconds(config: TrainingConfig, missing: Sequence[Lane], device: torch.device) -> float:
    """Of all trainings, grouped as they will be: those of equal size at once where they stack."""
    by_size: dict[int, list[Lane]] = {}
    for lane in missing:
        by_size.setdefault(len(lane.task.train), []).append(lane)
    total = 0.0
    for lanes in by_size.values():
        group, times = LaneTrainer(config, lanes, device), 1
        if group.strategy == "loop":
            group, times = LaneTrainer(config, lanes[:1], device), len(lanes)
        total += (group.step_seconds() * group.total_steps + _update_seconds(config, lanes[0], device)) * times
    return total


def _update_seconds(config: TrainingConfig, lane: Lane, device: torch.device) -> float:
    """Of all updates of the prior in one training, by a rule that acts there, judged from one on a few points."""
    rule, schedule, points = config.rule, config.schedule, len(lane.task.train)
    if rule is None:
        return 0.0
    few = min(points, _UPDATE_POINTS)
    task = replace(lane.task, train=lane.task.train.subset(torch.arange(few)))
    group = LaneTrainer(config, [replace(lane, task=task)], device)
    seconds = 0.0
    for _ in range(2):  # the first call of anything is slower
        begin = time.perf_counter()
        rule.update(group.network(0), task, TuningState(dict(group.prior)), 1, lane.seed)
        seconds = time.perf_counter() - begin
    used = min(points, getattr(rule, "points", None) or points)
    updates = sum(rule.due(schedule, epoch) for epoch in range(1, rule.epochs(schedule) + 1))
    return updates * seconds * max(1.0, used / few)


def _posterior_seconds(
    experiment: Experiment, config: TrainingConfig, task: Task, points: int, device: torch.device
) -> tuple[float, float]:
    """Seconds to fit the posterior on `points` training points and to evaluate as many test points; initial weights."""

    def some(n: int) -> torch.Tensor:
        return torch.arange(min(points, n))

    small = replace(
        task,
        train=task.train.subset(some(len(task.train))),
        val=task.val.subset(some(0)),
        test=task.test.subset(some(len(task.test))),
        ood={},
    )
    networks: list[Network] = []
    for i, spec in enumerate(experiment.method.needs()):
        group = LaneTrainer(replace(config, noise_transform=spec.noise_transform), [Lane(small, i)], device)
        networks.append(group.network(0))
    method = experiment.method
    if isinstance(method, Settles):
        method = method.settled(task, networks[0])
    settings, begin = experiment.settings.eval, time.perf_counter()

    def progress(stage: str, done: int, total: int) -> None:
        spent = time.perf_counter() - begin
        if 0 < done < total and spent > _PROBE_SECONDS:
            raise _LongFit(spent * total / done)

    predictive, num_draws, share = experiment.method.predictive, settings.num_draws, 1.0
    try:
        posterior: Posterior = method.fit(
            small, networks, FitContext(0, Fixed(1.0), experiment.schedule, progress=progress)
        )
        fit = time.perf_counter() - begin
    except _LongFit as long:
        # Its draws are networks, as far as their cost goes: some copies of one stand for them.
        fit, predictive, num_draws = long.seconds, "draws", min(num_draws, 8)
        posterior, share = NetworkEnsemble((networks[0],) * num_draws, {}), settings.num_draws / num_draws
    middle = time.perf_counter()
    evaluate(small, posterior, predictive, num_draws, 0, settings.batch_size, max_ood=0)
    return fit, share * (time.perf_counter() - middle)


class _LongFit(Exception):
    """A fit that takes longer than a probe may, left at its first progress after that; `seconds` is all of it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"about {seconds:.0f} s")
        self.seconds = seconds


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


def apply(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """The experiment with some dotted keys of its components changed, in the objects and in the configuration."""
    config = dict(experiment.config)
    parts: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, name = key.split(".")
        config[group] = {**config[group], name: value}
        parts.setdefault(group, {})[name] = value
    settings = replace(experiment.settings, eval=replace(experiment.settings.eval, **parts.pop("eval", {})))
    components = {group: replace(getattr(experiment, group), **values) for group, values in parts.items()}
    return replace(experiment, config=config, settings=settings, **components)


def asked(experiment: Experiment, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the changed keys had."""
    return {key: experiment.config[key.split(".")[0]].get(key.split(".")[1]) for key in changes}


def remembered(path: Path) -> dict[str, Any] | None:
    """What an earlier run of the same request decided, or None."""
    try:
        changes: dict[str, Any] = json.loads(path.read_text())
        return changes
    except (OSError, json.JSONDecodeError):
        return None


def remember(path: Path, changes: Mapping[str, Any]) -> None:
    """Keep what was decided for the next run of the same request."""
    write_json(path, dict(changes))


def announce(cost: Cost, shortening: Shortening, command: str, say: Callable[[str], None]) -> None:
    """Say what the run costs and, where it is shortened, how, and how to have the whole of it."""
    if cost.total > LONG_AFTER_SECONDS:
        say(f"this run would take about {duration(cost.total)} here ({cost.told()})")
        if not shortening.changes and cost.total > 3600:
            say(f"a smaller one that shows the same is the same command with time_limit={AUTO_MINUTES_ON_CPU:g}")
    if shortening.changes:
        minutes = f"{shortening.limit_minutes:g} min"
        say(f"SHORTENED to fit time_limit={minutes}: {shortening.summary()}. Its rows are marked.")
        say(f"the smaller experiment by itself:  {command}")
        say("the whole of it:  add time_limit=null (or run it on a GPU)")
