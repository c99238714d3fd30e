"""Computes one cell from its trained networks: posterior, evaluation, scores, figures, provenance, and its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import OmegaConf

from bnn_runner._version import __version__
from bnn_runner.base import FitContext, Network, Posterior, TrainsFurther
from bnn_runner.config.keys import RESULTS_VERSION
from bnn_runner.errors import RunFailed
from bnn_runner.evaluation import io as evaluation_store
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.evaluation.temperature import Calibration, fit_temperature
from bnn_runner.hyper.training_rule import training_facts
from bnn_runner.loggers.finished import log_finished
from bnn_runner.metrics.causes import with_causes
from bnn_runner.posteriors import io as posterior_store
from bnn_runner.rng import derive_seed, generator
from bnn_runner.runs.against_centre import against_centre
from bnn_runner.runs.cell import headline, write_description
from bnn_runner.runs.citations import bibliography
from bnn_runner.runs.figures import draw_figures, redraw_figures
from bnn_runner.runs.messages import report_pretrained
from bnn_runner.runs.point_scores import write_points
from bnn_runner.runs.provenance import collect
from bnn_runner.runs.session import CellRun, Session
from bnn_runner.runtime.files import clear_unfinished, write_json, write_text
from bnn_runner.scoring import Evaluation, Score
from bnn_runner.tasks import Task
from bnn_runner.training.provider import NetworkProvider


def begin(cell_run: CellRun, session: Session) -> None:
    """Creates the folder of a cell and describes the cell there, before anything can fail.

    Does nothing if another process has finished the cell in the meantime.
    """
    cell = cell_run.cell
    if cell.status() == "done" and not cell_run.experiment.settings.force:
        return
    earlier = cell.facts()
    if earlier and (earlier.get("results_version"), earlier.get("fingerprint")) != (
        RESULTS_VERSION,
        cell_run.task.fingerprint,
    ):
        cell.fit_checkpoint.unlink(missing_ok=True)  # written with other data or by another version
    if cell_run.attempt == 0:
        cell_run.attempt = 1 if cell.status() == "done" else int(earlier.get("attempts", 0)) + 1
    cell.folder.mkdir(parents=True, exist_ok=True)
    cell.set_status("open", "")
    write_description(cell, _facts(cell_run, session))
    write_text(cell.folder / "command.txt", cell_run.command() + "\n")


def complete(cell_run: CellRun, provider: NetworkProvider, session: Session) -> None:
    """Fits the posterior, evaluates and scores it, and writes the files; DONE comes last.

    The caller must hold the lease of the cell.

    Args:
        cell_run: The cell.
        provider: Loads the trained networks.
        session: Device, console and stop request.

    Raises:
        RunFailed: If the cell could not be computed.
        Interrupted: If a stop was requested.
    """
    console = session.console
    clear_unfinished(cell_run.cell.folder)
    begin(cell_run, session)
    console.log = cell_run.cell.folder / "log.txt"
    try:
        networks = [n for t in cell_run.trainings if (n := provider.load(t)) is not None]
        if len(networks) != len(cell_run.trainings):
            raise RunFailed("A trained network disappeared from the cache during the run. Run the same command again.")
        pretrained = report_pretrained(cell_run, networks, session)
        history: list[Mapping[str, float]] = []
        posterior = _fit(cell_run, networks, session, history.append)
        evaluation, calibration = _evaluate(cell_run, posterior, session)
        session.stop.check("evaluation")
        scores = score(cell_run, evaluation)
        _write(cell_run, networks, posterior, evaluation, calibration, scores, pretrained, history, session)
        cell_run.cell.finish()
        if (problem := log_finished(cell_run.experiment.logger, cell_run.cell.folder, cell_run.cell.root)) is not None:
            console.say(f"note: {problem}")
    finally:
        console.log = None


def score(cell_run: CellRun, evaluation: Evaluation) -> list[Score]:
    """Returns the scores of all metrics of the experiment; they depend only on the evaluation and the seed."""
    scores = [s for metric in cell_run.experiment.metrics.values() for s in metric(evaluation, cell_run.cell.seed)]
    return with_causes(scores, evaluation)


def score_again(cell_run: CellRun, say: Callable[[str], None]) -> bool:
    """Computes the scores of a finished cell again if other metrics are selected. Returns whether it did."""
    facts = cell_run.cell.facts()
    if facts.get("metrics_digest") == cell_run.metrics_digest():
        return False
    evaluation = evaluation_store.load(cell_run.cell.folder)
    scores = score(cell_run, evaluation)
    cell_run.cell.write_scores(scores)
    write_points(cell_run.cell.folder, scores, evaluation, cell_run.cell.seed)
    if cell_run.experiment.settings.figures:
        redraw_figures(cell_run.cell.folder, cell_run.task, evaluation, scores, _noting(cell_run, say))
    write_description(
        cell_run.cell, facts | {"metrics_digest": cell_run.metrics_digest(), "headline": headline(scores)}
    )
    return True


def _fit(
    cell_run: CellRun, networks: list[Network], session: Session, record: Callable[[Mapping[str, float]], None]
) -> Posterior:
    context = FitContext(
        seed=cell_run.cell.seed,
        hyper=cell_run.experiment.hyper,
        schedule=cell_run.experiment.schedule,
        checkpoint=cell_run.cell.fit_checkpoint,
        progress=session.step,
        augment=cell_run.experiment.augment,
        noise_fixed=cell_run.experiment.noise.noise == "fixed",
        record=record,
    )
    with cell_run.stages.stage("posterior", session.device):
        posterior = cell_run.experiment.method.fit(cell_run.task, networks, context)
    for rule, names in by_rule(posterior.treatment).items():
        session.console.write_log(f"treatment: {rule}: {', '.join(names)}")
    return posterior


def by_rule(treatment: Mapping[str, str]) -> dict[str, list[str]]:
    """Inverts {parameter: rule} to {rule: parameters}."""
    rules: dict[str, list[str]] = {}
    for name, rule in treatment.items():
        rules.setdefault(rule, []).append(name)
    return rules


def _evaluate(cell_run: CellRun, posterior: Posterior, session: Session) -> tuple[Evaluation, Calibration | None]:
    settings = cell_run.experiment.settings.eval
    max_ood = settings.max_ood if settings.max_ood is not None else 2**31
    max_shift = settings.max_shift if settings.max_shift is not None else 2**31
    task = _with_fewer_val_points(cell_run.task, max_ood, cell_run.cell.seed)
    predictive = cell_run.experiment.method.predictive
    size: dict[str, int] = {
        "num_draws": settings.num_draws,
        "seed": derive_seed(cell_run.cell.seed, "posterior"),
        "batch_size": settings.batch_size,
    }
    calibration = None
    with cell_run.stages.stage("evaluation", session.device):
        if settings.calibrate == "temperature":
            session.step("calibration", 0, 1)
            calibration = fit_temperature(task, posterior, predictive, **size)
        temperature = None if calibration is None else calibration.temperature
        evaluation = evaluate(
            task,
            posterior,
            predictive,
            **size,
            max_ood=max_ood,
            max_shift=max_shift,
            progress=session.step,
            temperature=temperature,
        )
    return evaluation, calibration


def _with_fewer_val_points(task: Task, max_points: int, seed: int) -> Task:
    """Reduces the validation part to a seeded random subset for scoring; hyperparameter rules use all of it."""
    if len(task.val) <= max_points:
        return task
    selected = torch.randperm(len(task.val), generator=generator(seed, "eval", "val"))[:max_points]
    return replace(task, val=task.val.subset(selected.sort().values))


def _facts(cell_run: CellRun, session: Session) -> dict[str, Any]:
    """Content of cell.json from the start; a finished cell adds report, notes and headline."""
    cell, experiment = cell_run.cell, cell_run.experiment
    return {
        "data": cell.data,
        "model": cell.model,
        "method": cell.method,
        "seed": cell.seed,
        "hash": cell.hash,
        "choices": {g: c for g, c in experiment.choices.items() if g != "hyper" or experiment.uses_hyper},
        "results_version": RESULTS_VERSION,
        "version": __version__,
        "kind": cell_run.task.spec.kind,
        "fingerprint": cell_run.task.fingerprint,
        "content": cell_run.task.content,
        "metrics_digest": cell_run.metrics_digest(),
        "attempts": cell_run.attempt,
        "shortened": session.shortening.facts(),
        "epochs": _epochs(cell_run),
        "config": cell_run.effective_config(),
        "places": cell_run.places(),
    }


def _epochs(cell_run: CellRun) -> dict[str, int | None]:
    """Networks of the cell, the epochs that trained each (None: elsewhere), and those of the method's own fit."""
    experiment, trainings = cell_run.experiment, cell_run.trainings
    method, schedule = experiment.method, experiment.schedule
    trained = schedule.epochs if any(t.trained for t in trainings) else 0
    return {
        "networks": len(trainings),
        "training": None if experiment.pretrained else trained,
        "own": method.own_epochs(schedule) if isinstance(method, TrainsFurther) else 0,
    }


