"""One cell, from its trained networks to its files: posterior, evaluation, scores, figures, provenance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from omegaconf import OmegaConf

from bnn_runner._version import __version__
from bnn_runner.base import FitContext, Network, Posterior
from bnn_runner.config.keys import RECIPE
from bnn_runner.errors import RunFailed
from bnn_runner.evaluation import io as evaluation_store
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.evaluation.temperature import Calibration, fit_temperature
from bnn_runner.hyper.training_rule import told
from bnn_runner.loggers.finished import tell
from bnn_runner.posteriors import io as posterior_store
from bnn_runner.rng import derive_seed, generator
from bnn_runner.runs.cell import headline, write_description
from bnn_runner.runs.citations import bibliography
from bnn_runner.runs.figures import draw_figures, redraw_figures
from bnn_runner.runs.messages import tell_given
from bnn_runner.runs.provenance import collect
from bnn_runner.runs.session import Session, Work
from bnn_runner.runtime.files import clear_unfinished, write_json, write_text
from bnn_runner.scoring import Evaluation, Score
from bnn_runner.tasks import Task
from bnn_runner.training.provider import Workplan


def begin(work: Work, session: Session) -> None:
    """Make the folder and say what the cell is, before anything can fail; a cell that is done by now is left alone."""
    cell = work.cell
    if cell.status() == "done" and not work.experiment.settings.force:
        return
    known = cell.facts()
    if known and (known.get("recipe"), known.get("fingerprint")) != (RECIPE, work.task.fingerprint):
        cell.fit_checkpoint.unlink(missing_ok=True)  # of other data, or of other code
    if work.attempt == 0:
        work.attempt = 1 if cell.status() == "done" else int(known.get("attempts", 0)) + 1
    cell.folder.mkdir(parents=True, exist_ok=True)
    cell.set_status("open", "")
    write_description(cell, _facts(work, session))
    write_text(cell.folder / "command.txt", work.command(session.budget) + "\n")


def complete(work: Work, plan: Workplan, session: Session) -> None:
    """Fit, evaluate, score and write; DONE last. For who alone may write the cell."""
    console = session.console
    clear_unfinished(work.cell.folder)
    begin(work, session)
    console.log = work.cell.folder / "log.txt"
    try:
        networks = [n for t in work.trainings if (n := plan.load(t)) is not None]
        if len(networks) != len(work.trainings):
            raise RunFailed(
                "a trained network vanished from the cache while the run went on. Run the same command again."
            )
        given = tell_given(work, networks, session)
        history: list[Mapping[str, float]] = []
        posterior = _fit(work, networks, session, history.append)
        evaluation, calibration = _evaluate(work, posterior, session)
        session.stop.check("evaluation")
        scores = score(work, evaluation)
        _write(work, networks, posterior, evaluation, calibration, scores, given, history, session)
        work.cell.finish()
        if (trouble := tell(work.experiment.logger, work.cell.folder, work.cell.root)) is not None:
            console.say(f"note: {trouble}")
    finally:
        console.log = None


def score(work: Work, evaluation: Evaluation) -> list[Score]:
    """Every metric of the experiment, from the evaluation alone."""
    return [s for metric in work.experiment.metrics.values() for s in metric(evaluation, work.cell.seed)]


def score_again(work: Work) -> bool:
    """Make the scores of a finished cell anew if other metrics are asked for; whether that was so."""
    facts = work.cell.facts()
    if facts.get("metrics_digest") == work.metrics_digest():
        return False
    evaluation = evaluation_store.load(work.cell.folder)
    scores = score(work, evaluation)
    work.cell.write_scores(scores)
    if work.experiment.settings.figures:
        redraw_figures(work.cell.folder, work.task, evaluation, scores)
    write_description(work.cell, facts | {"metrics_digest": work.metrics_digest(), "headline": headline(scores)})
    return True


def _fit(
    work: Work, networks: list[Network], session: Session, record: Callable[[Mapping[str, float]], None]
) -> Posterior:
    context = FitContext(
        seed=work.cell.seed,
        hyper=work.experiment.hyper,
        schedule=work.experiment.schedule,
        checkpoint=work.cell.fit_checkpoint,
        progress=session.step,
        augment=work.experiment.augment,
        noise_fixed=work.experiment.noise.noise == "fixed",
        record=record,
    )
    with work.stages.stage("posterior", session.device):
        posterior = work.experiment.method.fit(work.task, networks, context)
    for rule, names in by_rule(posterior.treatment).items():
        session.console.write_log(f"treatment: {rule}: {', '.join(names)}")
    return posterior


def by_rule(treatment: Mapping[str, str]) -> dict[str, list[str]]:
    """{parameter: rule} turned round to {rule: parameters}."""
    rules: dict[str, list[str]] = {}
    for name, rule in treatment.items():
        rules.setdefault(rule, []).append(name)
    return rules


def _evaluate(work: Work, posterior: Posterior, session: Session) -> tuple[Evaluation, Calibration | None]:
    settings = work.experiment.settings.eval
    most = settings.max_ood if settings.max_ood is not None else 2**31
    shifted = settings.max_shift if settings.max_shift is not None else 2**31
    task, predictive = _with_short_val(work.task, most, work.cell.seed), work.experiment.method.predictive
    size: dict[str, int] = {
        "num_draws": settings.num_draws,
        "seed": derive_seed(work.cell.seed, "posterior"),
        "batch_size": settings.batch_size,
    }
    calibration = None
    with work.stages.stage("evaluation", session.device):
        if settings.calibrate == "temperature":
            session.step("calibration", 0, 1)
            calibration = fit_temperature(task, posterior, predictive, **size)
        temperature = None if calibration is None else calibration.temperature
        evaluation = evaluate(
            task,
            posterior,
            predictive,
            **size,
            max_ood=most,
            max_shift=shifted,
            progress=session.step,
            temperature=temperature,
        )
    return evaluation, calibration


def _with_short_val(task: Task, most: int, seed: int) -> Task:
    """The validation part cut to a seeded subset for scoring; hyperparameter rules have used all of it."""
    if len(task.val) <= most:
        return task
    chosen = torch.randperm(len(task.val), generator=generator(seed, "eval", "val"))[:most]
    return replace(task, val=task.val.subset(chosen.sort().values))


def _facts(work: Work, session: Session) -> dict[str, Any]:
    """What cell.json says from the start; the finished cell adds report, notes and headline."""
    cell, experiment = work.cell, work.experiment
    return {
        "data": cell.data,
        "model": cell.model,
        "method": cell.method,
        "seed": cell.seed,
        "hash": cell.hash,
        "choices": {g: c for g, c in experiment.choices.items() if g != "hyper" or experiment.uses_hyper},
        "recipe": RECIPE,
        "version": __version__,
        "kind": work.task.spec.kind,
        "fingerprint": work.task.fingerprint,
        "metrics_digest": work.metrics_digest(),
        "attempts": work.attempt,
        "shortened": session.budget.describe(),
        "config": work.effective_config(),
        "places": work.places(),
    }


def _write(
    work: Work,
    networks: list[Network],
    posterior: Posterior,
    evaluation: Evaluation,
    calibration: Calibration | None,
    scores: Sequence[Score],
    given: Sequence[dict[str, Any]],
    history: Sequence[Mapping[str, float]],
    session: Session,
) -> None:
    experiment, cell = work.experiment, work.cell
    with work.stages.stage("writing", session.device):
        evaluation_store.save(evaluation, cell.folder)
        cell.write_scores(scores)
        cell.write_history([n.history for n in networks], history)
        cell.write_tuning([n.tuning for n in networks])
        write_text(cell.folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(experiment.config)))
        write_text(
            cell.folder / "citations.bib", bibliography(_components(work), str(posterior.report.get("structure")))
        )
        saved = _save_posterior(work, posterior, session) if experiment.settings.save_posterior else {}
        if experiment.settings.figures:
            draw_figures(cell.folder, work.task, posterior, experiment, evaluation, scores, networks)
    notes = [*work.task.notes, *experiment.notes, *work.notes, *evaluation.notes, *session.budget.notes()]
    report = dict(posterior.report)
    if (rule := experiment.training_rule) is not None:
        facts, told_of_training = told(rule, networks)
        report = report | facts | {"notes": [*report.get("notes", []), *told_of_training]}
    if calibration is not None:
        report["temperature"] = calibration.temperature
        report["notes"] = [*report.get("notes", []), calibration.told()]
    found: dict[str, Any] = {"report": report, "notes": notes, "headline": headline(scores), **saved}
    if given:
        found["given"] = list(given)
    write_description(cell, _facts(work, session) | found)
    provenance = collect(session.device, experiment.settings, session.threads, work.stages)
    provenance |= {
        "training_keys": [t.key for t in work.trainings],
        "training_seconds_when_trained": sum(n.seconds for n in networks),
        "parameters": networks[0].num_parameters if networks else 0,
        "training_points": len(work.task.train),
        "weight_decay_of_the_prior": _weight_decays(networks, len(work.task.train)),
        "treatment": dict(posterior.treatment),
        "repairs": dict(posterior.report.get("repairs", {})),
    }
    write_json(cell.folder / "provenance.json", provenance)


def _save_posterior(work: Work, posterior: Posterior, session: Session) -> dict[str, bool]:
    """Keep the posterior in the cell; one that cannot be kept says so in the row. For cell.json: whether it was."""
    try:
        posterior_store.save(posterior, work.cell.folder, work.fingerprints())
        return {"posterior_saved": True}
    except posterior_store.CannotBeSaved as error:
        note = f"save_posterior: the posterior of method={work.cell.method} cannot be saved ({error})"
        work.notes.append(note)
        session.console.say(f"note: {note}")
        return {"posterior_saved": False}


def _components(work: Work) -> list[object]:
    """The components that had a part in the cell, for its citations."""
    experiment = work.experiment
    used = [
        experiment.data,
        experiment.model,
        experiment.method,
        experiment.schedule,
        experiment.augment,
        experiment.prior,
    ]
    return [*used, *([experiment.hyper] if experiment.uses_hyper else []), *experiment.metrics.values()]


def _weight_decays(networks: Sequence[Network], num_points: int) -> dict[str, float]:
    """The decay λ/N that each distinct training precision amounts to in the objective."""
    precisions = {p for n in networks for p in n.prior_precision.values()}
    return {f"precision {p:g}": p / num_points for p in sorted(precisions)}
