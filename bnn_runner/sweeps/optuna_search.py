"""The sweeper hydra/sweeper=optuna: Optuna proposes hyperparameters, cells are the trials, `objective=` is optimised.

The study is a file in the output folder, named by a hash of what defines the search. So the same command resumes a
search that was killed, and a larger number of trials resumes a finished one.
"""

from __future__ import annotations

import importlib
import itertools
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from bnn_runner.config.keys import digest
from bnn_runner.config.overrides import as_typed
from bnn_runner.errors import UserError
from bnn_runner.runtime.files import short_path
from bnn_runner.sweeps.plan import LANE_KEYS, Plan
from bnn_runner.sweeps.rounds import Rounds

if TYPE_CHECKING:
    from bnn_runner.sweeps.objective import Objective

RETRIED = "retry_of"
"""Attribute of a trial that replaces a failed one: the number of the failed trial."""
SamplerName = Literal["tpe", "gp", "random"]


class StudySweeper(Sweeper):
    """Searches the swept keys for the best objective. The value of a trial is the mean over all seeds and splits.

    Trial n depends only on `seed`, n and the earlier trials, not on interruptions.

    Args:
        trials: Total number of trials.
        at_once: Number of trials that are proposed at a time.
        sampler: How values are proposed.
        startup: Number of first trials, proposed at random.
        seed: Seed of the proposals.
        max_lanes: Largest number of jobs that are trained together.
        params: {key: values} to search in addition to the typed ones.

    Raises:
        UserError: If a value is out of range.
    """

    def __init__(
        self,
        trials: int,
        at_once: int,
        sampler: SamplerName,
        startup: int,
        seed: int,
        max_lanes: int,
        params: Mapping[str, Any] | None = None,
    ):
        problems = [
            f"hydra.sweeper.{name} must be at least 1; got {value}."
            for name, value in (("trials", trials), ("at_once", at_once))
            if value < 1
        ]
        if sampler not in get_args(SamplerName):
            problems.append(f"hydra.sweeper.sampler must be one of {', '.join(get_args(SamplerName))}; got {sampler}.")
        if problems:
            raise UserError(*problems)
        self.trials, self.at_once, self.sampler, self.startup = trials, at_once, sampler, startup
        self.seed, self.max_lanes, self.params = seed, max_lanes, dict(params or {})
        self.rounds: Rounds | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Imports Optuna and prepares the launcher. Raises `UserError` without Optuna or without an objective."""
        try:
            self.optuna: Any = importlib.import_module("optuna")
        except ModuleNotFoundError as error:
            raise UserError(
                "hydra/sweeper=optuna requires Optuna. Install it: pip install 'bnn-runner[optuna]'"
            ) from error
        if config.objective is None:
            raise UserError(
                "hydra/sweeper=optuna requires an objective. Set one as split/score: objective=val/marginal_loglik."
            )
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        self.rounds = Rounds(hydra_context, task_function, config, self.max_lanes)

    def sweep(self, arguments: list[str]) -> None:
        """Runs the search. Raises `UserError` if no key is searched or the objective does not exist."""
        assert self.rounds is not None
        space = read_space(self.rounds.parse(self.params, arguments), self.optuna.distributions)
        objective = self._objective(space)
        study, file = self._study(space, objective)
        self._print_start(space, objective, study, short_path(file))
        self.rounds.launch(Plan((), (), retry_failed=False))  # the summary needs a plan, even if nothing is left to run
        if self.rounds.config.plan_only:
            return
        failed = False
        if batch := self._failed_trials(study, space):
            plan = self._run(space, batch)
            failed = plan.retry_failed and self._record_results(study, space, objective, batch, plan, retried=True)
        while not (failed and self.rounds.config.fail_fast) and (batch := self._next_trials(study, space)):
            failed = self._record_results(study, space, objective, batch, self._run(space, batch))
        if failed and self.rounds.config.fail_fast:
            print("search: a trial failed (fail_fast=true)", file=sys.stderr)
        self._print_best(study, space, objective)

    def _run(self, space: Space, batch: Sequence[tuple[int, dict[str, Any]]]) -> Plan:
        """Runs the unfinished jobs of these trials."""
        assert self.rounds is not None
        points = [point for _, params in batch for point in space.points(params)]
        plan = self.rounds.plan(self.rounds.with_existing_keys(points))
        self.rounds.launch(plan)
        return plan

    def _failed_trials(self, study: Any, space: Space) -> list[tuple[int, dict[str, Any]]]:
        """Number and values of the failed trials of earlier commands that no other trial replaces."""
        replaced = {t.user_attrs.get(RETRIED) for t in study.trials}
        failed = study.get_trials(states=[self.optuna.trial.TrialState.FAIL])
        proposed = [t for t in failed if t.params.keys() == space.searched.keys()]
        return [(t.number, t.params) for t in proposed if t.number not in replaced]

    def _objective(self, space: Space) -> Objective:
        from bnn_runner.experiment import load_experiment
        from bnn_runner.sweeps.objective import find_objective

        assert self.rounds is not None
        example = space.points({name: _first_value(d) for name, d in space.searched.items()})[0]
        experiment = load_experiment(example, self.rounds.config_dir, self.rounds.start)
        return find_objective(str(self.rounds.config.objective), experiment)

    def _study(self, space: Space, objective: Objective) -> tuple[Any, Path]:
        """Opens or creates the study of this search. Returns it and its file."""
        assert self.rounds is not None
        identity = [space.identity(), objective.name, self.sampler, self.startup, self.seed, self.at_once]
        folder = self.rounds.output_dir / "studies"
        if not self.rounds.config.plan_only:
            folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{objective.name.replace('/', '-')}-{digest(identity)[:8]}.db"
        on_disk = file.exists() or not self.rounds.config.plan_only
        try:
            study = self.optuna.create_study(
                storage=f"sqlite:///{file}" if on_disk else None,
                study_name="bnn-run",
                direction="maximize" if objective.better == "higher" else "minimize",
                load_if_exists=True,
            )
        except Exception as error:  # the database behind Optuna raises errors of any kind
            reason = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"Could not open the study {file} ({type(error).__name__}: {reason}). Remove the file to start "
                "the search again; finished cells are not run again."
            ) from error
        return study, file

    def _next_trials(self, study: Any, space: Space) -> list[tuple[int, dict[str, Any]]]:
        """Number and values of the next trials: those that an earlier command left running, then new ones."""
        running = study.get_trials(states=[self.optuna.trial.TrialState.RUNNING])
        batch = [(t.number, t.params) for t in running if t.params.keys() == space.searched.keys()]
        for trial in running:
            if trial.params.keys() != space.searched.keys():  # killed before its values were proposed
                study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
        started = sum(RETRIED not in t.user_attrs for t in study.trials)
        end = started + -started % self.at_once  # the end of an interrupted round
        if not batch and end == started:
            end += self.at_once
        for number in range(started, min(end, self.trials)):
            study.sampler = self._sampler(number)
            trial = study.ask(space.searched)
            batch.append((trial.number, trial.params))
        return batch

    def _sampler(self, number: int) -> Any:
        from bnn_runner.rng import derive_seed

        seed = derive_seed(self.seed, "search", number) % 2**32
        samplers = self.optuna.samplers
        if self.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        if self.sampler == "gp":
            return samplers.GPSampler(seed=seed, n_startup_trials=self.startup)
        return samplers.TPESampler(seed=seed, n_startup_trials=self.startup)

    def _print_start(self, space: Space, objective: Objective, study: Any, file: str) -> None:
        ended = len(study.trials) - len(study.get_trials(states=[self.optuna.trial.TrialState.RUNNING]))
        lines = [
            f"search: {objective.name} ({objective.better} is better), {self.trials} trials, "
            f"{ended} done before: {file}"
        ]
        lines += [f"  {name}: {_describe(d)}" for name, d in space.searched.items()]
        if space.averaged:
            lines.append(f"  each trial is a mean over {', '.join(space.averaged)} ({len(space.repeats)} jobs)")
        if objective.column.split == "test":
            lines.append(
                "  note: a search on the test set biases the test scores of its result. Use objective=val/... instead."
            )
        print("\n".join(lines), file=sys.stderr)

    def _record_results(
        self,
        study: Any,
        space: Space,
        objective: Objective,
        batch: Sequence[tuple[int, dict[str, Any]]],
        plan: Plan,
        retried: bool = False,
    ) -> bool:
        """Records the values of trials in the study and prints them. Returns whether a trial failed.

        Optuna does not allow changing a finished trial: the value of a `retried` one is added as a new trial.
        """
        failed = False
        for i, (number, params) in enumerate(batch):
            jobs = plan.jobs[i * len(space.repeats) : (i + 1) * len(space.repeats)]
            values = [objective.read(cell) for job in jobs for cell in job.cells]
            if retried and values and all(map(math.isfinite, values)):
                create, attributes = self.optuna.trial.create_trial, {RETRIED: number}
                mean = statistics.fmean(values)
                study.add_trial(create(params=params, distributions=space.searched, value=mean, user_attrs=attributes))
                shown = f"{mean:.6g}"
            elif values and all(map(math.isfinite, values)):
                study.tell(number, statistics.fmean(values), skip_if_finished=True)
                shown = f"{statistics.fmean(values):.6g}"
            else:
                study.tell(number, state=self.optuna.trial.TrialState.FAIL, skip_if_finished=True)
                shown, failed = "no value (a cell failed, or its score is not finite)", True
            print(f"trial {number}: {objective.name} = {shown}  {space.shown(params)}", file=sys.stderr)
        return failed

    def _print_best(self, study: Any, space: Space, objective: Objective) -> None:
        assert self.rounds is not None
        complete = study.get_trials(states=[self.optuna.trial.TrialState.COMPLETE])
        print(f"\nsearch: {len(study.trials)} trials, {len(complete)} with a value", file=sys.stderr)
        if not complete:
            return
        best = study.best_trial
        arguments = [*(["-m"] if len(space.repeats) > 1 else []), *space.command(best.params)]
        if self.rounds.config_dir is not None:
            arguments += ["--config-dir", str(self.rounds.config_dir)]
        print(f"best: {objective.name} = {best.value:.6g} (trial {best.number})  {space.shown(best.params)}")
        print(f"  {shlex.join(['bnn-run', *arguments])}")


@dataclass(frozen=True)
class Space:
    """What a search varies.

    Attributes:
        fixed: Overrides of every trial.
        searched: Key -> distribution.
        prefixes: Key -> the '+' signs that Hydra requires before it.
        averaged: Overrides of the seeds and splits over which a trial averages.
        repeats: Their combinations, one for each job of a trial.
    """

    fixed: tuple[str, ...]
    searched: dict[str, Any]
    prefixes: dict[str, str]
    averaged: tuple[str, ...]
    repeats: tuple[tuple[str, ...], ...]

    def points(self, params: Mapping[str, Any]) -> list[list[str]]:
        """Returns the overrides of each job of a trial."""
        proposed = [f"{self.prefixes[name]}{name}={value}" for name, value in params.items()]
        return [[*self.fixed, *proposed, *repeat] for repeat in self.repeats]

    def command(self, params: Mapping[str, Any]) -> list[str]:
        """Returns the overrides of a trial as the user would type them."""
        overrides = [*self.fixed, *(f"{name}={value}" for name, value in params.items()), *self.averaged]
        return [as_typed(text) for text in overrides]

    def shown(self, params: Mapping[str, Any]) -> str:
        """Returns the values of a trial for messages."""
        return " ".join(
            f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()
        )

    def identity(self) -> list[Any]:
        """Returns what distinguishes this search from others."""
        return [list(self.fixed), {n: repr(d) for n, d in self.searched.items()}, [list(r) for r in self.repeats]]


def read_space(parsed: Sequence[Override], distributions: Any) -> Space:
    """Reads what overrides search, fix and average over.

    Args:
        parsed: The overrides.
        distributions: Optuna's module of distributions.

    Raises:
        UserError: If no key is searched, or a sweep is not supported.
    """
    fixed, averaged, choices = [], [], []
    searched: dict[str, Any] = {}
    prefixes: dict[str, str] = {}
    problems = []
    for override in parsed:
        text = str(override.input_line)
        typed = text.partition("=")[0]
        name = typed.lstrip("+")
        if not override.is_sweep_override():
            fixed.append(text)
        elif (shown := as_typed(text)) != text.lstrip("+"):
            problems.append(f"{shown}: a search requires the key at every trial. Write {shown.replace('?=', '=', 1)}.")
        elif name in LANE_KEYS:
            if override.is_interval_sweep():
                problems.append(
                    f"{text}: {name} must be a list to average over. Write {name}=0,1,2 or {name}=range(3)."
                )
                continue
            averaged.append(text)
            choices.append([f"{typed}={value}" for value in override.sweep_string_iterator()])
        else:
            searched[name] = _distribution(override, distributions)
            prefixes[name] = typed[: len(typed) - len(name)]
    if not searched and not problems:
        problems.append(
            "hydra/sweeper=optuna requires a key with several values besides seed and data.split. Add one, "
            "such as 'schedule.lr=tag(log,interval(1e-4,1e-1))' or method.steps=1,2,3."
        )
    if problems:
        raise UserError(*problems)
    return Space(tuple(fixed), searched, prefixes, tuple(averaged), tuple(itertools.product(*choices)))


def _distribution(override: Override, distributions: Any) -> Any:
    """Optuna's distribution of a key: interval(a,b) (of whole numbers if both bounds are), range(...), or a choice."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        assert value.start is not None and value.end is not None
        whole = isinstance(value.start, int) and isinstance(value.end, int)
        kind = distributions.IntDistribution if whole else distributions.FloatDistribution
        try:
            return kind(value.start, value.end, log="log" in value.tags)
        except ValueError as error:
            raise UserError(f"Could not search {override.input_line}: {error}") from error
    if isinstance(value, RangeSweep) and not value.shuffle:
        numbers = list(value.range())
        if len(numbers) > 1 and isinstance(numbers[0], int) and numbers[1] > numbers[0]:
            return distributions.IntDistribution(numbers[0], numbers[-1], step=numbers[1] - numbers[0])
    return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))


def _first_value(distribution: Any) -> Any:
    return distribution.choices[0] if hasattr(distribution, "choices") else distribution.low


def _describe(distribution: Any) -> str:
    if hasattr(distribution, "choices"):
        return "one of " + ", ".join(map(str, distribution.choices))
    kind = "whole numbers" if isinstance(distribution.low, int) else "numbers"
    steps = f" in steps of {distribution.step}" if distribution.step not in (None, 1) else ""
    return (
        f"{kind} from {distribution.low} to {distribution.high}{', evenly in the logarithm' * distribution.log}{steps}"
    )
