"""Runs one experiment end to end (or several that differ in seed or split): from the data to finished cells.

experiment -> cells (finished ones are shown) -> tasks -> trained networks (cache) ->
posterior = method.fit(…) -> Evaluation (saved) -> metrics -> files, figures, DONE
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal, NoReturn

import torch

from bnn_runner.config.keys import RESULTS_VERSION, training_key
from bnn_runner.data.read_once import reading_once
from bnn_runner.errors import Interrupted, RunFailed, UserError
from bnn_runner.experiment import Experiment
from bnn_runner.rng import derive_seed
from bnn_runner.runs.cell import cell_of
from bnn_runner.runs.cost_estimate import Cost, Forecast
from bnn_runner.runs.download import download_missing, prepare_data
from bnn_runner.runs.execute import begin, complete, score_again
from bnn_runner.runs.fit_to_time_limit import announcement, earlier_shortening, fit_to_time_limit
from bnn_runner.runs.messages import describe_run, show_scores
from bnn_runner.runs.provenance import Stages
from bnn_runner.runs.session import CellRun, Session
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.devices import pick_device, thread_count
from bnn_runner.runtime.files import explain_write_error, short_path
from bnn_runner.runtime.leases import Lease
from bnn_runner.runtime.memory import limited_memory
from bnn_runner.runtime.signals import stop_on_signals
from bnn_runner.tasks import Task
from bnn_runner.training.cache import NetworkCache
from bnn_runner.training.provider import NetworkProvider, Training
from bnn_runner.training.state import TrainingConfig

__all__ = ["Outcome", "prepare", "run", "run_together", "network_provider"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: 'done', 'failed', or 'skipped' if all cells were already done.
        message: The reason of the first failure.
        cells: Folders of the cells.
    """

    status: Literal["done", "failed", "skipped"]
    message: str = ""
    cells: tuple[Path, ...] = ()


def run(experiment: Experiment, console: Console | None = None) -> Outcome:
    """Runs every cell of the experiment (one per replicate) and writes it to disk; with `prepare`, only gets its data.

    A failure is recorded in the cell (FAILED) and in the outcome; it does not raise.

    Args:
        experiment: The experiment.
        console: Where messages go; standard output by default.

    Raises:
        UserError: For usage errors that show only with the data or on this machine.
        Interrupted: If a stop was requested. The cell is marked INTERRUPTED; running it again resumes.
    """
    return run_together([experiment], console)[0]


def run_together(
    experiments: Sequence[Experiment], console: Console | None = None, estimated: bool = True
) -> list[Outcome]:
    """Runs experiments that differ only in seed or split, and trains their networks together.

    Args:
        experiments: One or more; each has one cell per replicate.
        console: Where messages go; standard output by default.
        estimated: Whether to estimate the duration of a run without a time limit, which costs some seconds.

    Returns:
        The outcome of each experiment.

    Raises:
        UserError: As for `run`.
        Interrupted: As for `run`.
    """
    console = console or Console()
    settings = experiments[0].settings
    if settings.prepare:
        with stop_on_signals() as stop:
            for e in experiments:
                prepare_data(e, console.say, stop)
        return [Outcome("done") for _ in experiments]
    device = pick_device(settings.device)
    with ExitStack() as stack:
        stack.enter_context(_disk_errors())
        threads = stack.enter_context(thread_count(settings.threads))
        stack.enter_context(limited_memory(settings.memory_gb, console.say))
        stop = stack.enter_context(stop_on_signals())
        progress = console.progress()
        stack.callback(progress.close)
        session = Session(device, threads, console, progress, stop)
        by_seed = [[e.one_seed(seed) for seed in e.seeds] for e in experiments]
        cell_runs, session = _prepare_all([e for run in by_seed for e in run], len(by_seed), session, estimated)
        results = _run_all(cell_runs, session)
    folders = iter([c.cell.folder for c in cell_runs])
    return [_outcome(list(islice(folders, len(run))), results) for run in by_seed]


