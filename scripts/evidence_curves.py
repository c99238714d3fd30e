"""Train and test curves with precisions selected by the evidence during training, compared with plain training.

    python scripts/evidence_curves.py [--only mnist] [--epochs 40] [--jobs 2] [--out outputs/results]

A perceptron on 2,000 images of MNIST and a small convolutional network on 2,000 images of CIFAR-10 are trained twice
from the same initial weights and with the same order of batches: once with a fixed prior precision of 1, and once with
one precision per parameter tensor, which takes gradient steps on the evidence every three epochs (Immer et al. 2021,
algorithm 1). After each epoch the current network is scored on its training points and on 1,000 test points.

Writes evidence_curves.png, .csv and .md. About six minutes of one core.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from bnn_runner.base import Network
from bnn_runner.experiment import load_experiment
from bnn_runner.report import style
from bnn_runner.report.looks import look
from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text
from bnn_runner.tasks import Split
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.state import Lane, TrainingConfig

TASKS: dict[str, tuple[str, ...]] = {
    "mnist": ("data=mnist", "model=mlp", "model.hidden=[100,100]", "schedule.batch_size=128"),
    "cifar10": ("data=cifar10", "model=cnn", "model.channels=[16,32,32]", "schedule.batch_size=64"),
}
TONES = {"plain": look("map").colour, "online": look("laplace").colour}
COMMON = ("method=map", "schedule=adam", "schedule.lr=0.002", "data.train_size=2000", "data.test_size=1000")
ARMS: dict[str, tuple[str, ...]] = {
    "plain": ("hyper=fixed",),
    "online": ("hyper=online", "hyper.frequency=3", "hyper.steps=20", "hyper.keep=last"),
}


@dataclass(frozen=True)
class Point:
    """Mean log-likelihoods (nats) and error after an epoch; log evidence (nats) if the precisions were updated."""

    data: str
    arm: str
    epoch: int
    train_loglik: float
    test_loglik: float
    test_error: float
    log_evidence: float | None


@torch.no_grad()
def score(network: Network, split: Split) -> tuple[float, float]:
    """Mean log-likelihood and error."""
    loglik = wrong = 0.0
    for x, y in split.batches(500):
        assert y is not None
        outputs = network(x)
        loglik += float(network.likelihood.log_prob(outputs, y).sum())
        wrong += float((outputs.argmax(-1) != y).sum())
    return loglik / len(split), wrong / len(split)


def trained(data: str, arm: str, epochs: int) -> list[Point]:
    """The curve of one training run, on one thread."""
    torch.set_num_threads(1)
    experiment = load_experiment([*TASKS[data], *COMMON, *ARMS[arm], f"schedule.epochs={epochs}"])
    task = experiment.data.load(experiment.settings.data_path, 0)
    config = TrainingConfig(
        experiment.model, experiment.schedule, experiment.prior, experiment.noise, rule=experiment.training_rule
    )
    group = LaneTrainer(config, [Lane(task, 0)], torch.device("cpu"))
    steps = len(group.bounds)
    curve: list[Point] = []

    def look(stage: str, done: int, total: int) -> None:
        if done % steps == 0:
            network = group.network(0)
            group.module.eval()
            on_train, (on_test, error) = score(network, task.train)[0], score(network, task.test)
            group.module.train()
            evidence = network.history[-1].get("evidence_nats")
            curve.append(Point(data, arm, done // steps, on_train, on_test, error, evidence))

    group.train(None, look)
    return curve


def draw(curves: dict[str, dict[str, list[Point]]], path: Path) -> None:
    """A row of panels per data set: log-likelihoods, error, log evidence."""
    figure, axes = style.new_figure(len(curves), 3, width=3.3, height=2.9)
    for line, (data, arms) in enumerate(curves.items()):
        loglik, error, evidence = axes[3 * line : 3 * line + 3]
        for i, (arm, points) in enumerate(arms.items()):
            epochs, tone = [p.epoch for p in points], TONES[arm]
            loglik.plot(epochs, [p.train_loglik for p in points], color=tone, lw=1.0, ls="--", label=f"{arm}, train")
            loglik.plot(epochs, [p.test_loglik for p in points], color=tone, lw=1.5, label=f"{arm}, test")
            error.plot(epochs, [100 * p.test_error for p in points], color=tone, lw=1.5, label=arm)
            updates = [(p.epoch, p.log_evidence) for p in points if p.log_evidence is not None]
            if updates:
                evidence.plot(*zip(*updates, strict=True), color=tone, marker=style.marker(i), ms=4, lw=1.0)
        worst = min(p.test_loglik for points in arms.values() for p in points[len(points) // 10 :])
        loglik.set_ylim(bottom=1.1 * worst)
        for ax, title, unit in (
            (loglik, "log-likelihood per point", "nats"),
            (error, "test error", "%"),
            (evidence, "log evidence (online)", "nats"),
        ):
            style.panel_title(ax, f"{data}: {title}")
            ax.set_xlabel("epoch")
            ax.set_ylabel(unit)
    style.legend_below(figure, *axes[0].get_legend_handles_labels())
    style.title(figure, "Training with precisions selected by the evidence, and with a fixed precision")
    style.save(figure, path)


def table(curves: dict[str, dict[str, list[Point]]]) -> str:
    """Markdown: the last epoch of each training run, and its best test log-likelihood."""
    lines = [
        "| data | training | epochs | train log-likelihood | test log-likelihood | best | at epoch "
        "| test error, % | log evidence |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for data, arms in curves.items():
        for arm, points in arms.items():
            last, best = points[-1], max(points, key=lambda p: p.test_loglik)
            evidence = "" if last.log_evidence is None else f"{last.log_evidence:.0f}"
            lines.append(
                f"| {data} | {arm} | {last.epoch} | {last.train_loglik:.3f} | {last.test_loglik:.3f} "
                f"| {best.test_loglik:.3f} | {best.epoch} | {100 * last.test_error:.1f} | {evidence} |"
            )
    return "\n".join(lines) + "\n\nNats per point; one seed; 2,000 training points, 1,000 test points.\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TASKS, help="one of the two data sets")
    parser.add_argument("--epochs", type=int, default=45)
    parser.add_argument("--jobs", type=int, default=1, help="training runs at a time, each on one thread")
    parser.add_argument("--out", type=Path, default=Path("outputs/results"))
    arguments = parser.parse_args(argv)
    names = [arguments.only] if arguments.only else list(TASKS)
    each = [(data, arm, arguments.epochs) for data in names for arm in ARMS]
    # Separate processes even for one job, so that the numbers do not depend on --jobs.
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        found = dict(
            zip(((data, arm) for data, arm, _ in each), pool.map(trained, *zip(*each, strict=True)), strict=True)
        )
    curves = {data: {arm: found[data, arm] for arm in ARMS} for data in names}
    arguments.out.mkdir(parents=True, exist_ok=True)
    draw(curves, arguments.out / "evidence_curves.png")
    rows = [asdict(p) for arms in curves.values() for points in arms.values() for p in points]
    write_text(arguments.out / "evidence_curves.csv", table_text(rows, [f.name for f in fields(Point)]))
    text = table(curves)
    print(text)
    write_text(arguments.out / "evidence_curves.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
