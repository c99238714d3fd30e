"""Cost of the tangent model's optimum v*, relative to training the network.

Writes outputs/results/tangent_speed.{csv,md}.

    python scripts/benchmark_tangent.py               LeNet on 2,000 and 10,000 MNIST images (10 minutes)
    python scripts/benchmark_tangent.py cifar         cnn_batchnorm on 50,000 CIFAR-10 images (an hour)
    python scripts/benchmark_tangent.py mnist --points 1000

The network is trained with the schedule recommended for its data set, and v* is then searched at one prior precision,
in the same process and on one thread; both are measured in CPU time, which other programs disturb least. `range` is
how much the evidence (KFAC, at v*) varies between 0.1 and 10 times that precision. A search is long enough once L_h is
within 1 % of the range of its minimum: `ratio` is its time to there, in units of training, and `certified` the time
until its own bound on the gap says so. The gap is measured against the largest lower bound of L_h that is known at the
end. Evaluations that only measure are not part of the time.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from bnn_runner.base import Model
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature
from bnn_runner.curvature.structures import fit_structure
from bnn_runner.curvature.training_passes import TrainingPasses
from bnn_runner.data.image_datasets import PublishedImages
from bnn_runner.laplace.tangent_optimum import TangentModel
from bnn_runner.models.cnn import CNN
from bnn_runner.models.lenet import LeNet
from bnn_runner.models.likelihoods import NoiseRule
from bnn_runner.models.priors import Isotropic
from bnn_runner.runtime.console import Console
from bnn_runner.runtime.files import write_text
from bnn_runner.runtime.signals import stop_on_signals
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
SHARE = 0.01
"""Of the range of the evidence."""
STAGES = (1000.0, 300.0, 100.0, 30.0, 10.0, 3.0, 1.0, 0.3, 0.1)
"""Certified gaps in nats at which the search is looked at."""
MOST_PASSES = 200


@dataclass(frozen=True)
class Case:
    """A network, its data and the schedule recommended for them."""

    data: str
    model_name: str
    model: Model
    schedule: Schedule
    points: tuple[int, ...]


CASES = {
    "mnist": Case("mnist", "lenet", LeNet(), Schedule("adam", 15, 128, 0.002, warmup_epochs=1), (2000, 10000)),
    "cifar": Case(
        "cifar10", "cnn_batchnorm", CNN(norm="batch"), Schedule("adam", 10, 128, 0.002, warmup_epochs=1), (50000,)
    ),
}


@dataclass(frozen=True)
class Result:
    data: str
    model: str
    points: int
    weights: int
    precision: float
    train_seconds: float
    range_nats: float
    passes: float
    seconds: float
    ratio: float
    certified_passes: float
    certified_ratio: float
    last_bound_nats: float
    load: float


@dataclass(frozen=True)
class _Look:
    """The search at one time: CPU seconds, passes, L_h and its certified gap."""

    seconds: float
    passes: float
    value: float
    gap: float


def measure(case: Case, points: int, precision: float, data_dir: Path, epochs: int | None) -> Result:
    schedule = case.schedule if epochs is None else Schedule("adam", epochs, 128, case.schedule.lr)
    task = PublishedImages(name=case.data, val_fraction=0.0, train_size=points, test_size=100, shifts=()).load(
        data_dir, 0
    )
    task = task.to(torch.device("cpu"), torch.float32)
    config = TrainingConfig(case.model, schedule, Isotropic(precision), NoiseRule(), "float32")
    with tempfile.TemporaryDirectory() as folder, stop_on_signals() as stop:
        group = LaneTrainer(config, [Lane(task, 0)], torch.device("cpu"))
        begin = time.process_time()
        group.train(Path(folder) / "checkpoint", Console(io.StringIO()).progress(), stop)
        trained = time.process_time() - begin
    network = group.network(0)
    jacobians = Jacobians(network)
    model = TangentModel(task, jacobians)
    diagonal = torch.full_like(model.centre, precision)
    v, taken, looks = model.centre, 0.0, list[_Look]()
    with torch.no_grad():
        for enough in STAGES:
            begin = time.process_time()
            found = model.optimum(diagonal, v, 0.0, MOST_PASSES, enough=enough)
            taken += time.process_time() - begin
            v, value = found.weights, -found.loglik + 0.5 * precision * float(found.weights.square().sum())
            looks.append(_Look(taken, model.passes, value, found.gap))
            print(f"{case.model_name} {points}: {looks[-1]}, training {trained:.1f} s", flush=True)
            if model.passes > MOST_PASSES:
                break
        lowest = max(look.value - look.gap for look in looks)
        curvature = fit_structure("kfac", TrainingPasses(task, jacobians, OutputCurvature()))
        evidences = []
        for factor in (0.1, 1.0, 10.0):
            each = model.optimum(factor * diagonal, v, 0.0, MOST_PASSES, enough=1.0)
            lam = torch.full((1,), factor * precision, dtype=torch.float64)
            square = float(each.weights.square().sum())
            evidences.append(each.loglik - 0.5 * (factor * precision * square + float(curvature.log_det_ratio(lam))))
    wide = max(evidences) - min(evidences)
    near = next((look for look in looks if look.value - lowest <= SHARE * wide), looks[-1])
    known = next((look for look in looks if look.gap <= SHARE * wide), looks[-1])
    return Result(
        case.data, case.model_name, points, len(model.centre), precision, trained, wide,
        near.passes, near.seconds, near.seconds / trained, known.passes, known.seconds / trained,
        looks[-1].gap, os.getloadavg()[0],
    )  # fmt: skip


def table(results: list[Result]) -> str:
    lines = [
        "| data | model | images | weights | precision | training, s | range, nats | passes | ratio "
        "| certified, passes | certified, ratio | load |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        cells = [r.data, r.model, f"{r.points:,}", f"{r.weights:,}", f"{r.precision:g}", f"{r.train_seconds:.1f}"]
        cells += [f"{r.range_nats:.0f}", f"{r.passes:.1f}", f"{r.ratio:.1f}", f"{r.certified_passes:.1f}"]
        cells += [f"{r.certified_ratio:.1f}", f"{r.load:.0f}"]
        lines.append("| " + " | ".join(cells) + " |")
    note = (
        f"CPU time on one thread, torch {torch.__version__}, once each. ratio: time until L_h is within {SHARE:.0%} of "
        "the evidence's range of its minimum, in units of training; certified: until the search's own bound says so. "
        "The search is looked at whenever its bound has fallen by a factor of about three. load: of the machine."
    )
    return "\n".join([*lines, "", note])


def kept(path: Path) -> list[Result]:
    """The results of an earlier call."""
    if not path.exists():
        return []
    types = {"str": str, "int": int, "float": float}
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [Result(**{f.name: types[str(f.type)](line[f.name]) for f in fields(Result)}) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", default="mnist", choices=CASES)
    parser.add_argument("--points", type=int, help="training images; the default is every size of the case")
    parser.add_argument("--precision", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, help="of training; the default is the recommended number")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("BNN_DATA_DIR", "data")))
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the table")
    words = parser.parse_args()
    torch.set_num_threads(1)
    case = CASES[words.case]
    results = kept(words.results / "tangent_speed.csv")
    for points in case.points if words.points is None else (words.points,):
        made = measure(case, points, words.precision, words.data_dir, words.epochs)
        results = [r for r in results if (r.data, r.points) != (made.data, made.points)] + [made]
        results.sort(key=lambda r: (r.data, r.points))
        text = table(results)
        words.results.mkdir(parents=True, exist_ok=True)
        write_text(words.results / "tangent_speed.md", text + "\n")
        with (words.results / "tangent_speed.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [f.name for f in fields(Result)])
            writer.writeheader()
            writer.writerows(asdict(r) for r in results)
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
