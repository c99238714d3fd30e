"""One run: the way of the data, from an experiment (or several that differ in seed or split) to finished cells.

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
from bnn_runner.runs.download import acquire, prepare_data
from bnn_runner.runs.execute import begin, complete, score_again
from bnn_runner.runs.fit_to_time_limit import announcement, decided_before, fit_to_time_limit
from bnn_runner.runs.messages import describe_run, show_scores
from bnn_runner.runs.provenance import Stages
from bnn_runner.runs.session import CellRun, Session
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.devices import pick_device, thread_count
from bnn_runner.runtime.files import explain_write_error, short_path
from bnn_runner.runtime.leases import Lease
from bnn_runner.runtime.memory import limited_memory
from bnn_runner.runtime.signals import stop_on_signals
from bnn_runner.training.cache import NetworkCache
from bnn_runner.training.provider import NetworkProvider, Training
from bnn_runner.training.state import TrainingConfig

__all__ = ["Outcome", "prepare", "run", "run_together", "network_provider"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, skipped (all cells were done) or failed; `message` is its first reason."""

    status: Literal["done", "failed", "skipped"]
    message: str = ""
    cells: tuple[Path, ...] = ()


def run(experiment: Experiment, console: Console | None = None) -> Outcome:
    """Run every cell of the experiment (one a replicate) and leave it on disk; with `prepare`, only fetch its data.

    Raises `UserError` for mistakes that only the data or the machine reveal. A run that fails is
    FAILED in its cell and in the outcome; one that is stopped is INTERRUPTED, resumes when run again, and raises
    `Interrupted`.
    """
    return run_together([experiment], console)[0]


def run_together(
    experiments: Sequence[Experiment], console: Console | None = None, estimated: bool = True
) -> list[Outcome]:
    """Run experiments that differ in seed or split only; what they have to train is trained together.

    Args:
        experiments: one or more; each has a cell for every replicate.
        console: where messages go; standard output by default.
        estimated: whether to estimate what a run without a time limit will take, which costs some seconds.

    Returns:
        The outcome of each experiment.

    Raises:
        Interrupted, UserError: as `run`.
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
        cells = [[e.one_seed(seed) for seed in e.seeds] for e in experiments]
        cell_runs, session = _prepare_all([e for some in cells for e in some], len(cells), session, estimated)
        ended = _run_all(cell_runs, session)
    folders = iter([c.cell.folder for c in cell_runs])
    return [_outcome(list(islice(folders, len(some))), ended) for some in cells]


def _prepare_all(
    experiments: Sequence[Experiment], runs: int, session: Session, estimated: bool
) -> tuple[list[CellRun], Session]:
    """The cells of experiments of one seed each, with their data; shortened where a time limit requires it."""
    settings = experiments[0].settings
    with reading_once():
        for experiment in experiments:
            acquire(experiment.data, settings.data_path, session.console.say, session.stop)
        decided = decided_before(experiments, runs)
        if decided is not None:
            session = replace(session, shortening=decided)
            experiments = [e.changed(decided.changes) for e in experiments]
        cell_runs = [prepare(e, session) for e in experiments]
        cost = Cost()
        if (
            decided is None
            and (settings.time_limit is not None or estimated)
            and not all(_finished(c, session) for c in cell_runs)
        ):
            provider = network_provider(experiments[0], session)
            shortening, cost = fit_to_time_limit(cell_runs, runs, provider, session)
            forecast = Forecast(cost, session.progress, session.console.say)
            session = replace(session, shortening=shortening, progress=forecast)
        lines = announcement(cost, cell_runs, runs, session.shortening)
        if decided is None and session.shortening.changes:
            cell_runs = [prepare(e.changed(session.shortening.changes), session) for e in experiments]
    return cell_runs, replace(session, announcement=tuple(lines))


def _outcome(folders: Sequence[Path], ended: _Ended) -> Outcome:
    """The outcome of the experiment that has these cells."""
    failures = [ended.failed[f] for f in folders if f in ended.failed]
    if failures:
        return Outcome("failed", failures[0], tuple(folders))
    if ended.skipped.issuperset(folders):
        return Outcome("skipped", "all cells were already finished", tuple(folders))
    return Outcome("done", "", tuple(folders))


@dataclass(frozen=True)
class _Ended:
    """Folders of the cells that were finished before, and of those that failed with the reasons."""

    skipped: set[Path]
    failed: dict[Path, str]


def prepare(experiment: Experiment, session: Session) -> CellRun:
    """Task, cell and needed trainings of an experiment of one seed."""
    seed = experiment.settings.seed
    task = experiment.data.load(experiment.settings.data_path, seed).to(session.device, torch.float32)
    trainings = []
    rule = experiment.training_rule
    needed = experiment.method.needs()
    members = sorted({spec.member for spec in needed})
    for spec in needed:
        lane_seed = derive_seed(seed, "member", spec.member)
        extras = spec.identity if rule is None or not spec.trained else (*spec.identity, ("hyper", repr(rule)))
        key = training_key(experiment.config, task.spec.kind, task.fingerprint, lane_seed, extras)
        label = f"seed {seed}, member {spec.member}"
        pretrained = experiment.pretrained[members.index(spec.member)] if experiment.pretrained else None
        trainings.append(Training(task, lane_seed, key, label, spec.trained, spec.noise_transform, pretrained))
    return CellRun(experiment, cell_of(experiment), task, trainings)


def network_provider(experiment: Experiment, session: Session) -> NetworkProvider:
    """How the experiment's networks are got."""
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


