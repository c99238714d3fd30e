"""Our sweeper, the default of `-m`: plan, leave out what is finished, hand the rest to whichever launcher.

Hydra takes plugins from the package `hydra_plugins` only; `register` puts the class there by name, so
that a checkout works as an installation does.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from bnn_runner.catalogue import packaged_conf
from bnn_runner.cli.handover import Handover, Member, write_outcome
from bnn_runner.cli.launchers import RayLauncher, WorkersLauncher
from bnn_runner.plan_memory import Memory, stamp
from bnn_runner.settings import anchor
from bnn_runner.sweep_plan import Job, Plan, make_plan

OWN = ("plan_only", "retry_failed", "fail_fast")


class CellSweeper(Sweeper):
    """Runs every point of the request that is not finished. The plan is printed, and left for the jobs to read."""

    def __init__(self, max_lanes: int, max_batch_size: int | None = None, params: Mapping[str, Any] | None = None):
        self.max_lanes, self.max_batch_size, self.params = max_lanes, max_batch_size, dict(params or {})
        self.context: HydraContext | None = None
        self.config: DictConfig | None = None
        self.launcher: Launcher | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher, so that one that is not installed is told before any work."""
        self.context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Plan the jobs of these overrides and launch what is left to do."""
        assert self.config is not None and self.launcher is not None
        points = self._points(arguments)
        settings, folder = self.config, Path(str(self.config.hydra.sweep.dir))
        plan = self._plan(points)
        for line in plan.told():
            print(line, file=sys.stderr)
        Handover(
            asked=len(plan.jobs),
            done=sum(job.standing == "done" for job in plan.jobs),
            left_alone=[_member(j) for j in plan.jobs if j.standing == "failed" and not plan.retry_failed],
            groups=[[_member(job) for job in group] for group in plan.groups],
            fail_fast=bool(settings.fail_fast),
            plan_only=bool(settings.plan_only),
        ).write(folder)
        mistakes = [job for job in plan.jobs if job.standing == "mistake"]
        for job in mistakes:
            print(f"bnn-run: {job.shown}: this cannot run", file=sys.stderr)
            for number, problem in enumerate(job.problems, 1):
                print(f"  {number}. {problem}", file=sys.stderr)
        if mistakes:
            told = [{"status": "mistake", "message": job.problems[0], "told": True} for job in mistakes]
            write_outcome(
                folder / "mistakes", [_member(job).described() | t for job, t in zip(mistakes, told, strict=True)]
            )
        if settings.plan_only:
            for job in (job for group in plan.groups for job in group):
                before = f" ({job.standing} before)" if job.standing in ("failed", "cut") else ""
                print(f"  to run: {job.shown}{before}")
        elif plan.groups and not (mistakes and settings.fail_fast):
            self._launch(plan)

    def _points(self, arguments: Sequence[str]) -> list[list[str]]:
        """Every combination, as Hydra's own sweeper makes them, without what concerns the sweep only."""
        assert self.context is not None
        parser = OverridesParser.create(config_loader=self.context.config_loader)
        words = [f"{key}={value}" for key, value in self.params.items()]
        (points,) = BasicSweeper.split_arguments(parser.parse_overrides([*words, *arguments]), None)
        return [[text for text in point if text.partition("=")[0].lstrip("+") not in OWN] for point in points]

    def _plan(self, points: Sequence[Sequence[str]]) -> Plan:
        assert self.config is not None
        start = Path(str(self.config.hydra.runtime.cwd))
        added = [s.path for s in self.config.hydra.runtime.config_sources if s.provider == "command-line"]
        own = [Path(path) for path in added]
        anew = bool(self.config.force) or any(o.startswith("force=") for point in points for o in point)
        output = anchor(str(self.config.output_dir), start)
        cache = anchor(str(self.config.cache_dir), start) if self.config.cache_dir else output / "cache"
        memory = Memory(cache / "plans", None if anew else stamp([packaged_conf(), *own], start))
        return make_plan(
            points,
            own[0] if own else None,
            start,
            memory,
            bool(self.config.retry_failed),
            self.max_lanes,
            bool(self.config.plan_only),
        )

    def _launch(self, plan: Plan) -> None:
        """Hand the groups to the launcher; one that breaks off loses no result that is on disk."""
        assert self.config is not None and self.launcher is not None
        folder = Path(str(self.config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        batch = self.max_batch_size or len(plan.groups)
        for first in range(0, len(plan.groups), batch):
            chosen = [list(group[0].overrides) for group in plan.groups[first : first + batch]]
            try:
                self.launcher.launch(chosen, initial_job_idx=first)
            except Exception as error:
                reason = (str(error).splitlines() or [""])[0]
                print(f"bnn-run: the launcher broke off ({type(error).__name__}: {reason})", file=sys.stderr)


def _member(job: Job) -> Member:
    return Member(job.number, list(job.overrides), [str(cell) for cell in job.cells])


def register() -> None:
    """Make our plugins known to Hydra under the names in conf/hydra."""
    try:
        parent = importlib.import_module("hydra_plugins")
    except ModuleNotFoundError:  # no other plugin is installed
        parent = sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
        parent.__path__ = []
    module = ModuleType("hydra_plugins.bnn_runner")
    parent.bnn_runner = sys.modules[module.__name__] = module  # type: ignore[attr-defined]
    for plugin in (CellSweeper, WorkersLauncher, RayLauncher):
        setattr(module, plugin.__name__, plugin)
        plugin.__module__ = module.__name__
        Plugins.instance().register(plugin)
