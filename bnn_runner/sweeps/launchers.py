"""The launchers of this package: one process after the other, several in parallel (joblib), and a Ray cluster.

A job is sent as plain values (`JobSpec`), so it needs no state of Hydra where it runs.
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
from bnn_runner.sweeps.child_process import forward_signals
from bnn_runner.sweeps.job import JobSpec, run_job


class SerialLauncher(Launcher):
    """Runs one job after the other, each in its own process. Unlike Hydra's launcher, it does not compose again."""

    def __init__(self) -> None:
        self.config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs. A stop request ends the sweep after the running job has saved its state."""
        assert self.config is not None
        for spec in _job_specs(self.config, job_overrides, initial_job_idx):
            if run_job(spec):
                raise KeyboardInterrupt
        return _job_returns(job_overrides)


class WorkersLauncher(Launcher):
    """Runs up to `n_jobs` jobs in parallel (-1: one per processor), each in its own process.

    With `gpus` (numbers as in CUDA_VISIBLE_DEVICES), each job sees one GPU that no other job uses at the same time. A
    GPU that is listed twice runs two jobs at a time.
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
        """Runs the jobs. After a stop request no further job starts."""
        from joblib import Parallel, delayed, effective_n_jobs

        assert self.config is not None
        workers = effective_n_jobs(self.n_jobs)
        free_slots: SimpleQueue[dict[str, str]] = SimpleQueue()
        if self.gpus is not None:
            workers = len(self.gpus) if self.n_jobs < 0 else min(workers, len(self.gpus))
        for slot in range(workers):
            free_slots.put({} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": self.gpus[slot]})

        with forward_signals() as signals:

            def run_one(spec: JobSpec) -> None:
                environment = free_slots.get()
                try:
                    if not signals.received:
                        spec.environment.update(environment)
                        run_job(spec)
                finally:
                    free_slots.put(environment)

            specs = _job_specs(self.config, job_overrides, initial_job_idx)
            # Threads of this process wait for the jobs; all processes are forked from one server.
            Parallel(n_jobs=workers, backend="threading", batch_size=1)(delayed(run_one)(s) for s in specs)
        if signals.received:
            raise KeyboardInterrupt
        return _job_returns(job_overrides)


class RayLauncher(Launcher):
    """Runs each job as a Ray task, on the cluster at `address`, or on a Ray with `cpus` processors started here.

    A job takes `cpus_per_job` processors and sees `gpus_per_job` GPUs. The machines of a cluster must share the output
    folder, the data and the code.
    """

    def __init__(self, address: str | None, cpus: int | None, cpus_per_job: float, gpus_per_job: float):
        self.address, self.cpus = address, cpus
        self.per_job = {"num_cpus": cpus_per_job, "num_gpus": gpus_per_job}
        self.config: DictConfig | None = None

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Imports Ray. Raises `UserError` if it is not installed."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # show the same line of several jobs for each of them
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a job without GPUs sees none
        try:
            self.ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError as error:
            raise UserError("hydra/launcher=ray requires Ray. Install it: pip install 'bnn-runner[ray]'") from error
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs. After a stop request, running jobs save their state first."""
        assert self.config is not None
        ray = self.ray
        if not ray.is_initialized():  # it ends with this process
            local = {} if self.address else {"num_cpus": self.cpus, "include_dashboard": False}
            try:
                ray.init(address=self.address or "local", logging_level="ERROR", **local)
            except (ConnectionError, ValueError) as error:
                raise UserError(
                    f"Could not reach Ray at hydra.launcher.address={self.address} ({error}). Start the cluster, or "
                    "use address=null for a Ray on this machine."
                ) from error
        remote = ray.remote(**self.per_job)(run_job)
        specs = _job_specs(self.config, job_overrides, initial_job_idx)
        pending = [remote.options(name=f"job {s.number + 1}").remote(s) for s in specs]
        problems = []
        with forward_signals() as signals:
            while pending:
                signals_before = len(signals.received)
                finished, pending = ray.wait(pending, timeout=0.5)
                for task in finished:
                    try:
                        ray.get(task)
                    except ray.exceptions.RayError as error:
                        problems.append(error)
                if len(signals.received) > signals_before:
                    for task in pending:
                        ray.cancel(task)
        if signals.received:
            raise KeyboardInterrupt
        if problems:
            raise problems[0]
        return _job_returns(job_overrides)


def _job_specs(config: DictConfig, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobSpec]:
    hydra = config.hydra
    added = [s.path for s in hydra.runtime.config_sources if s.provider == "command-line"]
    sweep, start = Path(str(hydra.sweep.dir)), Path(str(hydra.runtime.cwd))
    environment = {str(k): str(v) for k, v in hydra.job.env_set.items()}
    return [
        JobSpec(list(o), n, sweep / str(n), sweep, Path(added[0]) if added else None, start, dict(environment))
        for n, o in enumerate(job_overrides, first)
    ]


def _job_returns(job_overrides: Sequence[Sequence[str]]) -> list[JobReturn]:
    """The return values that Hydra expects; the actual outcomes are in files."""
    return [JobReturn(overrides=list(o), status=JobStatus.COMPLETED) for o in job_overrides]
