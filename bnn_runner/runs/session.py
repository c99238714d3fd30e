"""What the parts of one run share: the session (device, console, stop request), and the state of each cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bnn_runner.config.groups import flatten
from bnn_runner.config.keys import RESULTS_VERSION, digest, list_of, metrics_digest
from bnn_runner.config.overrides import command_line, parse
from bnn_runner.experiment import Experiment
from bnn_runner.runs.cell import Cell
from bnn_runner.runs.provenance import Stages
from bnn_runner.runs.time_limit import Shortening
from bnn_runner.runtime.console import Console, Progress
from bnn_runner.runtime.signals import StopRequest
from bnn_runner.tasks import Task
from bnn_runner.training.provider import Training

COMMAND_SETTINGS = {"replicates", "time_limit", "plan_only", "retry_failed", "fail_fast"}
"""Settings that concern a command but not a single cell; the command of a cell omits them."""


@dataclass(frozen=True)
class Session:
    """What all cells of a run share.

    Attributes:
        device: Where the run computes.
        threads: PyTorch's number of threads.
        console: Prints messages.
        progress: Called with the progress of every stage.
        stop: The stop request.
        shortening: What the time limit changed.
        announcement: Lines about the duration of the run, printed before it starts.
    """

    device: torch.device
    threads: int
    console: Console
    progress: Progress
    stop: StopRequest
    shortening: Shortening = field(default_factory=Shortening)
    announcement: tuple[str, ...] = ()

    def step(self, stage: str, done: int, total: int) -> None:
        """Reports progress; raises `Interrupted` if a stop was requested (during a posterior fit or an evaluation)."""
        self.stop.check(stage)
        self.progress(stage, done, total)


@dataclass
class CellRun:
    """One cell while it is being computed.

    Attributes:
        experiment: The experiment, with the seed of this cell.
        cell: Its folder.
        task: Its data.
        trainings: The networks that it needs.
        stages: Time and memory of the stages so far.
        notes: Lines for the user so far.
        attempt: How often the cell has been started, including this time; 0 before it starts.
    """

    experiment: Experiment
    cell: Cell
    task: Task
    trainings: list[Training]
    stages: Stages = field(default_factory=Stages)
    notes: list[str] = field(default_factory=list)
    attempt: int = 0

    def effective_config(self) -> dict[str, Any]:
        """Returns the flattened configuration without settings that do not affect this cell.

        These are the hyperparameter rule and the number of draws, if the method does not use them.
        """
        method = self.experiment.method
        flat = flatten(self.experiment.config)
        if not self.experiment.uses_hyper:
            flat = {k: v for k, v in flat.items() if not k.startswith("hyper.")}
        if method.finite:
            flat.pop("eval.num_draws", None)
        return flat

    def places(self) -> dict[str, str | None]:
        """Returns the folders of data, networks and the user's own classes, for opening the cell again."""
        settings, config_dir = self.experiment.settings, self.experiment.run.config_dir
        places = {"data_dir": settings.data_path, "cache_dir": settings.cache_path, "config_dir": config_dir}
        return {name: None if path is None else str(path) for name, path in places.items()}

    def fingerprints(self) -> dict[str, str]:
        """Returns digests of all that determines a saved posterior: trained networks, data, method and its settings."""
        posterior_fields = {k: v for k, v in self.effective_config().items() if list_of(k) == "posterior"}
        networks = digest([t.key for t in self.trainings])
        return {
            "networks": networks,
            "data": self.task.fingerprint,
            "method": digest(posterior_fields),
            "results_version": str(RESULTS_VERSION),
        }

    def metrics_digest(self) -> str:
        """Returns a hash of the selected metrics and their settings."""
        return metrics_digest(self.experiment.config)

    def command(self) -> str:
        """Returns the command that reproduces the cell, even if recommendations change later."""
        run = self.experiment.run
        return command_line([o for o in run.overrides if parse(o).key not in COMMAND_SETTINGS], run.config_dir)

    def shorter_command(self, changes: Mapping[str, Any]) -> str:
        """Returns the command as it was typed, with smaller settings and without a time limit."""
        run = self.experiment.run
        skip = {"time_limit", *changes}
        overrides = [*(o for o in run.typed if parse(o).key not in skip), *(f"{k}={v}" for k, v in changes.items())]
        return command_line(overrides, run.config_dir)
