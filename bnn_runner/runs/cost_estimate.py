"""Estimates the time of a run by measuring a few training steps and the posteriors of two small subsets."""

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
    """Seconds of a run by part, and seconds per training point (fit) and per scored point (evaluation)."""

    training: float = 0.0
    fit: float = 0.0
    evaluation: float = 0.0
    fit_per_point: float = 0.0
    evaluation_per_point: float = 0.0

    @property
    def total(self) -> float:
        return self.training + self.fit + self.evaluation

    def times(self, factor: float) -> Cost:
        """Returns the cost of the same run on a machine that takes `factor` times as long."""
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
    """Estimates the cost of a run.

    Measures a few training steps, and the posteriors of two small subsets. A fit that takes longer than two seconds is
    stopped, and its time extrapolated from its progress.

    Args:
        experiment: The method and its settings.
        config: Settings of the training.
        tasks: The data of each cell.
        missing: The networks that are not in the cache.
        scored_points: Number of points that each cell evaluates.
        device: Where the run computes.
    """
    training = _training_seconds(config, missing, device)
    points = sum(len(t.train) for t in tasks)
    if training < 20 and points + sum(scored_points) < 5000:
        return Cost(training, 0.0, 0.0)
    _posterior_seconds(experiment, config, tasks[0], 8, device)  # warm-up: first calls are slower
    few = _PROBE_POINTS
    first = _posterior_seconds(experiment, config, tasks[0], few, device)
    many = min(_MOST_PROBE_POINTS, max(2 * few, int(few * _PROBE_SECONDS / max(sum(first), 1e-6))))
    second = _posterior_seconds(experiment, config, tasks[0], many, device)
    # At least half the average: on a busy machine the difference of two measured times may be zero or negative.
    fit_slope, eval_slope = (max((second[i] - first[i]) / (many - few), 0.5 * second[i] / many) for i in (0, 1))
    fit = sum(first[0] + fit_slope * len(t.train) for t in tasks)
    evaluation = sum(first[1] + eval_slope * n for n in scored_points)
    return Cost(training, fit, evaluation, fit_slope, eval_slope)


def _training_seconds(config: TrainingConfig, missing: Sequence[Lane], device: torch.device) -> float:
    """Seconds of all trainings, grouped as in the run: those of equal size at once if they can be stacked."""
    by_size: dict[int, list[Lane]] = {}
    for lane in missing:
        by_size.setdefault(len(lane.task.train), []).append(lane)
    total = 0.0
    for lanes in by_size.values():
        trainer, repeats = LaneTrainer(config, lanes, device), 1
        if trainer.strategy == "loop":
            trainer, repeats = LaneTrainer(config, lanes[:1], device), len(lanes)
        total += (trainer.step_seconds() * trainer.total_steps + _update_seconds(config, lanes[0], device)) * repeats
    return total


def _update_seconds(config: TrainingConfig, lane: Lane, device: torch.device) -> float:
    """Seconds of all updates of the prior in one training by a training rule, from one update on a few points."""
    rule, schedule, points = config.rule, config.schedule, len(lane.task.train)
    if rule is None:
        return 0.0
    few = min(points, _UPDATE_POINTS)
    task = replace(lane.task, train=lane.task.train.subset(torch.arange(few)))
    trainer = LaneTrainer(config, [replace(lane, task=task)], device)
    seconds = 0.0
    for _ in range(2):  # the first call is a warm-up
        begin = time.perf_counter()
        rule.update(trainer.network(0), task, TuningState(dict(trainer.prior)), 1, lane.seed)
        seconds = time.perf_counter() - begin
    rule_points = min(points, getattr(rule, "points", None) or points)
    updates = sum(rule.due(schedule, epoch) for epoch in range(1, rule.epochs(schedule) + 1))
    return updates * seconds * max(1.0, rule_points / few)


def _posterior_seconds(
    experiment: Experiment, config: TrainingConfig, task: Task, points: int, device: torch.device
) -> tuple[float, float]:
    """Seconds to fit a posterior to `points` training points, and to evaluate as many test points.

    The networks have their initial weights.
    """

    def first(n: int) -> torch.Tensor:
        return torch.arange(min(points, n))

    small = replace(
        task,
        train=task.train.subset(first(len(task.train))),
        val=task.val.subset(first(0)),
        test=task.test.subset(first(len(task.test))),
        ood={},
    )
    networks: list[Network] = []
    for i, spec in enumerate(experiment.method.needs()):
        trainer = LaneTrainer(replace(config, noise_transform=spec.noise_transform), [Lane(small, i)], device)
        networks.append(trainer.network(0))
    method = experiment.method
    if isinstance(method, DecidesBySize):
        method = method.decided(task, networks[0])
    settings, begin = experiment.settings.eval, time.perf_counter()

    def progress(stage: str, done: int, total: int) -> None:
        elapsed = time.perf_counter() - begin
        if 0 < done < total and elapsed > _PROBE_SECONDS:
            raise _LongFit(elapsed * total / done)

    predictive, num_draws, factor = experiment.method.predictive, settings.num_draws, 1.0
    try:
        posterior: Posterior = method.fit(
            small, networks, FitContext(0, Fixed(1.0), experiment.schedule, progress=progress)
        )
        fit = time.perf_counter() - begin
    except _LongFit as long:
        # A draw costs as much as a network, so copies of one network stand in for the draws.
        fit, predictive, num_draws = long.seconds, "draws", min(num_draws, 8)
        posterior, factor = NetworkEnsemble((networks[0],) * num_draws), settings.num_draws / num_draws
    middle = time.perf_counter()
    evaluate_split(small, posterior, small.test, predictive, num_draws, 0, settings.batch_size)
    return fit, factor * (time.perf_counter() - middle)


class _LongFit(Exception):
    """Stops a fit that takes longer than the probe allows; `seconds` is the estimate of the whole fit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"about {seconds:.0f} s")
        self.seconds = seconds


class Forecast:
    """A `Progress` callback that compares the first steps of training with the estimate, and corrects it once.

    If the machine was busy for a moment during the measurements, the estimate is far too long.

    Args:
        cost: The estimate.
        progress: Receives every call.
        say: Prints the correction, if the estimate is off by more than `TOLERATED_FACTOR`.
    """

    OBSERVED_SECONDS, TOLERATED_FACTOR = 10.0, 1.3

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
        start, first = self._start
        if now - start < self.OBSERVED_SECONDS or done == first:
            return
        self._corrected = True
        several = re.search(r" of (\d+)$", stage)  # the stage is one of several trainings, one after the other
        factor = (now - start) / (done - first) * total * (int(several[1]) if several else 1) / self.cost.training
        actual = self.cost.times(factor)
        off = max(factor, 1 / factor) > self.TOLERATED_FACTOR
        if off and max(self.cost.total, actual.total) > LONG_AFTER_SECONDS:
            self.say(f"estimate corrected after {done - first} steps: about {duration(actual.total)} in total")
