"""What a run prints before and after its work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bnn_runner.base import Network
from bnn_runner.report.console import score_table
from bnn_runner.report.read_cells import read_scores
from bnn_runner.rng import global_stream
from bnn_runner.runs.session import Session, Work
from bnn_runner.training.pretrained import try_on
from bnn_runner.training.state import Recipe


def describe(work: Work, session: Session, recipe: Recipe) -> None:
    """The task, the network, the method, the prior and the device, before anything runs."""
    task, experiment, say = work.task, work.experiment, session.console.say
    sizes = f"{len(task.train):,} train, {len(task.val):,} validation, {len(task.test):,} test"
    say(f"data={work.cell.data}: {task.spec.kind}, inputs {list(task.spec.input_shape)}, {sizes}")
    for note in task.notes:
        say(f"note: {note}")
    for name, reason in task.unavailable.items():
        say(f"out-of-distribution set {name}: not available ({reason})")
    count = len(work.trainings)
    networks = "" if count == 1 else f" ({count} trained networks)"
    schedule = experiment.schedule
    trained = f"{schedule.epochs} epochs of {schedule.optimizer}"
    if experiment.given:
        trained = f"weights from {', '.join(g.path.name for g in experiment.given)}"
    say(
        f"model={work.cell.model} method={work.cell.method}{networks}: {trained}, "
        f"device {session.device.type}, {session.threads} threads"
    )
    say(f"prior={experiment.choices.get('prior')} {_decay(recipe, work)}")
    if experiment.given:
        say(f"  (weight decay d of a training on these points is prior.precision = {len(task.train):,} d)")


def _decay(recipe: Recipe, work: Work) -> str:
    """The training prior's precisions λ and the weight decay λ/N that each amounts to."""
    recipe = replace(recipe, rework=next((t.rework for t in work.trainings), None))
    with global_stream(0, "skeleton"):
        precisions = recipe.precisions(recipe.build(work.task.spec)).values()
    low, high, points = min(precisions), max(precisions), max(len(work.task.train), 1)
    if low == high:
        return f"precision {low:g}: weight decay {low / points:.3g}"
    return f"precisions {low:g} to {high:g} by tensor: weight decay {low / points:.3g} to {high / points:.3g}"


def tell_given(work: Work, networks: Sequence[Network], session: Session) -> list[dict[str, Any]]:
    """Try each network trained elsewhere on this task, before anything is built on it; what cell.json says of it."""
    experiment, say, found = work.experiment, session.console.say, []
    for given, network in zip(experiment.given, networks, strict=False):
        trial = try_on(network, work.task)
        say(f"given network {given.path.name}: {network.num_parameters:,} parameters")
        for line in trial.lines():
            say(line)
        notes = [*given.notes, *trial.warnings]
        if work.task.spec.kind == "regression" and experiment.noise.noise == "learned":
            notes.append(
                "likelihood.noise=learned needs training: the noise of a given network is its residual standard "
                "deviation on the training part"
            )
        if any(t.rework is not None for t in work.trainings):
            notes.append(
                "this method is meant for networks trained with its own noise; the given one is taken as it is"
            )
        for note in dict.fromkeys(notes):
            say(f"note: {note}")
        work.notes += [n for n in notes if n not in work.notes]
        found.append({"file": str(given.path), "digest": given.digest, "parts": trial.parts})
    return found


def show_scores(work: Work, session: Session) -> None:
    """The finished cell's facts and table, and where everything lies."""
    cell, say = work.cell, session.console.say
    report = cell.facts().get("report", {})
    say()
    say(f"{cell.data} · {cell.model} · {cell.method} · seed {cell.seed}")
    if session.budget.changes:
        say(f"SHORTENED by time_limit: {session.budget.summary()}")
    if report.get("evidence_nats") is not None:
        say(evidence_line(report))
    for note in report.get("notes", []):
        say(f"note: {note}")
    if report.get("repairs"):
        say(f"numerical repairs: {report['repairs']}")
    say(score_table(read_scores(cell.folder / "metrics.csv")))
    for picture in sorted((cell.folder / "figures").glob("*.png")):
        say(f"picture  {short(picture)}")
    say(f"cell     {short(cell.folder)}")
    if work.stages.seconds:
        for line in work.stages.told():
            say(line)


def evidence_line(report: dict[str, Any]) -> str:
    """The log evidence of a finished run, over which weights it is, and what was chosen by which rule."""
    precision = report.get("prior_precision")
    unit = " x diag(H)/N" if report.get("hyper_family") == "g" else ""
    chosen = f", prior precision {precision:.4g}{unit}" if precision is not None else ""
    if report.get("noise") == "evidence":
        chosen += ", noise " + ", ".join(f"{sigma:.4g}" for sigma in report["noise_sigma"][:3])
    value, basis = report["evidence_nats"], report.get("evidence_over", "all weights")
    rule = f"{report.get('structure')}{chosen}, hyper {report.get('hyper_status')}"
    return f"log evidence {value:.2f} nats over {basis} ({rule})"


def short(path: Path) -> str:
    """Relative to the folder the user is in, where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
