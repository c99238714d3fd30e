"""One run: the way of the data, from an experiment to finished cells.

experiment -> cells (finished ones are shown) -> tasks -> trained networks (cache) ->
posterior = method.fit(…) -> Evaluation (saved) -> metrics -> files, figures, DONE
"""

from __future__ import annotations

import traceback
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

import torch

from bnn_runner import budget as budgets
from bnn_runner.budget import Budget
from bnn_runner.cache import NetworkCache
from bnn_runner.cells import Cell
from bnn_runner.completion import begin, complete, score_again
from bnn_runner.config import Experiment
from bnn_runner.devices import pick_device, thread_count
from bnn_runner.errors import Interrupted, RunFailed, UserError
from bnn_runner.interrupts import stop_on_signals
from bnn_runner.keys import RECIPE, cell_hash, digest, training_key
from bnn_runner.lease import Lease
from bnn_runner.preparation import acquire, prepare_data
from bnn_runner.progress import Console
from bnn_runner.provenance import Stages
from bnn_runner.session import Session, Work
from bnn_runner.streams import derive_seed
from bnn_runner.telling import describe, short, show_scores
from bnn_runner.training_state import Lane, Recipe
from bnn_runner.workplan import Training, Workplan

__all__ = ["Outcome", "prepare", "run", "workplan"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, skipped (all cells were done) or failed; `message` is its first reason."""

    status: Literal["done", "failed", "skipped"]
    message: str = ""
    cells: tuple[Path, ...] = ()


def run(experiment: Experiment, console: Console | None = None) -> Outcome:
    """Run every cell of the experiment (one a replicate) and leave it on disk; with `prepare`, only fetch its data.

    Raises `UserError` for mistakes that only the data or the machine reveal. A run that fails is
    FAILED in its cell and in the outcome; one that is stopped is CUT, goes on when run again, and
    raises `Interrupted`.
    """
    console = console or Console()
    settings = experiment.settings
    if settings.prepare:
        with stop_on_signals() as stop:
            choice = str(experiment.choices["data"])
            prepare_data(experiment.data, choice, settings.data_path, settings.seed, console.say, stop)
        return Outcome("done")
    device = pick_device(settings.device)
    with ExitStack() as stack:
        threads = stack.enter_context(thread_count(settings.threads))
        stop = stack.enter_context(stop_on_signals())
        progress = console.progress()
        stack.callback(progress.close)
        session = Session(device, threads, console, progress, stop)
        acquire(experiment.data, settings.data_path, console.say, stop)
        works = _works(experiment, session)
        if not all(_finished(w, session) for w in works):
            experiment, budget = _fit_to_time_limit(works, session)
            if budget.changes:
                session = replace(session, budget=budget)
                works = _works(experiment, session)
        return _run_all(works, session)


def _works(experiment: Experiment, session: Session) -> list[Work]:
    settings = experiment.settings
    return [prepare(experiment, settings.seed + r, session) for r in range(settings.replicates)]


def prepare(experiment: Experiment, seed: int, session: Session) -> Work:
    """Task, cell and needed trainings of one seed."""
    config = {**experiment.config, "seed": seed, "replicates": 1}
    experiment = replace(experiment, config=config)
    task = experiment.data.load(experiment.settings.data_path, seed).to(session.device, torch.float32)
    method, choices = experiment.method, experiment.choices
    cell = Cell(
        root=experiment.settings.output_dir,
        data=str(choices["data"]),
        model=str(choices["model"]),
        method=str(choices["method"]),
        seed=seed,
        hash=cell_hash(config, experiment.uses_hyper, method.finite),
    )
    trainings = []
    rule = experiment.training_rule
    needed = method.needs()
    members = sorted({spec.member for spec in needed})
    for spec in needed:
        lane_seed = derive_seed(seed, "member", spec.member)
        extras = spec.identity if rule is None or not spec.trained else (*spec.identity, ("hyper", repr(rule)))
        key = training_key(config, task.spec.kind, task.fingerprint, lane_seed, extras)
        label = f"seed {seed}, member {spec.member}"
        given = experiment.given[members.index(spec.member)] if experiment.given else None
        trainings.append(Training(task, lane_seed, key, label, spec.trained, spec.rework, given))
    return Work(experiment, cell, task, trainings)


def workplan(experiment: Experiment, session: Session) -> Workplan:
    """How the experiment's networks are got."""
    settings = experiment.settings
    recipe = Recipe(
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
    return Workplan(recipe, cache, session.device, session.console.say, session.progress, session.stop)


def _fit_to_time_limit(works: list[Work], session: Session) -> tuple[Experiment, Budget]:
    """The experiment made to fit the time limit, and what that changed."""
    experiment = works[0].experiment
    limit = budgets.limit_seconds(experiment.settings.time_limit, session.device)
    request = digest([[w.cell.hash for w in works], limit])
    kept = experiment.settings.cache_path / "plans" / f"{request}.json"
    cost = budgets.Cost()
    changes = budgets.remembered(kept) if limit is not None and not experiment.settings.force else None
    if changes is None:
        plan = workplan(experiment, session)
        needed = [t for w in works for t in w.trainings if t.trained and t.given is None]
        missing = [Lane(t.task, t.lane_seed, t.key) for t in needed if not plan.cache.has(t.key)]
        others = [_other_points(w) for w in works]
        scored = [len(w.task.test) + sum(n) for w, n in zip(works, others, strict=True)]
        recipe = replace(plan.recipe, rework=needed[0].rework if needed else None)
        cost = budgets.estimate(experiment, recipe, [w.task for w in works], missing, scored, session.device)
        changes = {}
        if limit is not None:
            changes = budgets.shorten(cost, limit, works[0].task, others[0], experiment.schedule, len(works))
    budget = Budget(changes, budgets.asked(experiment, changes), (limit or 0.0) / 60)
    if changes or kept.exists():  # a forced run may find that nothing need be shortened now
        budgets.remember(kept, changes)
    budgets.announce(cost, budget, works[0].command(budget), session.console.say)
    return budgets.apply(experiment, changes), budget


def _other_points(work: Work) -> list[int]:
    """How many points of the validation part, of each out-of-distribution set and each level of shift are scored."""
    settings, task = work.experiment.settings.eval, work.task
    sizes = [(len(s), settings.max_ood) for name, s in task.splits().items() if name not in ("train", "test")]
    sizes += [(len(s), settings.max_shift) for s in task.shifted.values()]
    return [n if cap is None else min(n, cap) for n, cap in sizes]


def _run_all(works: list[Work], session: Session) -> Outcome:
    """Show the finished cells; train what the others need together; complete them one by one."""
    folders = tuple(w.cell.folder for w in works)
    todo = [w for w in works if not _finished(w, session)]
    for work in works:
        if work not in todo:
            if score_again(work):
                session.console.say("other metrics are asked for: made again from the saved evaluation")
            session.console.say(
                f"already finished, nothing to do (force=true runs it again): {short(work.cell.folder)}"
            )
            show_scores(work, session)
    if not todo:
        return Outcome("skipped", "all cells were finished", folders)
    plan = workplan(todo[0].experiment, session)
    describe(todo[0], session, plan.recipe)
    failures: list[str] = []
    try:
        for work in todo:
            begin(work, session)
        together = Stages()
        with together.stage("training", session.device):
            diverged = plan.train_missing([t for w in todo for t in w.trainings])
        for work in todo:
            work.stages.seconds.update(together.seconds)
            work.stages.peaks.update(together.peaks)
            try:
                for training in work.trainings:
                    if training.key in diverged:
                        raise RunFailed(diverged[training.key])
                _complete_leased(work, plan, session)
            except RunFailed as error:
                failures.append(_fail(work, error, session))
    except (Interrupted, InterruptedError, KeyboardInterrupt) as error:
        _cut(todo, str(error) or "stopped by Ctrl-C")
    except UserError:
        raise
    except Exception as error:
        for work in todo:
            if work.cell.status() == "open":
                _fail(work, error, session)
        raise
    return Outcome("failed", failures[0], folders) if failures else Outcome("done", "", folders)


def _complete_leased(work: Work, plan: Workplan, session: Session) -> None:
    """Complete a cell with no other writer beside us; what another finished meanwhile is shown."""

    def waiting(owner: str) -> None:
        session.console.say(f"waiting: {owner} runs this cell")

    with Lease(work.cell.folder, waiting, session.stop):
        if work.cell.status() != "done" or work.experiment.settings.force:
            complete(work, plan, session)
    show_scores(work, session)


def _finished(work: Work, session: Session) -> bool:
    """Whether the cell is done, of this recipe and of the same data; `force` says no."""
    if work.experiment.settings.force or work.cell.status() != "done":
        return False
    facts = work.cell.facts()
    if facts.get("recipe") != RECIPE or facts.get("fingerprint") != work.task.fingerprint:
        session.console.say(f"the data or the recipe of {short(work.cell.folder)} have changed: it is made anew")
        work.cell.set_status("open", "")
        return False
    if work.experiment.settings.save_posterior and "posterior_saved" not in facts:
        session.console.say(f"the posterior of {short(work.cell.folder)} was not kept: it is fitted again")
        work.cell.set_status("open", "")
        return False
    return True


def _fail(work: Work, error: BaseException, session: Session) -> str:
    """FAILED in the cell, with the reason in its first line and the traceback below; the reason."""
    reason = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
    first_line = " ".join(reason.split())
    work.cell.set_status("failed", first_line + "\n\n" + "".join(traceback.format_exception(error)))
    session.console.say(f"FAILED: {reason}")
    session.console.say(f"cell     {short(work.cell.folder)}")
    return first_line


def _cut(todo: list[Work], reason: str) -> NoReturn:
    for work in todo:
        if work.cell.status() not in ("done", "failed"):
            work.cell.set_status("cut", reason)
    raise Interrupted(reason)
