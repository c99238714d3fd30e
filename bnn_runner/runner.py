"""One run: the way of the data, from an experiment to finished cells.

    experiment -> cells (finished ones are shown) -> tasks -> trained networks (cache) ->
    posterior = method.fit(…) -> Evaluation (saved) -> metrics -> files, figures, DONE
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from bnn_runner import __version__, evaluation_store
from bnn_runner.base import Evaluation, FitContext, Network, Posterior, Score, Task
from bnn_runner import budget as budgets
from bnn_runner.budget import Budget
from bnn_runner.cache import NetworkCache
from bnn_runner.cells import Cell, command_line, headline, write_description
from bnn_runner.citations import bibliography
from bnn_runner.config import Experiment
from bnn_runner.devices import pick_device, thread_count
from bnn_runner.errors import Interrupted, RunFailed, UserError
from bnn_runner.evaluation import evaluate
from bnn_runner.interrupts import StopRequest, stop_on_signals
from bnn_runner.keys import RECIPE, cell_hash, digest, flatten, select, training_key
from bnn_runner.lease import Lease
from bnn_runner.progress import Console, Progress, duration
from bnn_runner.provenance import collect
from bnn_runner.storage import write_json, write_text
from bnn_runner.streams import derive_seed, generator
from bnn_runner.training import Lane, Recipe
from bnn_runner.workplan import Training, Workplan

MAX_VAL = 2000
"""Points of the validation part that are scored (a seeded subset); hyperparameter rules use all of it."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, skipped (all cells were done), failed or cut; `message` is its first reason."""

    status: Literal["done", "failed", "cut", "skipped"]
    message: str = ""
    cells: tuple[Path, ...] = ()


@dataclass
class Work:
    """One cell on its way."""

    experiment: Experiment
    cell: Cell
    task: Task
    trainings: list[Training]
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Session:
    """What all cells of a run share."""

    device: torch.device
    threads: int
    console: Console
    progress: Progress
    stop: StopRequest
    budget: Budget = field(default_factory=Budget)

    def step(self, stage: str, done: int, total: int) -> None:
        """Progress that is also the place where a posterior fit or an evaluation can be stopped."""
        self.stop.check(stage)
        self.progress(stage, done, total)


def run(experiment: Experiment, overrides: Sequence[str] = (), console: Console | None = None) -> Outcome:
    """Run every cell of the experiment (one a replicate) and leave it on disk.

    Raises `UserError` for mistakes that only the data or the machine reveal. A run that fails is
    FAILED in its cell and in the outcome; one that is stopped is CUT, goes on when run again, and
    raises `Interrupted`.
    """
    console = console or Console()
    settings = experiment.settings
    device = pick_device(settings.device)
    with ExitStack() as stack:
        threads = stack.enter_context(thread_count(settings.threads))
        stop = stack.enter_context(stop_on_signals())
        progress = console.progress()
        stack.callback(progress.close)
        for note in experiment.notes:
            console.say(f"note: {note}")
        session = Session(device, threads, console, progress, stop)
        works = _works(experiment, session)
        if not all(_finished(w, session) for w in works):
            changes = _fitting_changes(works, session)
            if changes:
                session = replace(session, budget=changes[1])
                works = _works(changes[0], session)
        return _run_all(works, session)


def _works(experiment: Experiment, session: Session) -> list[Work]:
    settings = experiment.settings
    return [_prepare(experiment, settings.seed + r, session) for r in range(settings.replicates)]


def _fitting_changes(works: list[Work], session: Session) -> tuple[Experiment, Budget] | None:
    """The experiment made to fit the time limit, and how; None where it fits as it is."""
    experiment, settings = works[0].experiment, works[0].experiment.settings
    limit = budgets.limit_seconds(settings.time_limit, session.device)
    kept = settings.cache_path / "plans" / f"{digest([[w.cell.hash for w in works], limit])}.json"
    changes = budgets.remembered(kept) if limit is not None else None
    cost = budgets.Cost(0.0, 0.0, 0.0)
    scored = [sum(min(len(s), MAX_VAL) for n, s in w.task.splits().items() if n != "train" and n != "test") + len(w.task.test) for w in works]
    if changes is None:
        plan = _workplan(experiment, session)
        missing = [Lane(t.task, t.lane_seed, t.key) for w in works for t in w.trainings if not plan.cache.has(t.key)]
        cost = budgets.estimate(experiment, plan.recipe, [w.task for w in works], missing, scored, session.device)
        changes = {}
        if limit is not None:
            changes = budgets.shorten(cost, limit, works[0].task, scored[0], experiment.schedule.epochs, len(works))
    budget = Budget(changes, budgets.asked(experiment, changes), (limit or 0.0) / 60)
    if changes:
        budgets.remember(kept, changes)
    budgets.announce(cost, budget, limit, _command(works[0], replace(session, budget=budget)), session.console.say)
    return (budgets.apply(experiment, changes), budget) if changes else None