def _prepare_all(
    experiments: Sequence[Experiment], runs: int, session: Session, estimated: bool
) -> tuple[list[CellRun], Session]:
    """Loads the data of experiments with one seed each, and shortens them if a time limit requires it."""
    settings = experiments[0].settings
    with reading_once():
        for experiment in experiments:
            download_missing(experiment.data, settings.data_path, session.console.say, session.stop)
        earlier = earlier_shortening(experiments, runs)
        if earlier is not None:
            session = replace(session, shortening=earlier)
            experiments = [e.changed(earlier.changes) for e in experiments]
        cell_runs = [prepare(e, session) for e in experiments]
        cost = Cost()
        if (
            earlier is None
            and (settings.time_limit is not None or estimated)
            and not all(_finished(c, session) for c in cell_runs)
        ):
            provider = network_provider(experiments[0], session)
            shortening, cost = fit_to_time_limit(cell_runs, runs, provider, session)
            forecast = Forecast(cost, session.progress, session.console.say)
            session = replace(session, shortening=shortening, progress=forecast)
        lines = announcement(cost, cell_runs, runs, session.shortening)
        if earlier is None and session.shortening.changes:
            cell_runs = [prepare(e.changed(session.shortening.changes), session) for e in experiments]
    return cell_runs, replace(session, announcement=tuple(lines))


def _outcome(folders: Sequence[Path], results: _Results) -> Outcome:
    """The outcome of the experiment with these cells."""
    failures = [results.failed[f] for f in folders if f in results.failed]
    if failures:
        return Outcome("failed", failures[0], tuple(folders))
    if results.skipped.issuperset(folders):
        return Outcome("skipped", "all cells were already finished", tuple(folders))
    return Outcome("done", "", tuple(folders))


@dataclass(frozen=True)
class _Results:
    """Folders of the cells that were already finished, and of those that failed, with the reasons."""

    skipped: set[Path]
    failed: dict[Path, str]


def prepare(experiment: Experiment, session: Session, task: Task | None = None) -> CellRun:
    """Loads the data of an experiment with one seed, and lists the trained networks that it needs.

    Args:
        experiment: The experiment.
        session: The session.
        task: The data, if they are known already, such as those of a saved posterior.
    """
    seed = experiment.settings.seed
    if task is None:
        task = experiment.data.load(experiment.settings.data_path, seed).to(session.device, torch.float32)
    trainings = []
    rule = experiment.training_rule
    specs = experiment.method.needs()
    members = sorted({spec.member for spec in specs})
    for spec in specs:
        lane_seed = derive_seed(seed, "member", spec.member)
        extras = spec.identity if rule is None or not spec.trained else (*spec.identity, ("hyper", repr(rule)))
        key = training_key(experiment.config, task.spec.kind, task.fingerprint, lane_seed, extras)
        label = f"seed {seed}, member {spec.member}"
        pretrained = experiment.pretrained[members.index(spec.member)] if experiment.pretrained else None
        trainings.append(Training(task, lane_seed, key, label, spec.trained, spec.noise_transform, pretrained))
    return CellRun(experiment, cell_of(experiment), task, trainings)


def network_provider(experiment: Experiment, session: Session) -> NetworkProvider:
    """Returns the provider of the experiment's networks: how they are trained, and their cache."""
    settings = experiment.settings
    config = TrainingConfig(
        model=experiment.model,
        schedule=experiment.schedule,
        prior=experiment.prior,
        noise=experiment.noise,
        augment=experiment.augment,
        precision=settings.precision,
        stack=settings.stack,
        compile=settings.compile,
        rule=experiment.training_rule,
    )
    cache = NetworkCache(settings.cache_path)
    return NetworkProvider(config, cache, session.device, session.console.say, session.progress, session.stop)


