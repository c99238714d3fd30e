"""Evidence during training (hyper=online): its cost relative to plain MAP, and the evidence that it reaches.

A LeNet on a subset of MNIST with one precision per parameter tensor. Precisions are updated every `frequency` epochs
after the burn-in, with the exact GGN or a one-sample Fisher, on all training points or a quarter of them, by 10 or 20
steps in log λ per epoch. Writes outputs/results/online_evidence.{csv,md}.

    python scripts/benchmark_online.py                 all settings, three seeds (about 25 minutes of one core)
    python scripts/benchmark_online.py --quick         fewer points and epochs, one seed, nothing is written

Times are CPU times on one thread. All settings run in turn in one process, between the two MAP trainings that they are
compared with. The evidence is measured in the same way for every row: exact GGN with Kronecker factors on all points,
at the final weights and precisions. The rows `map` have the data set's recommended precision, and precisions selected
after training by MacKay's fixed point. The reference is the most expensive setting, the first. A setting is as good if
it reaches 95 % of the reference's gain in evidence over precisions selected after training, with a test log-likelihood
at most .01 nats lower. The aim, at most twice the cost of MAP for a setting that is as good, is judged against the
reference. Errors are standard errors over seeds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bnn_runner.base import Network
from bnn_runner.curvature.output_curvature import OutputCurvatureKind
from bnn_runner.experiment import load_experiment
from bnn_runner.hyper.fixed_point import FixedPoint
from bnn_runner.marglik.network_evidence import NetworkEvidence
from bnn_runner.marglik.online import Online
from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text
from bnn_runner.tasks import Task
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.state import Lane, TrainingConfig

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
PACES, BURN_IN = ((20, 1), (20, 2), (20, 3), (10, 1)), 3
"""Steps in log λ per epoch, and epochs between updates: one update takes the steps of all epochs since the last."""
DEFAULT = "every 1, ggn, all, 10"
"""The setting that is the default of hyper=online."""
CURVATURES: tuple[OutputCurvatureKind, ...] = ("ggn", "mc_fisher")
KEPT_SHARE, WORSE_NATS, AIM = 0.95, 0.01, 2.0


@dataclass(frozen=True)
class Run:
    """One training: its setting's name, CPU seconds, evidence (nats), and scores on the test part (nats, fraction)."""

    setting: str
    seconds: float
    evidence: float
    test_loglik: float
    accuracy: float


def settings(points: int) -> dict[str, Online]:
    """By name, the most expensive first."""
    return {
        f"every {frequency}, {curvature}, {subset or 'all'}, {pace}": Online(
            burn_in=BURN_IN,
            frequency=frequency,
            curvature=curvature,
            points=subset,
            steps=pace * frequency,
        )
        for (pace, frequency), curvature, subset in product(PACES, CURVATURES, (None, points))
    }


def train(config: TrainingConfig, task: Task, seed: int) -> tuple[Network, float]:
    """The network and the CPU seconds of its training."""
    group = LaneTrainer(config, [Lane(task, seed)], torch.device("cpu"))
    begin = time.process_time()
    [network] = group.train(None, lambda *_: None)
    return network, time.process_time() - begin


def scored(setting: str, network: Network, seconds: float, task: Task, after: bool = False) -> Run:
    """The run's row; `after` selects the precisions at the trained weights."""
    problem = NetworkEvidence("kfac").at(network, task, 0)
    precisions = FixedPoint(family="layerwise").choose(problem).precisions if after else problem.start
    x, labels = task.test.gather(torch.arange(len(task.test)))
    assert labels is not None
    with torch.no_grad():
        outputs = network(x)
    loglik = float(network.likelihood.log_prob(outputs, labels).mean())
    right = float((outputs.argmax(-1) == labels).double().mean())
    return Run(setting, seconds, float(problem.evidence(precisions)), loglik, right)


def one_seed(seed: int, size: int, epochs: int, points: int) -> list[Run]:
    words = ["data=mnist", "model=lenet", "method=map", f"data.train_size={size}", "data.test_size=2000"]
    experiment = load_experiment([*words, f"schedule.epochs={epochs}"])
    task = experiment.data.load(experiment.settings.data_path, seed).to(torch.device("cpu"), torch.float32)
    plain = TrainingConfig(experiment.model, experiment.schedule, experiment.prior, experiment.noise)
    network, first = train(plain, task, seed)
    runs = []
    for name, rule in settings(points).items():
        config = TrainingConfig(experiment.model, experiment.schedule, experiment.prior, experiment.noise, rule=rule)
        runs.append(scored(name, *train(config, task, seed), task))
        print(f"seed {seed}: {runs[-1]}", flush=True)
    seconds = (first + train(plain, task, seed)[1]) / 2
    both = [scored("map", network, seconds, task), scored("map, fixed point after", network, seconds, task, after=True)]
    return [*both, *runs]