def _prepare(experiment: Experiment, seed: int, session: Session) -> Work:
    """Task, cell and needed trainings of one seed."""
    config = {**experiment.config, "seed": seed, "replicates": 1}
    experiment = replace(experiment, config=config)
    task = experiment.data.load(experiment.settings.data_path, seed).to(session.device, torch.float32)
    method = experiment.method
    cell = Cell(
        root=experiment.settings.output_dir,
        data=str(experiment.choices["data"]),
        model=str(experiment.choices["model"]),
        method=str(experiment.choices["method"]),
        seed=seed,
        hash=cell_hash(config, method.uses_hyper, method.finite),
    )
    trainings = []
    for spec in method.needs():
        lane_seed = derive_seed(seed, "member", spec.member)
        key = training_key(config, task.spec.kind, task.fingerprint, lane_seed, spec.extras)
        trainings.append(Training(task, lane_seed, key, f"seed {seed}, member {spec.member}"))
    return Work(experiment, cell, task, trainings)


def _run_all(works: list[Work], session: Session) -> Outcome:
    todo = [w for w in works if not _finished(w, session)]
    for work in works:
        if work not in todo:
            _show_finished(work, session)
    if not todo:
        return Outcome("skipped", "all cells were finished", tuple(w.cell.folder for w in works))
    _describe(todo[0], session)
    plan = _workplan(todo[0].experiment, session)
    failures: list[str] = []
    try:
        failed = plan.train_missing([t for w in todo for t in w.trainings])
        for work in todo:
            work.seconds.update({k: v for k, v in session.progress.seconds.items() if k.startswith("training")})
            reasons = [failed[t.key] for t in work.trainings if t.key in failed]
            if reasons:
                _fail(work, reasons[0], reasons[0], session)
                failures.append(reasons[0])
                continue
            try:
                with Lease(work.cell.folder, lambda owner: session.console.say(f"waiting: {owner} runs this cell"), session.stop):
                    if not _finished(work, session):
                        _complete(work, plan, session)
                _show_scores(work, session)
            except RunFailed as error:
                _fail(work, str(error), traceback.format_exc(), session)
                failures.append(str(error))
    except (Interrupted, InterruptedError, KeyboardInterrupt) as error:
        _cut(todo, str(error) or "stopped")
    except UserError:
        raise
    except Exception as error:
        for work in todo:
            if work.cell.status() != "done":
                _fail(work, f"{type(error).__name__}: {error}", traceback.format_exc(), session)
        raise
    folders = tuple(w.cell.folder for w in works)
    return Outcome("failed", failures[0], folders) if failures else Outcome("done", "", folders)


def _workplan(experiment: Experiment, session: Session) -> Workplan:
    settings = experiment.settings
    recipe = Recipe(
        experiment.model, experiment.schedule, experiment.prior, experiment.noise, settings.precision, stack=settings.stack
    )
    return Workplan(recipe, NetworkCache(settings.cache_path), session.device, session.console.say, session.progress, session.stop)


def _complete(work: Work, plan: Workplan, session: Session) -> None:
    """Posterior, evaluation, scores and files of one cell whose networks are trained."""
    experiment, cell, console = work.experiment, work.cell, session.console
    cell.folder.mkdir(parents=True, exist_ok=True)
    cell.set_status("open", "")
    console.log = cell.folder / "log.txt"
    try:
        networks = [n for t in work.trainings if (n := plan.load(t)) is not None]
        if len(networks) != len(work.trainings):
            raise RunFailed("a trained network vanished from the cache while the run went on. Run the same command again.")
        posterior = _fit(work, networks, session)
        evaluation = _evaluate(work, posterior, session)
        session.stop.check("evaluation")
        scores = _score(work, evaluation)
        _write(work, networks, posterior, evaluation, scores, session)
        cell.finish()
    finally:
        console.log = None


