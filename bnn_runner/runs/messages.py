"""Prints what a run is about to do, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bnn_runner.base import Network
from bnn_runner.report.console import centre_line, score_table
from bnn_runner.report.read_cells import read_scores
from bnn_runner.rng import global_stream
from bnn_runner.runs.session import CellRun, Session
from bnn_runner.runtime.files import short_path
from bnn_runner.training.pretrained import score_pretrained
from bnn_runner.training.state import TrainingConfig


def describe_run(cell_run: CellRun, session: Session, config: TrainingConfig) -> None:
    """Prints data, model, method, training, device and prior of a run."""
    task, experiment, say = cell_run.task, cell_run.experiment, session.console.say
    sizes = f"{len(task.train):,} train, {len(task.val):,} validation, {len(task.test):,} test"
    say(f"data={cell_run.cell.data}: {task.spec.kind}, inputs {list(task.spec.input_shape)}, {sizes}")
    for note in task.notes:
        say(f"note: {note}")
    for name, reason in task.unavailable.items():
        say(f"out-of-distribution set {name}: not available ({reason})")
    count = len(cell_run.trainings)
    networks = "" if count == 1 else f" ({count} trained networks)"
    schedule = experiment.schedule
    trained = f"{schedule.epochs} epochs of {schedule.optimizer}"
    if experiment.pretrained:
        trained = f"weights from {', '.join(g.path.name for g in experiment.pretrained)}"
    say(
        f"model={cell_run.cell.model} method={cell_run.cell.method}{networks}: {trained}, "
        f"device {session.device.type}, {session.threads} threads"
    )
    say(f"prior={experiment.choices.get('prior')} {_decay(config, cell_run)}")
    if experiment.pretrained:
        say(f"  (weight decay d on these training points equals prior.precision = {len(task.train):,} d)")


def _decay(config: TrainingConfig, cell_run: CellRun) -> str:
    """Describes the precisions λ of the training prior and the weight decay λ/N of each."""
    config = replace(config, noise_transform=next((t.noise_transform for t in cell_run.trainings), None))
    with global_stream(0, "skeleton"):
        precisions = config.precisions(config.build(cell_run.task.spec)).values()
    low, high, points = min(precisions), max(precisions), max(len(cell_run.task.train), 1)
    if low == high:
        return f"precision {low:g}: weight decay {low / points:.3g}"
    return f"precisions {low:g} to {high:g} by tensor: weight decay {low / points:.3g} to {high / points:.3g}"


def report_pretrained(cell_run: CellRun, networks: Sequence[Network], session: Session) -> list[dict[str, Any]]:
    """Scores the pretrained networks on the task; prints scores and notes. Returns the entries for cell.json."""
    experiment, say, entries = cell_run.experiment, session.console.say, []
    for weights, network in zip(experiment.pretrained, networks, strict=False):
        scores = score_pretrained(network, cell_run.task)
        say(f"pretrained network {weights.path.name}: {network.num_parameters:,} parameters")
        for line in scores.lines():
            say(line)
        notes = [*weights.notes, *scores.warnings]
        if cell_run.task.spec.kind == "regression" and experiment.noise.noise == "learned":
            notes.append(
                "likelihood.noise=learned requires training: for a pretrained network the residual standard "
                "deviation on the training part is used"
            )
        if any(t.noise_transform is not None for t in cell_run.trainings):
            notes.append("this method expects a network trained with its own noise; the pretrained one was not")
        for note in dict.fromkeys(notes):
            say(f"note: {note}")
        cell_run.notes += [n for n in notes if n not in cell_run.notes]
        entries.append({"file": str(weights.path), "digest": weights.digest, "parts": scores.parts})
    return entries


def show_scores(cell_run: CellRun, session: Session, earlier: bool = False) -> None:
    """Prints the scores of a finished cell, its notes, and the paths of its files.

    Args:
        cell_run: The cell.
        session: Where messages go.
        earlier: Whether an earlier command ran it, so that the notes on its data and figures are not on the screen.
    """
    cell, say = cell_run.cell, session.console.say
    report = cell.facts().get("report", {})
    say()
    say(f"{cell.data} · {cell.model} · {cell.method} · seed {cell.seed}")
    if session.shortening.changes:
        say(f"SHORTENED by time_limit: {session.shortening.summary()}")
    if report.get("evidence_nats") is not None:
        say(evidence_line(report))
    in_cell = cell.facts().get("notes", []) if earlier else []
    for note in dict.fromkeys([*in_cell, *report.get("notes", [])]):
        say(f"note: {note}")
    if report.get("repairs"):
        say(f"numerical repairs: {report['repairs']}")
    scores = read_scores(cell.folder / "metrics.csv")
    if line := centre_line(scores):
        say(line)
    say(score_table(scores))
    for picture in sorted((cell.folder / "figures").glob("*.png")):
        say(f"picture  {short_path(picture)}")
    say(f"cell     {short_path(cell.folder)}")
    if cell_run.stages.seconds:
        for line in cell_run.stages.summary_lines():
            say(line)


def evidence_line(report: dict[str, Any]) -> str:
    """Describes the posterior of a finished run: which weights, the selected hyperparameters, the log evidence.

    Where validation data selected the precision, the evidence at it says little and stays in cell.json.
    """
    precision = report.get("prior_precision")
    unit = " x diag(H)/N" if report.get("hyper_family") == "g" else ""
    selected = f", prior precision {precision:.4g}{unit}" if precision is not None else ""
    if report.get("noise") == "evidence":
        selected += ", noise " + ", ".join(f"{sigma:.4g}" for sigma in report["noise_sigma"][:3])
    value, basis = report["evidence_nats"], report.get("evidence_over", "all weights")
    if report.get("selected_by") == "validation":
        status = report.get("hyper_status")
        return f"posterior over {basis} ({report.get('structure')}{selected}, selected on validation data: {status})"
    details = f"{report.get('structure')}{selected}, hyper {report.get('hyper_status')}"
    if report.get("evidence_below_constant"):
        details += f"; below a constant predictor's {report['constant_loglik_nats']:.2f}"
    return f"log evidence {value:.2f} nats over {basis} ({details})"
