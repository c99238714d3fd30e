"""What a run would take: a few real training steps and the posteriors of two small subsets, timed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from bnn_runner.base import DecidesBySize, FitContext, Network, Posterior
from bnn_runner.evaluation.evaluate import evaluate_split
from bnn_runner.experiment import Experiment
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.training_rule import TuningState
from bnn_runner.posteriors.networks import NetworkEnsemble
from bnn_runner.runtime.console import LONG_AFTER_SECONDS, Progress, duration
from bnn_runner.tasks import Task
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.state import Lane, TrainingConfig

_PROBE_POINTS, _PROBE_SECONDS, _MOST_PROBE_POINTS, _UPDATE_POINTS = 32, 2.0, 1024, 256


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

    def times(self, factor: float) -> Cost:
        """The same run on a machine that takes `factor` times as long."""
        return replace(
            self, training=factor * self.training, fit=factor * self.fit, evaluation=factor * self.evaluation
        )

    def describe(self) -> str:
        parts = {"training": self.training, "posterior": self.fit, "evaluation": self.evaluation}
        return ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())


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
    if isinstance(method, DecidesBySize):
        method = method.decided(task, networks[0])
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
        posterior, share = NetworkEnsemble((networks[0],) * num_draws), settings.num_draws / num_draws
    middle = time.perf_counter()
    evaluate_split(small, posterior, small.test, predictive, num_draws, 0, settings.batch_size)
    return fit, share * (time.perf_counter() - middle)


class _LongFit(Exception):
    """A fit that takes longer than a probe may, left at its first progress after that; `seconds` is all of it."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"about {seconds:.0f} s")
        self.seconds = seconds


class Forecast:
    """A `Progress` that compares the first steps of training with the estimate, and corrects that once if it was off.

    A machine that was busy for a moment while the estimate was made gives one that is far too long.
    """

    WATCHED_SECONDS, OFF = 10.0, 1.3

    def __init__(self, cost: Cost, progress: Progress, say: Callable[[str], None]) -> None:
        self.cost, self.progress, self.say = cost, progress, say
        self._start: tuple[float, int] | None = None
        self._corrected = cost.training == 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        self.progress(stage, done, total)
        if self._corrected or not stage.startswith("training"):
            return
        now = time.perf_counter()
        if self._start is None:
            self._start = now, done
            return
        begun, first = self._start
        if now - begun < self.WATCHED_SECONDS or done == first:
            return
        self._corrected = True
        listed = re.search(r" of (\d+)$", stage)  # one of several that are trained one after the other
        factor = (now - begun) / (done - first) * total * (int(listed[1]) if listed else 1) / self.cost.training
        actual = self.cost.times(factor)
        if max(factor, 1 / factor) > self.OFF and max(self.cost.total, actual.total) > LONG_AFTER_SECONDS:
            self.say(f"estimate corrected after {done - first} steps: about {duration(actual.total)} in all")
