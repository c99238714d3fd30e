"""The default sweeper of `-m`: plans the jobs, skips the finished ones, and passes the rest to the launcher.

Hydra finds plugins only in the package `hydra_plugins`. `register` adds the classes of this package there, so that a
checkout works like an installation.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from bnn_runner.errors import UserError
from bnn_runner.sweeps.launchers import RayLauncher, SerialLauncher, WorkersLauncher
from bnn_runner.sweeps.optuna_search import StudySweeper
from bnn_runner.sweeps.rounds import Rounds


class CellSweeper(Sweeper):
    """Runs all combinations that are not finished. Prints the plan, and writes it for the jobs.

    Args:
        max_lanes: Largest number of jobs that are trained together.
        max_batch_size: Number of jobs that the launcher gets at a time; None for all.
        params: {key: values} to sweep in addition to the typed ones.
    """

    def __init__(self, max_lanes: int, max_batch_size: int | None = None, params: Mapping[str, Any] | None = None):
        self.max_lanes, self.max_batch_size, self.params = max_lanes, max_batch_size, dict(params or {})
        self.rounds: Rounds | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Creates the launcher, so that a missing package is reported before any work."""
        self.rounds = Rounds(hydra_context, task_function, config, self.max_lanes)

    def sweep(self, arguments: list[str]) -> None:
        """Plans the jobs of these overrides and launches the unfinished ones.

        Raises:
            UserError: If an objective is set, which this sweeper does not use.
        """
        assert self.rounds is not None
        if self.rounds.config.objective is not None:
            raise UserError(
                f"objective={self.rounds.config.objective} requires a search, and this sweep runs every combination."
                " Add hydra/sweeper=optuna, or remove the objective."
            )
        parsed = self.rounds.parse(self.params, arguments)
        (points,) = BasicSweeper.split_arguments(parsed, None)
        settled = dict.fromkeys(map(tuple, self.rounds.with_existing_keys(points)))  # equal jobs once
        plan = self.rounds.plan(list(settled))
        for line in plan.summary_lines():
            print(line, file=sys.stderr)
        self.rounds.launch(plan, self.max_batch_size)


def register() -> None:
    """Registers the plugins of this package with Hydra, under the names in conf/hydra."""
    try:
        parent = importlib.import_module("hydra_plugins")
    except ModuleNotFoundError:  # no other plugin is installed
        parent = sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
        parent.__path__ = []
    module = ModuleType("hydra_plugins.bnn_runner")
    parent.bnn_runner = sys.modules[module.__name__] = module  # type: ignore[attr-defined]
    for plugin in (CellSweeper, StudySweeper, SerialLauncher, WorkersLauncher, RayLauncher):
        setattr(module, plugin.__name__, plugin)
        plugin.__module__ = module.__name__
        Plugins.instance().register(plugin)