def _write(
    cell_run: CellRun,
    networks: list[Network],
    posterior: Posterior,
    evaluation: Evaluation,
    calibration: Calibration | None,
    scores: Sequence[Score],
    pretrained: Sequence[dict[str, Any]],
    history: Sequence[Mapping[str, float]],
    session: Session,
) -> None:
    experiment, cell = cell_run.experiment, cell_run.cell
    with cell_run.stages.stage("writing", session.device):
        evaluation_store.save(evaluation, cell.folder)
        cell.write_scores(scores)
        write_points(cell.folder, scores, evaluation, cell.seed)
        cell.write_history([n.history for n in networks], history)
        cell.write_tuning([n.tuning for n in networks])
        write_text(cell.folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(experiment.config)))
        write_text(cell.folder / "citations.bib", bibliography(_components(cell_run), posterior.report.cites))
        saved = _save_posterior(cell_run, posterior, session) if experiment.settings.save_posterior else {}
        if experiment.settings.figures:
            arguments = cell.folder, cell_run.task, posterior, experiment, evaluation, scores, networks
            draw_figures(*arguments, failed=_noting(cell_run, session.console.say))
    notes = [
        *cell_run.task.notes,
        *experiment.run.notes,
        *cell_run.notes,
        *evaluation.notes,
        *session.shortening.notes(),
    ]
    report = posterior.report
    if (rule := experiment.training_rule) is not None:
        report = report.extended(*training_facts(rule, networks))
    report = report.extended(*against_centre(evaluation, experiment))
    if calibration is not None:
        report = report.extended({"temperature": calibration.temperature}, [calibration.note()])
    results: dict[str, Any] = {"report": report.row(), "notes": notes, "headline": headline(scores), **saved}
    if pretrained:
        results["pretrained"] = list(pretrained)
    write_description(cell, _facts(cell_run, session) | results)
    provenance = collect(session.device, experiment.settings, session.threads, cell_run.stages)
    provenance |= {
        "training_keys": [t.key for t in cell_run.trainings],
        "training_seconds_when_trained": sum(n.seconds for n in networks),
        "parameters": networks[0].num_parameters if networks else 0,
        "training_points": len(cell_run.task.train),
        "weight_decay_of_the_prior": _weight_decays(networks, len(cell_run.task.train)),
        "treatment": dict(posterior.treatment),
        "repairs": dict(posterior.report.repairs),
    }
    write_json(cell.folder / "provenance.json", provenance)


