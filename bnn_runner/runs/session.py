"""What the parts of one run share: the session (device, console, stop request), and a cell on its way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bnn_runner.config.groups import flatten
from bnn_runner.config.keys import RESULTS_VERSION, digest, list_of, metrics_digest
from bnn_runner.config.overrides import parse
from bnn_runner.experiment import Experiment
from bnn_runner.runs.cell import Cell, command_line
from bnn_runner.runs.provenance import Stages
from bnn_runner.runs.time_limit import Shortening
from bnn_runner.runtime.console import Console, Progress
from bnn_runner.runtime.signals import StopRequest
from bnn_runner.tasks import Task
from bnn_runner.training.provider import Training

OF_A_COMMAND = {"replicates", "time_limit", "plan_only", "retry_failed", "fail_fast"}
"""Settings of the command that made a cell, which the cell does without."""


@dataclass(frozen=True)
class Session:
    """What all cells of a run share."""

    device: torch.device
    threads: int
    console: Console
    progress: Progress
    stop: StopRequest
    shortening: Shortening = field(default_factory=Shortening)
    announcement: tuple[str, ...] = ()

    def step(self, stage: str, done: int, total: int) -> None:
        """Progress that is also the place where a posterior fit or an evaluation can be stopped."""
        self.stop.check(stage)
        self.progress(stage, done, total)


@dataclass
class CellRun:
    """One cell on its way: its experiment (with the cell's own seed), task and needed trainings.

    What the `stages` cost and `notes` for the reader are gathered on the way. `attempt` counts how often the cell
    was begun until it was finished, this time included.
    """

    experiment: Experiment
    cell: Cell
    task: Task
    trainings: list[Training]
    stages: Stages = field(default_factory=Stages)
    notes: list[str] = field(default_factory=list)
    attempt: int = 0

    def effective_config(self) -> dict[str, Any]:
        """The flattened configuration without settings that cannot matter here (a rule or number of draws not used)."""
        method = self.experiment.method
        flat = flatten(self.experiment.config)
        if not self.experiment.uses_hyper:
            flat = {k: v for k, v in flat.items() if not k.startswith("hyper.")}
        if method.finite:
            flat.pop("eval.num_draws", None)
        return flat

    def places(self) -> dict[str, str | None]:
        """Where data, networks and the user's own classes lay, for whoever opens the cell again."""
        settings, own = self.experiment.settings, self.experiment.run.config_dir
        places = {"data_dir": settings.data_path, "cache_dir": settings.cache_path, "config_dir": own}
        return {name: None if path is None else str(path) for name, path in places.items()}

    def fingerprints(self) -> dict[str, str]:
        """What a saved posterior belongs to: trained networks (their keys), data, and the way it was fitted."""
        fitted = {k: v for k, v in self.effective_config().items() if list_of(k) == "posterior"}
        networks = digest([t.key for t in self.trainings])
        return {
            "networks": networks,
            "data": self.task.fingerprint,
            "method": digest(fitted),
            "results_version": str(RESULTS_VERSION),
        }

    def metrics_digest(self) -> str:
        """Changes when other metrics, or other settings of them, are asked for."""
        return metrics_digest(self.experiment.config)

    def command(self) -> str:
        """The line that reproduces the cell, whatever is recommended later."""
        run = self.experiment.run
        return command_line([o for o in run.overrides if parse(o).key not in OF_A_COMMAND], run.config_dir)

    def shorter_command(self, changes: Mapping[str, Any]) -> str:
        """The command as it was typed, with smaller settings."""
        run = self.experiment.run
        skip = {"time_limit", *changes}
        words = [*(o for o in run.typed if parse(o).key not in skip), *(f"{k}={v}" for k, v in changes.items())]
        return command_line(words, run.config_dir)