def table(seeds: Sequence[Sequence[Run]]) -> tuple[list[dict[str, Any]], str]:
    """Means over seeds with their standard errors, and a sentence that names the cheapest settings."""
    rows = []
    for runs in zip(*seeds, strict=True):
        gains = [
            (run.evidence - after.evidence) / (dearest.evidence - after.evidence)
            for run, (_, after, dearest, *_) in zip(runs, seeds, strict=True)
        ]
        ratios = [run.seconds / map_run.seconds for run, (map_run, *_) in zip(runs, seeds, strict=True)]
        numbers = {
            "time_over_map": ratios,
            "evidence_nats": [r.evidence for r in runs],
            "share_of_gain": gains,
            "test_loglik": [r.test_loglik for r in runs],
            "accuracy": [r.accuracy for r in runs],
        }
        row: dict[str, Any] = {"setting": runs[0].setting, "seeds": len(runs)}
        for name, values in numbers.items():
            row[name] = statistics.mean(values)
            row[f"{name}_se"] = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
        rows.append(row)
    return rows, verdict(rows)


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """The cheapest setting as good as the reference, whether it meets the aim, and the best setting that meets it."""
    reference = rows[2]
    worst = reference["test_loglik"] - WORSE_NATS
    good = [r for r in rows[2:] if r["share_of_gain"] >= KEPT_SHARE and r["test_loglik"] >= worst]
    cheapest = min(good, key=lambda r: r["time_over_map"])
    [default] = [r for r in rows if r["setting"] == DEFAULT]
    reached = "The aim is met" if cheapest["time_over_map"] <= AIM else "The aim is not met"
    said = (
        f"The reference is '{reference['setting']}'. {reached}: the cheapest setting with {KEPT_SHARE:.0%} of its gain "
        "over precisions selected after training (and its test log-likelihood) is "
        f"**{cheapest['setting']}**, at {_number(cheapest, 'time_over_map')} times the cost of MAP (aim: {AIM:g})."
    )
    within = [r for r in rows[2:] if r["time_over_map"] <= AIM and r["test_loglik"] >= worst]
    if cheapest not in within and within:
        best = max(within, key=lambda r: r["share_of_gain"])
        said += (
            f" The best setting within the aim, {best['setting']}, has {_number(best, 'share_of_gain')} of the gain."
        )
    return said + (
        f" The default of hyper=online, {default['setting']}, has {_number(default, 'share_of_gain')} at "
        f"{_number(default, 'time_over_map')} times the cost."
    )


def _number(row: dict[str, Any], name: str, digits: int = 2) -> str:
    """The mean of a number with its standard error, if there is one."""
    error = row[f"{name}_se"]
    return f"{row[name]:.{digits}f}" + ("" if error is None else f" ± {error:.{digits}f}")


def shown(rows: Sequence[dict[str, Any]], said: str) -> str:
    lines = [
        "| setting (epochs between updates, curvature, points, steps per epoch) | time ÷ MAP | log evidence [nats] "
        "| share of the reference's gain | test log-lik [nats] | accuracy |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    digits = {"time_over_map": 2, "evidence_nats": 1, "share_of_gain": 2, "test_loglik": 4, "accuracy": 4}
    for r in rows:
        lines.append(f"| {r['setting']} | " + " | ".join(_number(r, name, d) for name, d in digits.items()) + " |")
    return "\n".join([*lines, "", said]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer points and epochs, one seed, write nothing")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size, epochs, points, count = (300, 5, 100, 1) if arguments.quick else (2000, 15, 500, arguments.seeds)
    seeds = []
    for seed in range(count):
        seeds.append(one_seed(seed, size, epochs, points))
        rows, said = table(seeds)
        said = f"{said} LeNet, {size:,} images of MNIST, {epochs} epochs (the first "
        said += f"{BURN_IN} without updates), {len(seeds)} seed(s), one thread."
        print(shown(rows, said))
        if not arguments.quick:
            write_text(RESULTS / "online_evidence.md", shown(rows, said))
            write_text(RESULTS / "online_evidence.csv", table_text(rows, list(rows[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