def _noting(cell_run: CellRun, say: Callable[[str], None]) -> Callable[[str], None]:
    """A function that prints a note, and keeps it among those of the cell."""

    def note(text: str) -> None:
        say(f"note: {text}")
        cell_run.notes.append(text)

    return note


def _save_posterior(cell_run: CellRun, posterior: Posterior, session: Session) -> dict[str, bool]:
    """Saves the posterior in the cell, or notes why it does not support that. Returns the entry for cell.json."""
    try:
        posterior_store.save(posterior, cell_run.cell.folder, cell_run.fingerprints(), cell_run.task)
        return {"posterior_saved": True}
    except posterior_store.CannotBeSaved as error:
        note = f"save_posterior: the posterior of method={cell_run.cell.method} was not saved ({error})"
        cell_run.notes.append(note)
        session.console.say(f"note: {note}")
        return {"posterior_saved": False}


def _components(cell_run: CellRun) -> list[object]:
    """The components that the cell uses, for its citations."""
    experiment = cell_run.experiment
    used = [
        experiment.data,
        experiment.model,
        experiment.method,
        experiment.schedule,
        experiment.augment,
        experiment.prior,
    ]
    if cell_run.task.spec.kind == "regression":
        used.append(experiment.noise)
    return [*used, *([experiment.hyper] if experiment.uses_hyper else []), *experiment.metrics.values()]


def _weight_decays(networks: Sequence[Network], num_points: int) -> dict[str, float]:
    """The weight decay λ/N in the objective for each distinct training precision λ."""
    precisions = {p for n in networks for p in n.prior_precision.values()}
    return {f"precision {p:g}": p / num_points for p in sorted(precisions)}
