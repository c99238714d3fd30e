"""Launchers of our own: one process after the other, several at once (joblib), and a cluster of Ray.

A job travels as plain values (`Ticket`), so that where it runs needs nothing of Hydra's state.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from bnn_runner.errors import UserError
from bnn_runner.sweeps.child_process import passing_on
from bnn_runner.sweeps.job import Ticket, carry_out


class SerialLauncher(Launcher):
    """One job after the other, each in a process of its own. Unlike Hydra's own launcher it composes nothing."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; a request to stop ends the sweep once the running job has saved its state."""
        assert self.config is not None
        for ticket in _tickets(self.config, job_overrides, initial_job_idx):
            if carry_out(ticket):
                raise KeyboardInterrupt
        return _all_left(job_overrides)


class WorkersLauncher(Launcher):
    """Up to `n_jobs` jobs at once (-1 is one a processor), each in a process of its own.

    A job sees one of `gpus` only, numbered as CUDA_VISIBLE_DEVICES numbers them, and no other job
    has that one meanwhile; one that is listed twice takes two jobs at once.
    """

    def __init__(self, n_jobs: int, gpus: Sequence[int | str] | None):
        problems = []
        if n_jobs == 0:
            problems.append("hydra.launcher.n_jobs must be at least 1, or -1 for one job per processor; got 0.")
        if gpus is not None and len(gpus) == 0:
            problems.append("hydra.launcher.gpus must list at least one GPU, as in [0,1], or be null; got [].")
        if problems:
            raise UserError(*problems)
        self.n_jobs, self.gpus = n_jobs, None if gpus is None else [str(gpu) for gpu in gpus]
        self.config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; after a request to stop no further one starts."""
        from joblib import Parallel, delayed, effective_n_jobs

        assert self.config is not None
        at_once = effective_n_jobs(self.n_jobs)
        free: SimpleQueue[dict[str, str]] = SimpleQueue()
        if self.gpus is not None:
            at_once = len(self.gpus) if self.n_jobs < 0 else min(at_once, len(self.gpus))
        for slot in range(at_once):
            free.put({} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus[slot]})

        with passing_on() as watch:

            def one(ticket: Ticket) -> None:
                own = free.get()
                try:
                    if not watch.asked:
                        ticket.environment.update(own)
                        carry_out(ticket)
                finally:
                    free.put(own)

            tickets = _tickets(self.config, job_overrides, initial_job_idx)
            # Threads of this process wait for the jobs, whose processes come from one server.
            Parallel(n_jobs=at_once, backend="threading", batch_size=1)(delayed(one)(t) for t in tickets)
        if watch.asked:
            raise KeyboardInterrupt
        return _all_left(job_overrides)


class RayLauncher(Launcher):
    """Each job is a task of Ray, on the cluster at `address` or on a Ray of `cpus` processors that is started here.

    A job takes `cpus_per_job` processors and sees `gpus_per_job` GPUs. The cluster's machines must
    share the output folder, the data and the code.
    """

    def __init__(self, address: str | None, cpus: int | None, cpus_per_job: float, gpus_per_job: float):
        self.address, self.cpus = address, cpus
        self.per_job = {"num_cpus": cpus_per_job, "num_gpus": gpus_per_job}
        self.config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Raises `UserError` where Ray is not installed."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anybody
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # two jobs that say the same both say it
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # no GPU asked for is none seen
        try:
            self.ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            raise UserError("hydra/launcher=ray requires Ray. Install it: pip install 'bnn-runner[ray]'") from error
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; on a request to stop, running ones save their state first."""
        assert self.config is not None
        ray = self.ray
        if not ray.is_initialized():  # it ends with this process
            here = {} if self.address else {"num_cpus": self.cpus, "include_dashboard": False}
            try:
                ray.init(address=self.address or "local", logging_level="ERROR", **here)
            except (ConnectionError, ValueError) as error:
                raise UserError(f"Could not reach Ray at hydra.launcher.address={self.address} ({error}).") from error
        remote = ray.remote(**self.per_job)(carry_out)
        tickets = _tickets(self.config, job_overrides, initial_job_idx)
        waiting = [remote.options(name=f"job {t.number + 1}").remote(t) for t in tickets]
        problems = []
        with passing_on() as watch:
            while waiting:
                told = len(watch.asked)
                ended, waiting = ray.wait(waiting, timeout=0.5)
                for task in ended:
                    try:
                        ray.get(task)
                    except ray.exceptions.RayError as error:
                        problems.append(error)
                if len(watch.asked) > told:
                    for task in waiting:
                        ray.cancel(task)
        if watch.asked:
            raise KeyboardInterrupt
        if problems:
            raise problems[0]
        return _all_left(job_overrides)


def _tickets(config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int) -> list[Ticket]:
    hydra = config.hydra
    added = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
    sweep, start = Path(str(hydra.sweep.dir)), Path(str(hydra.runtime.cwd))
    environment = {str(k): str(v) for k, v in hydra.job.env_set.items()}
    return [
        Ticket(list(o), n, sweep / str(n), sweep, Path(added[0]) if added else None, start, dict(environment))
        for n, o in enumerate(job_overrides, first)
    ]


def _all_left(job_overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """What Hydra expects of jobs that have ended; their outcomes are in files."""
    return [JobReturn(overrides=list(o), status=JobStatus.COMPLETED) for o in job_overrides]
