"""What the sweepers share: planning points and launching the unfinished ones, in one or more rounds."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from bnn_runner.config.groups import Catalogue, packaged_conf
from bnn_runner.config.optional_keys import without_missing_keys
from bnn_runner.config.overrides import parse
from bnn_runner.config.settings import anchor
from bnn_runner.errors import UserError
from bnn_runner.sweeps.plan import Job, Plan, make_plan
from bnn_runner.sweeps.plan_cache import PlanCache, cache_version
from bnn_runner.sweeps.plan_process import inspect_jobs_in_child
from bnn_runner.sweeps.scratch_files import Member, SweepState, write_job, write_outcome

SWEEP_SETTINGS = ("plan_only", "retry_failed", "fail_fast", "objective")
"""Settings of the sweep that are not passed to its jobs."""


class Rounds:
    """Launcher and settings of a sweep; writes the plan of all rounds so far to its folder, for jobs and summary.

    Args:
        context: Hydra's context.
        task_function: The function that Hydra's launchers call.
        config: The composed configuration of the sweep.
        max_lanes: Largest number of jobs that are trained together.
    """

    def __init__(self, context: HydraContext, task_function: TaskFunction, config: DictConfig, max_lanes: int):
        self.config, self.max_lanes = config, max_lanes
        self.folder, self.start = Path(str(config.hydra.sweep.dir)), Path(str(config.hydra.runtime.cwd))
        self.state = SweepState(0, fail_fast=bool(config.fail_fast), plan_only=bool(config.plan_only))
        self._errors: list[dict[str, Any]] = []
        self._loader = context.config_loader
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=task_function, config=config
        )

    @property
    def config_dir(self) -> Path | None:
        """The folder of --config-dir."""
        added = [s.path for s in self.config.hydra.runtime.config_sources if s.provider == "command-line"]
        return Path(added[0]) if added else None

    @property
    def output_dir(self) -> Path:
        """The folder of the cells."""
        return anchor(str(self.config.output_dir), self.start)

    def parse(self, params: Mapping[str, Any], arguments: Sequence[str]) -> list[Override]:
        """Parses overrides with Hydra's parser, without the settings of the sweep itself.

        Args:
            params: {key: values} of experiment files.
            arguments: The overrides as typed.
        """
        overrides = [*(f"{key}={value}" for key, value in params.items()), *arguments]
        overrides = [text for text in overrides if text.partition("=")[0].lstrip("+") not in SWEEP_SETTINGS]
        return OverridesParser.create(config_loader=self._loader).parse_overrides(overrides)

    def with_existing_keys(self, points: Sequence[Sequence[str]]) -> list[list[str]]:
        """Returns the points with `key?=value` set where the key exists; prints where that is."""
        catalogue = Catalogue([self.config_dir] if self.config_dir else [])
        settled = [without_missing_keys(catalogue, point) for point in points]
        for key in dict.fromkeys(o.key for point in points for text in point if (o := parse(text)).optional):
            count = sum(any(text.startswith(f"{key}=") for text in point) for point in settled)
            print(f"{key}?=: the key exists in {count} of {len(points)} jobs", file=sys.stderr)
        return settled

    def plan(self, points: Sequence[Sequence[str]]) -> Plan:
        """Plans the jobs with these overrides."""
        config = self.config
        forced = bool(config.force) or any(o.startswith("force=") for point in points for o in point)
        cache_dir = anchor(str(config.cache_dir), self.start) if config.cache_dir else self.output_dir / "cache"
        folders = [packaged_conf(), *([self.config_dir] if self.config_dir else [])]
        return make_plan(
            points,
            self.config_dir,
            self.start,
            PlanCache(cache_dir / "plans", None if forced else cache_version(folders, self.start)),
            bool(config.retry_failed),
            self.max_lanes,
            read_only=bool(config.plan_only),
            inspect=inspect_jobs_in_child,
        )

    def launch(self, plan: Plan, at_once: int | None = None) -> None:
        """Prints the usage errors of a plan, and passes its groups to the launcher.

        Args:
            plan: The plan.
            at_once: Number of groups that the launcher gets at a time; all by default.
        """
        first, offset = len(self.state.groups), self.state.jobs
        self.state = replace(
            self.state,
            jobs=offset + len(plan.jobs),
            done=self.state.done + sum(job.status == "done" for job in plan.jobs),
            left_alone=[
                *self.state.left_alone,
                *(_member(j, offset) for j in plan.jobs if j.status == "failed" and not plan.retry_failed),
            ],
            groups=[*self.state.groups, *([_member(job, offset) for job in group] for group in plan.groups)],
        )
        self.state.write(self.folder)
        for number, group in enumerate(plan.groups, first):
            write_job(self.folder, number, [replace(_member(job, offset), config=job.config) for job in group])
        with_errors = [job for job in plan.jobs if job.status == "usage error"]
        for job in with_errors:
            print(f"bnn-run: {job.shown}: not run", file=sys.stderr)
            for number, problem in enumerate(job.problems, 1):
                print(f"  {number}. {problem}", file=sys.stderr)
            error = {"status": "usage error", "message": job.problems[0], "printed": True}
            self._errors.append(_member(job, offset).identity() | error)
        if with_errors:
            write_outcome(self.folder / "errors", self._errors)
        if self.config.plan_only:
            for job in (job for group in plan.groups for job in group):
                before = f" ({job.status} before)" if job.status in ("failed", "interrupted") else ""
                print(f"  to run: {job.shown}{before}")
        elif plan.groups and not (with_errors and self.config.fail_fast):
            self._launch([list(group[0].overrides) for group in plan.groups], first, at_once or len(plan.groups))

    def _launch(self, jobs: Sequence[list[str]], first: int, at_once: int) -> None:
        """Passes jobs to the launcher. If the launcher itself fails, the summary still shows the results on disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, self.folder / "multirun.yaml")
        for begin in range(0, len(jobs), at_once):
            try:
                self.launcher.launch(jobs[begin : begin + at_once], initial_job_idx=first + begin)
            except UserError:
                raise
            except Exception as error:
                reason = (str(error).splitlines() or [""])[0]
                print(f"bnn-run: the launcher failed ({type(error).__name__}: {reason})", file=sys.stderr)


def _member(job: Job, offset: int) -> Member:
    return Member(offset + job.number, list(job.overrides), [str(cell) for cell in job.cells])
