"""A sweeper that searches: Optuna proposes hyperparameters, our cells are the trials, `objective=` is what counts.

The study lies in a file below the output folder, known by what defines it, so that the same command goes on with
one that was killed, and a higher number of trials goes on from fewer.
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
from bnn_runner.errors import UserError
from bnn_runner.runtime.files import short_path
from bnn_runner.sweeps.plan import LANE_KEYS, Plan
from bnn_runner.sweeps.rounds import Rounds

if TYPE_CHECKING:
    from bnn_runner.sweeps.objective import Objective

RETRIED = "retry_of"
"""What a trial says of the failed one whose place it takes."""
SamplerName = Literal["tpe", "gp", "random"]


class StudySweeper(Sweeper):
    """Searches the swept keys for the best objective; a trial is the mean over the seeds and splits asked for.

    `trials` in all, `at_once` proposed before the first of them is known; `sampler` proposes, the first
    `startup` of them at random. What trial n is depends on `seed`, n and the trials before, not on stops between.
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
        """Raises `UserError` where Optuna is not installed or no objective is given."""
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
        """Search. Raises `UserError` for a search that has no space, or no such objective."""
        assert self.rounds is not None
        space = read_space(self.rounds.parse(self.params, arguments), self.optuna.distributions)
        objective = self._objective(space)
        study, file = self._study(space, objective)
        self._tell_start(space, objective, study, short_path(file))
        self.rounds.launch(Plan((), (), retry_failed=False))  # for the summary, of a search that is over already too
        if self.rounds.config.plan_only:
            return
        failed = False
        if batch := self._failed(study, space):
            plan = self._run(space, batch)
            failed = plan.retry_failed and self._tell_results(study, space, objective, batch, plan, again=True)
        while not (failed and self.rounds.config.fail_fast) and (batch := self._next(study, space)):
            failed = self._tell_results(study, space, objective, batch, self._run(space, batch))
        if failed and self.rounds.config.fail_fast:
            print("search: a trial failed (fail_fast=true)", file=sys.stderr)
        self._tell_best(study, space, objective)

    def _run(self, space: Space, batch: Sequence[tuple[int, dict[str, Any]]]) -> Plan:
        """Run what is not finished of these trials' jobs."""
        assert self.rounds is not None
        plan = self.rounds.plan([point for _, params in batch for point in space.points(params)])
        self.rounds.launch(plan)
        return plan

    def _failed(self, study: Any, space: Space) -> list[tuple[int, dict[str, Any]]]:
        """Number and values of trials that an earlier command left without a value."""
        mended = {t.user_attrs.get(RETRIED) for t in study.trials}
        ended = study.get_trials(states=[self.optuna.trial.TrialState.FAIL])
        whole = [t for t in ended if t.params.keys() == space.searched.keys()]
        return [(t.number, t.params) for t in whole if t.number not in mended]

    def _objective(self, space: Space) -> Objective:
        from bnn_runner.experiment import load_experiment
        from bnn_runner.sweeps.objective import find_objective

        assert self.rounds is not None
        example = space.points({name: _first(d) for name, d in space.searched.items()})[0]
        experiment = load_experiment(example, self.rounds.config_dir, self.rounds.start)
        return find_objective(str(self.rounds.config.objective), experiment)

    def _study(self, space: Space, objective: Objective) -> tuple[Any, Path]:
        """The study of this search, new or from its file, and the file."""
        assert self.rounds is not None
        what = [space.described(), objective.name, self.sampler, self.startup, self.seed, self.at_once]
        folder = self.rounds.output_dir / "studies"
        if not self.rounds.config.plan_only:
            folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{objective.name.replace('/', '-')}-{digest(what)[:8]}.db"
        there = file.exists() or not self.rounds.config.plan_only
        try:
            study = self.optuna.create_study(
                storage=f"sqlite:///{file}" if there else None,
                study_name="bnn-run",
                direction="maximize" if objective.better == "higher" else "minimize",
                load_if_exists=True,
            )
        except Exception as error:  # whatever the data base behind Optuna raises
            reason = (str(error).splitlines() or [""])[0]
            raise UserError(
                f"Could not open the study {file} ({type(error).__name__}: {reason}). Remove the file to start "
                "the search again; finished cells are not run again."
            ) from error
        return study, file

    def _next(self, study: Any, space: Space) -> list[tuple[int, dict[str, Any]]]:
        """Number and values of the trials to run now: those that an earlier command left open, then new ones."""
        running = study.get_trials(states=[self.optuna.trial.TrialState.RUNNING])
        batch = [(t.number, t.params) for t in running if t.params.keys() == space.searched.keys()]
        for trial in running:
            if trial.params.keys() != space.searched.keys():  # killed between being begun and being proposed
                study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)
        begun = sum(RETRIED not in t.user_attrs for t in study.trials)
        end = begun + -begun % self.at_once  # of the round that was cut
        if not batch and end == begun:
            end += self.at_once
        for number in range(begun, min(end, self.trials)):
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

    def _tell_start(self, space: Space, objective: Objective, study: Any, file: str) -> None:
        ended = len(study.trials) - len(study.get_trials(states=[self.optuna.trial.TrialState.RUNNING]))
        lines = [
            (
                f"search: {objective.name} ({objective.better} is better), {self.trials} trials, {ended} done "
                f"before: {file}"
            )
        ]
        lines += [f"  {name}: {_in_words(d)}" for name, d in space.searched.items()]
        if space.averaged:
            lines.append(f"  each trial is a mean over {', '.join(space.averaged)} ({len(space.repeats)} jobs)")
        if objective.column.split == "test":
            lines.append(
                "  note: a search on the test set biases the test scores of its result. Search by val/... instead."
            )
        print("\n".join(lines), file=sys.stderr)

    def _tell_results(
        self,
        study: Any,
        space: Space,
        objective: Objective,
        batch: Sequence[tuple[int, dict[str, Any]]],
        plan: Plan,
        again: bool = False,
    ) -> bool:
        """Give the study what its trials came to; whether one of them came to nothing.

        A trial that has ended stays as it is in the study: what one came to that is run `again` is a trial beside it.
        """
        failed = False
        for place, (number, params) in enumerate(batch):
            jobs = plan.jobs[place * len(space.repeats) : (place + 1) * len(space.repeats)]
            values = [objective.read(cell) for job in jobs for cell in job.cells]
            if again and values and all(map(math.isfinite, values)):
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

    def _tell_best(self, study: Any, space: Space, objective: Objective) -> None:
        assert self.rounds is not None
        complete = study.get_trials(states=[self.optuna.trial.TrialState.COMPLETE])
        print(f"\nsearch: {len(study.trials)} trials, {len(complete)} with a value", file=sys.stderr)
        if not complete:
            return
        best = study.best_trial
        words = [*(["-m"] if len(space.repeats) > 1 else []), *space.command(best.params)]
        if self.rounds.config_dir is not None:
            words += ["--config-dir", str(self.rounds.config_dir)]
        print(f"best: {objective.name} = {best.value:.6g} (trial {best.number})  {space.shown(best.params)}")
        print(f"  {shlex.join(['bnn-run', *words])}")


