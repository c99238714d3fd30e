"""What our sweepers share: points are planned, and those left to run go to the launcher, in rounds."""

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

from bnn_runner.config.groups import packaged_conf
from bnn_runner.config.settings import anchor
from bnn_runner.errors import UserError
from bnn_runner.sweeps.plan import Job, Plan, make_plan
from bnn_runner.sweeps.plan_cache import Memory, stamp
from bnn_runner.sweeps.plan_process import look_apart
from bnn_runner.sweeps.scratch_files import Member, SweepState, write_job, write_outcome

OWN = ("plan_only", "retry_failed", "fail_fast", "objective")
"""Settings of the sweep that its jobs do not get."""


class Rounds:
    """A sweep's launcher and settings; the plan of all rounds so far lies in its folder, for jobs and summary."""

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
        """Where the cells go."""
        return anchor(str(self.config.output_dir), self.start)

    def parse(self, params: Mapping[str, Any], arguments: Sequence[str]) -> list[Override]:
        """Overrides as Hydra reads them, without what concerns the sweep only."""
        words = [*(f"{key}={value}" for key, value in params.items()), *arguments]
        words = [text for text in words if text.partition("=")[0].lstrip("+") not in OWN]
        return OverridesParser.create(config_loader=self._loader).parse_overrides(words)

    def plan(self, points: Sequence[Sequence[str]]) -> Plan:
        """The plan of these points."""
        config = self.config
        forced = bool(config.force) or any(o.startswith("force=") for point in points for o in point)
        cache = anchor(str(config.cache_dir), self.start) if config.cache_dir else self.output_dir / "cache"
        folders = [packaged_conf(), *([self.config_dir] if self.config_dir else [])]
        memory = Memory(cache / "plans", None if forced else stamp(folders, self.start))
        retry, look_only = bool(config.retry_failed), bool(config.plan_only)
        return make_plan(points, self.config_dir, self.start, memory, retry, self.max_lanes, look_only, look_apart)

    def launch(self, plan: Plan, at_once: int | None = None) -> None:
        """Hand the plan's groups to the launcher (`at_once` at a time), and tell the wrong among its jobs."""
        first, offset = len(self.state.groups), self.state.asked
        self.state = replace(
            self.state,
            asked=offset + len(plan.jobs),
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
        wrong = [job for job in plan.jobs if job.status == "usage error"]
        for job in wrong:
            print(f"bnn-run: {job.shown}: not run", file=sys.stderr)
            for number, problem in enumerate(job.problems, 1):
                print(f"  {number}. {problem}", file=sys.stderr)
            error = {"status": "usage error", "message": job.problems[0], "printed": True}
            self._errors.append(_member(job, offset).described() | error)
        if wrong:
            write_outcome(self.folder / "errors", self._errors)
        if self.config.plan_only:
            for job in (job for group in plan.groups for job in group):
                before = f" ({job.status} before)" if job.status in ("failed", "interrupted") else ""
                print(f"  to run: {job.shown}{before}")
        elif plan.groups and not (wrong and self.config.fail_fast):
            self._hand_over([list(group[0].overrides) for group in plan.groups], first, at_once or len(plan.groups))

    def _hand_over(self, jobs: Sequence[list[str]], first: int, at_once: int) -> None:
        """A launcher that fails loses no result that is on disk."""
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