def _run_all(cell_runs: list[CellRun], session: Session) -> _Results:
    """Shows the finished cells, trains the networks of the others together, and completes them one by one."""
    todo = [c for c in cell_runs if not _finished(c, session)]
    for cell_run in cell_runs:
        if cell_run not in todo:
            if score_again(cell_run, session.console.say):
                session.console.say("other metrics requested: recomputed from the saved evaluation")
            session.console.say(f"already finished (force=true runs it again): {short_path(cell_run.cell.folder)}")
            show_scores(cell_run, session, earlier=True)
    results = _Results({c.cell.folder for c in cell_runs if c not in todo}, {})
    if not todo:
        return results
    provider = network_provider(todo[0].experiment, session)
    describe_run(todo[0], session, provider.config)
    for line in session.announcement:
        session.console.say(line)
    try:
        training_stage = Stages()
        with _disk_errors():
            for cell_run in todo:
                begin(cell_run, session)
            with training_stage.stage("training", session.device):
                diverged = provider.train_missing([t for c in todo for t in c.trainings])
        for cell_run in todo:
            cell_run.stages.seconds.update(training_stage.seconds)
            cell_run.stages.peaks.update(training_stage.peaks)
            try:
                for training in cell_run.trainings:
                    if training.key in diverged:
                        raise RunFailed(diverged[training.key])
                with _disk_errors():
                    _complete_leased(cell_run, provider, session)
            except RunFailed as error:
                results.failed[cell_run.cell.folder] = _fail(cell_run, error, session)
    except (Interrupted, InterruptedError, KeyboardInterrupt) as error:
        _interrupt(todo, str(error) or "stopped by Ctrl-C")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        for cell_run in todo:
            if cell_run.cell.status() == "open":
                _fail(cell_run, error, session)
        raise
    return results


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Turns a full disk or a missing write permission into `RunFailed`, with what to do."""
    try:
        yield
    except OSError as error:
        if (reason := explain_write_error(error)) is None:
            raise
        raise RunFailed(reason) from error


def _complete_leased(cell_run: CellRun, provider: NetworkProvider, session: Session) -> None:
    """Completes a cell as its only writer, unless another process has finished it in the meantime; shows the scores."""

    def waiting(owner: str) -> None:
        session.console.say(f"waiting: {owner} is running this cell")

    with Lease(cell_run.cell.folder, waiting, session.stop):
        if cell_run.cell.status() != "done" or cell_run.experiment.settings.force:
            complete(cell_run, provider, session)
    show_scores(cell_run, session)


def _finished(cell_run: CellRun, session: Session) -> bool:
    """Whether the cell is done, with the same data and version of results; never with `force`."""
    if cell_run.experiment.settings.force or cell_run.cell.status() != "done":
        return False
    facts = cell_run.cell.facts()
    if facts.get("results_version") != RESULTS_VERSION or facts.get("fingerprint") != cell_run.task.fingerprint:
        session.console.say(
            f"the data or the program has changed since {short_path(cell_run.cell.folder)} was run: running it again"
        )
        cell_run.cell.set_status("open", "")
        return False
    if cell_run.experiment.settings.save_posterior and "posterior_saved" not in facts:
        session.console.say(f"the posterior of {short_path(cell_run.cell.folder)} was not saved: running it again")
        cell_run.cell.set_status("open", "")
        return False
    return True


def _fail(cell_run: CellRun, error: BaseException, session: Session) -> str:
    """Writes FAILED (the reason in the first line, then the traceback) and prints the reason; returns the reason."""
    reason = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
    first_line = " ".join(reason.split())
    traceback_text = "".join(traceback.format_exception(error))
    with suppress(OSError):  # if the disk is full, only the outcome has the reason
        cell_run.cell.set_status("failed", first_line + "\n\n" + traceback_text)
    session.console.log = cell_run.cell.folder / "log.txt"
    session.console.write_log(traceback_text)
    session.console.say(f"FAILED: {reason}")
    session.console.log = None
    session.console.say(f"cell     {short_path(cell_run.cell.folder)}")
    return first_line


def _interrupt(todo: list[CellRun], reason: str) -> NoReturn:
    for cell_run in todo:
        if cell_run.cell.status() not in ("done", "failed"):
            with suppress(OSError):
                cell_run.cell.set_status("interrupted", reason)
    raise Interrupted(reason)