def _fit(work: Work, networks: list[Network], session: Session) -> Posterior:
    start = time.perf_counter()
    context = FitContext(
        seed=work.cell.seed,
        hyper=work.experiment.hyper,
        batch_size=work.experiment.settings.eval.batch_size,
        progress=session.step,
    )
    posterior = work.experiment.method.fit(work.task, networks, context)
    work.seconds["posterior"] = time.perf_counter() - start
    for name, rule in _condensed(posterior.treatment).items():
        session.console.write_log(f"treatment: {rule}: {name}")
    return posterior


def _evaluate(work: Work, posterior: Posterior, session: Session) -> Evaluation:
    start = time.perf_counter()
    settings = work.experiment.settings.eval
    evaluation = evaluate(
        _with_short_val(work.task, work.cell.seed),
        posterior,
        work.experiment.method.predictive,
        num_draws=settings.num_draws,
        seed=derive_seed(work.cell.seed, "posterior"),
        batch_size=settings.batch_size,
        max_ood=settings.max_ood if settings.max_ood is not None else 2**31,
        progress=session.step,
    )
    work.seconds["evaluation"] = time.perf_counter() - start
    return evaluation


def _with_short_val(task: Task, seed: int) -> Task:
    if len(task.val) <= MAX_VAL:
        return task
    chosen = torch.randperm(len(task.val), generator=generator(seed, "eval", "val"))[:MAX_VAL]
    return replace(task, val=task.val.subset(chosen.sort().values))


def _score(work: Work, evaluation: Evaluation) -> list[Score]:
    return [s for metric in work.experiment.metrics.values() for s in metric(evaluation, work.cell.seed)]


def _condensed(treatment: Any) -> dict[str, str]:
    """{parameter names: rule} turned into {rule: names}."""
    rules: dict[str, list[str]] = {}
    for name, rule in treatment.items():
        rules.setdefault(rule, []).append(name)
    return {", ".join(names): rule for rule, names in rules.items()}


def _write(
    work: Work, networks: list[Network], posterior: Posterior, evaluation: Evaluation, scores: list[Score], session: Session
) -> None:
    from bnn_runner.artifacts import draw_figures

    experiment, cell, settings = work.experiment, work.cell, work.experiment.settings
    start = time.perf_counter()
    evaluation_store.save(evaluation, cell.folder)
    cell.write_scores(scores)
    cell.write_history([n.history for n in networks])
    from omegaconf import OmegaConf

    write_text(cell.folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(experiment.config)))
    write_text(cell.folder / "command.txt", _command(work, session) + "\n")
    write_text(cell.folder / "citations.bib", bibliography([experiment.data, experiment.model, experiment.method, experiment.hyper, experiment.schedule, *experiment.metrics.values()] if experiment.method.uses_hyper else [experiment.data, experiment.model, experiment.method, experiment.schedule, *experiment.metrics.values()]))
    if settings.figures:
        draw_figures(cell.folder, work.task, posterior, experiment, evaluation, scores, networks)
    work.seconds["writing"] = time.perf_counter() - start
    facts = {
        "data": cell.data,
        "model": cell.model,
        "method": cell.method,
        "seed": cell.seed,
        "hash": cell.hash,
        "choices": experiment.choices,
        "recipe": RECIPE,
        "version": __version__,
        "kind": work.task.spec.kind,
        "fingerprint": work.task.fingerprint,
        "metrics_digest": _metrics_digest(experiment),
        "shortened": session.budget.describe(),
        "config": flatten(experiment.config),
        "report": dict(posterior.report),
        "notes": [*work.task.notes, *experiment.notes, *evaluation.notes, *session.budget.notes()],
        "headline": headline(scores),
    }
    write_description(cell, facts)
    provenance = collect(session.device, settings.precision, session.threads, work.seconds)
    provenance |= {
        "training_keys": [t.key for t in work.trainings],
        "training_seconds_when_trained": sum(n.seconds for n in networks),
        "parameters": networks[0].num_parameters,
        "training_points": len(work.task.train),
        "weight_decay_of_the_prior": _weight_decays(networks[0], len(work.task.train)),
        "treatment": dict(posterior.treatment),
        "repairs": dict(posterior.report.get("repairs", {})),
    }
    write_json(cell.folder / "provenance.json", provenance)


def _weight_decays(network: Network, num_points: int) -> dict[str, float]:
    """The decay λ/N that each distinct training precision amounts to in the objective."""
    return {f"precision {p:g}": p / num_points for p in sorted(set(network.prior_precision.values()))}