def _run_all(cell_runs: list[CellRun], session: Session) -> _Ended:
    """Show the finished cells; train what the others need together; complete them one by one."""
    todo = [w for w in cell_runs if not _finished(w, session)]
    for cell_run in cell_runs:
        if cell_run not in todo:
            if score_again(cell_run):
                session.console.say("other metrics requested: recomputed from the saved evaluation")
            session.console.say(f"already finished (force=true runs it again): {short_path(cell_run.cell.folder)}")
            show_scores(cell_run, session)
    ended = _Ended({w.cell.folder for w in cell_runs if w not in todo}, {})
    if not todo:
        return ended
    plan = network_provider(todo[0].experiment, session)
    describe_run(todo[0], session, plan.config)
    for line in session.announcement:
        session.console.say(line)
    try:
        together = Stages()
        with _disk_errors():
            for cell_run in todo:
                begin(cell_run, session)
            with together.stage("training", session.device):
                diverged = plan.train_missing([t for w in todo for t in w.trainings])
        for cell_run in todo:
            cell_run.stages.seconds.update(together.seconds)
            cell_run.stages.peaks.update(together.peaks)
            try:
                for training in cell_run.trainings:
                    if training.key in diverged:
                        raise RunFailed(diverged[training.key])
                with _disk_errors():
                    _complete_leased(cell_run, plan, session)
            except RunFailed as error:
                ended.failed[cell_run.cell.folder] = _fail(cell_run, error, session)
    except (Interrupted, InterruptedError, KeyboardInterrupt) as error:
        _interrupt(todo, str(error) or "stopped by Ctrl-C")
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        for cell_run in todo:
            if cell_run.cell.status() == "open":
                _fail(cell_run, error, session)
        raise
    return ended


@contextmanager
def _disk_errors() -> Iterator[None]:
    """A full disk, or a folder that may not be written, is no bug of ours: it ends the run with what to do."""
    try:
        yield
    except OSError as error:
        if (reason := explain_write_error(error)) is None:
            raise
        raise RunFailed(reason) from error


def _complete_leased(cell_run: CellRun, plan: NetworkProvider, session: Session) -> None:
    """Complete a cell with no other writer beside us; what another finished meanwhile is shown."""

    def waiting(owner: str) -> None:
        session.console.say(f"waiting: {owner} is running this cell")

    with Lease(cell_run.cell.folder, waiting, session.stop):
        if cell_run.cell.status() != "done" or cell_run.experiment.settings.force:
            complete(cell_run, plan, session)
    show_scores(cell_run, session)


def _finished(cell_run: CellRun, session: Session) -> bool:
    """Whether the cell is done, by this version's results and from the same data; `force` says no."""
    if cell_run.experiment.settings.force or cell_run.cell.status() != "done":
        return False
    facts = cell_run.cell.facts()
    if facts.get("results_version") != RESULTS_VERSION or facts.get("fingerprint") != cell_run.task.fingerprint:
        session.console.say(
            f"the data or the program have changed since {short_path(cell_run.cell.folder)} was run: running it again"
        )
        cell_run.cell.set_status("open", "")
        return False
    if cell_run.experiment.settings.save_posterior and "posterior_saved" not in facts:
        session.console.say(f"the posterior of {short_path(cell_run.cell.folder)} was not saved: running it again")
        cell_run.cell.set_status("open", "")
        return False
    return True


def _fail(cell_run: CellRun, error: BaseException, session: Session) -> str:
    """FAILED in the cell, with the reason in its first line and the traceback below; the reason."""
    reason = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
    first_line = " ".join(reason.split())
    told = "".join(traceback.format_exception(error))
    with suppress(OSError):  # where nothing can be written, the outcome alone has the reason
        cell_run.cell.set_status("failed", first_line + "\n\n" + told)
    session.console.log = cell_run.cell.folder / "log.txt"
    session.console.write_log(told)
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