@dataclass(frozen=True)
class Space:
    """What a search varies: `searched` keys with their distributions, and `repeats` of seeds and splits.

    `fixed` overrides are every trial's. `prefixes` are the '+' signs that Hydra needs before a searched
    key; `averaged` are the overrides that `repeats` expand.
    """

    fixed: tuple[str, ...]
    searched: dict[str, Any]
    prefixes: dict[str, str]
    averaged: tuple[str, ...]
    repeats: tuple[tuple[str, ...], ...]

    def points(self, params: Mapping[str, Any]) -> list[list[str]]:
        """The jobs of a trial."""
        chosen = [f"{self.prefixes[name]}{name}={value}" for name, value in params.items()]
        return [[*self.fixed, *chosen, *repeat] for repeat in self.repeats]

    def command(self, params: Mapping[str, Any]) -> list[str]:
        """Overrides that run a trial once more, as a person types them."""
        words = [*self.fixed, *(f"{name}={value}" for name, value in params.items()), *self.averaged]
        return [text.lstrip("+") for text in words]

    def shown(self, params: Mapping[str, Any]) -> str:
        return " ".join(
            f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}" for name, value in params.items()
        )

    def described(self) -> list[Any]:
        """What tells this search from others."""
        return [list(self.fixed), {n: repr(d) for n, d in self.searched.items()}, [list(r) for r in self.repeats]]


def read_space(parsed: Sequence[Override], distributions: Any) -> Space:
    """The search that overrides describe. Raises `UserError` where nothing is swept, or not in a known way."""
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
    """A key's values as Optuna has them: interval(a,b), of whole numbers where both are, range(...), or a choice."""
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


def _first(distribution: Any) -> Any:
    return distribution.choices[0] if hasattr(distribution, "choices") else distribution.low


def _in_words(distribution: Any) -> str:
    if hasattr(distribution, "choices"):
        return "one of " + ", ".join(map(str, distribution.choices))
    kind = "whole numbers" if isinstance(distribution.low, int) else "numbers"
    steps = f" in steps of {distribution.step}" if distribution.step not in (None, 1) else ""
    return (
        f"{kind} from {distribution.low} to {distribution.high}{', evenly in the logarithm' * distribution.log}{steps}"
    )