def _command(work: Work, session: Session) -> str:
    """Every override the cell came from, its own seed, and what the time limit changed, spelled out."""
    changed = session.budget.changes
    skip = {"seed", "replicates", "time_limit", *changed}
    words = [o for o in work.experiment.overrides if o.lstrip("+").partition("=")[0] not in skip]
    words += [f"{k}={v}" for k, v in changed.items()]
    words += [f"seed={work.cell.seed}", "time_limit=null"]
    return command_line(words, getattr(work.experiment, 'config_dir', None))


def _metrics_digest(experiment: Experiment) -> str:
    return digest(select(experiment.config, "never") and {k: v for k, v in flatten(experiment.config).items() if k.startswith("metric.")})


def _finished(work: Work, session: Session) -> bool:
    """Whether the cell is done, of this recipe and of the same data; `force` says no."""
    if work.experiment.settings.force or work.cell.status() != "done":
        return False
    facts = work.cell.facts()
    if facts.get("recipe") != RECIPE or facts.get("fingerprint") != work.task.fingerprint:
        session.console.say(f"the data or the recipe of {work.cell.folder} have changed since it was made: it is made anew")
        return False
    return True


def _describe(work: Work, session: Session) -> None:
    task, experiment, say = work.task, work.experiment, session.console.say
    sizes = f"{len(task.train):,} train, {len(task.val):,} validation, {len(task.test):,} test"
    say(f"data={work.cell.data}: {task.spec.kind}, inputs {list(task.spec.input_shape)}, {sizes}")
    for note in task.notes:
        say(f"note: {note}")
    for name, reason in task.unavailable.items():
        say(f"out-of-distribution set {name}: not available ({reason})")
    needs = len(work.trainings)
    extra = "" if needs == 1 else f", {needs} trained networks"
    schedule = experiment.schedule
    say(
        f"model={work.cell.model} method={work.cell.method}{extra}: {schedule.epochs} epochs of {schedule.optimizer}, "
        f"device {session.device.type}, {session.threads} threads"
    )


def _show_finished(work: Work, session: Session) -> None:
    """A finished cell's table; its scores are made again from the saved evaluation if other metrics are asked for."""
    facts = work.cell.facts()
    say = session.console.say
    if facts.get("metrics_digest") != _metrics_digest(work.experiment):
        scores = _score(work, evaluation_store.load(work.cell.folder))
        work.cell.write_scores(scores)
        write_description(work.cell, facts | {"metrics_digest": _metrics_digest(work.experiment), "headline": headline(scores)})
        say("metrics made again from the saved evaluation")
    say(f"already finished, nothing to do (force=true runs it again): {work.cell.folder}")
    _show_scores(work, session)


def _show_scores(work: Work, session: Session) -> None:
    from bnn_runner.report.cells import read_scores
    from bnn_runner.report.console import score_table

    cell, say = work.cell, session.console.say
    report = cell.facts().get("report", {})
    say()
    say(f"{cell.data} · {cell.model} · {cell.method} · seed {cell.seed}")
    if session.budget.changes:
        say(f"SHORTENED by time_limit: {session.budget.summary()}")
    if report.get("evidence_nats") is not None:
        precision = report.get("prior_precision")
        chosen = f", prior precision {precision:.4g}" if precision is not None else ""
        say(f"log evidence {report['evidence_nats']:.2f} nats over {report['evidence_over']} ({report['structure']}{chosen}, {report['hyper_status']})")
    for note in report.get("notes", []):
        say(f"note: {note}")
    if report.get("repairs"):
        say(f"numerical repairs: {report['repairs']}")
    say(score_table(read_scores(cell.folder / "metrics.csv")))
    for picture in sorted((cell.folder / "figures").glob("*.png")):
        say(f"picture  {_short(picture)}")
    say(f"cell     {_short(cell.folder)}")
    if work.seconds:
        say("seconds  " + ", ".join(f"{k} {v:.1f}" for k, v in work.seconds.items()))


def _short(path: Path) -> str:
    """Relative to the folder the user is in, where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _fail(work: Work, reason: str, trace: str, session: Session) -> None:
    work.cell.set_status("failed", f"{reason}\n\n{trace}")
    session.console.say(f"FAILED: {reason}")
    session.console.say(f"cell     {_short(work.cell.folder)}")


def _cut(todo: list[Work], reason: str) -> NoReturn:
    for work in todo:
        if work.cell.status() not in ("done", "failed"):
            work.cell.set_status("cut", reason)
    raise Interrupted(reason)


__all__ = ["Outcome", "duration", "run"]
