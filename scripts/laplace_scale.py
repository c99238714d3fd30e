"""Time and peak memory of Laplace on ResNet-18 (11 million weights) on a CPU, for each structure.

Writes outputs/results/laplace_scale.{csv,md}.

    python scripts/laplace_scale.py                   all rows, about ten minutes each on 2 idle cores
    python scripts/laplace_scale.py kfac_10 diag_10   these rows; the others are kept

The images (32 x 32) are random and the network is untrained, which does not affect the cost. A row fits on 512 points
and computes the closed-form predictive of 256 points in batches of 64, in a separate process that is stopped if it
needs more memory than the row allows. MiB is the peak of the whole process, including torch. A sampled posterior has no
closed form: the row `sampled` predicts by 6 draws, solved with as many passes over the 512 points as the method allows,
and the table has the remaining error in posterior standard deviations.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import re
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from bnn_runner.base import FitContext, Network
from bnn_runner.evaluation.closed_form import probit_log_probs, variances
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.laplace.posterior import LinearisedLaplace
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_sampled import LaplaceSampled
from bnn_runner.models.likelihoods import Categorical
from bnn_runner.models.resnet18 import ResNet18
from bnn_runner.runs.cell import table_text
from bnn_runner.runtime.files import write_text
from bnn_runner.tasks import Split, Task, TaskSpec
from bnn_runner.training.schedules import Schedule

RESULTS = Path(__file__).resolve().parents[1] / "outputs" / "results"
BATCH = 64
DRAWS = 6


@dataclass(frozen=True)
class Row:
    """A structure with a number of classes and its memory limit."""

    method: Laplace | LaplaceSampled
    classes: int
    gib: float


@dataclass(frozen=True)
class Result:
    row: str
    classes: int
    structure: str
    weights: str
    output_curvature: str
    points: int
    test: int
    fit_seconds: float
    predict_seconds: float
    cpu_seconds: float
    peak_mib: float
    limit_mib: float
    load: float
    reason: str
    error_sd: float = math.nan


ROWS = {
    "last_layer_10": Row(Laplace(structure="full", weights="last_layer"), 10, 8),
    "diag_10": Row(Laplace(structure="diag"), 10, 8),
    "kfac_10": Row(Laplace(structure="kfac"), 10, 8),
    "sampled_10": Row(LaplaceSampled(solver="cg", passes=3, samples=2, probes=0), 10, 8),
    "diag_100_mc": Row(Laplace(structure="diag", curvature="mc_fisher"), 100, 10),
    "kfac_100_mc": Row(Laplace(structure="kfac", curvature="mc_fisher"), 100, 10),
    "last_layer_100_mc": Row(Laplace(structure="kfac", weights="last_layer", curvature="mc_fisher"), 100, 10),
}


def problem(classes: int, points: int, tested: int) -> tuple[Task, Network]:
    """Random images, and a network with running statistics from a few of them."""
    torch.manual_seed(0)
    train = Split(torch.randn(points, 3, 32, 32), torch.randint(0, classes, (points,)), torch.arange(points))
    test = Split(torch.randn(tested, 3, 32, 32), None, torch.arange(tested))
    spec = TaskSpec("random", "classification", (3, 32, 32), classes, 0.0)
    none = train.subset(torch.arange(0))
    task = Task(spec, train, none, test, {}, "random", torch.zeros(classes), torch.ones(classes))
    module = ResNet18().build(spec)
    with torch.no_grad():
        module.train()(train.inputs[:128])
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    prior = dict.fromkeys(parameters, 1.0)
    return task, Network(module.eval(), parameters, dict(module.named_buffers()), Categorical(), prior)


def child(row: Row, threads: int, points: int, tested: int) -> int:
    torch.set_num_threads(threads)
    task, network = problem(row.classes, points, tested)
    limit = int(row.gib * 2**30)
    # Address space exceeds memory: what is mapped but never touched does not count towards the limit.
    spare = int((_status("VmSize") - _status("VmRSS")) * 2**20)
    resource.setrlimit(resource.RLIMIT_AS, (limit + spare, limit + spare))
    context = FitContext(seed=0, hyper=Fixed(), schedule=Schedule(epochs=1, batch_size=64, lr=0.01))
    try:
        begin, cpu = time.perf_counter(), time.process_time()
        posterior = row.method.fit(task, [network], context)
        fitted = time.perf_counter()
        error = posterior.report.facts.get("sample_error_sd", math.nan)
        print(f"@fit {fitted - begin} {_status('VmHWM')} {error}", flush=True)
        for x, _ in task.test.batches(BATCH):
            if isinstance(posterior, LinearisedLaplace):
                moments = posterior.moments(x)
                probs = probit_log_probs(moments.mean, variances(moments.covariance)[0]).exp()
            else:
                probs = posterior.draws(DRAWS, 1)(x).softmax(-1).mean(0)
            assert bool(torch.isfinite(probs).all())
        print(f"@done {time.perf_counter() - fitted} {time.process_time() - cpu} {_status('VmHWM')}", flush=True)
    except Exception as error:
        print(f"@failed {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}", flush=True)
    return 0


def _status(name: str) -> float:
    """A value of /proc/self/status, MiB."""
    found = re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) / 1024 if found else math.nan


def measure(name: str, row: Row, threads: int, points: int, tested: int) -> Result:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, "--threads", str(threads)]
    command += ["--points", str(points), "--test", str(tested)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    said = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith("@")}
    fit, peak, error = (float(v) for v in said.get("@fit", ["nan"] * 3))
    predict, cpu, last = (float(v) for v in said.get("@done", ["nan"] * 3))
    reason = " ".join(said.get("@failed", [])) or ("" if "@done" in said else f"exit code {done.returncode}")
    return Result(
        name,
        row.classes,
        row.method.structure if isinstance(row.method, Laplace) else "sampled",
        row.method.weights if isinstance(row.method.weights, str) else "",
        row.method.curvature,
        points,
        tested,
        fit,
        predict,
        cpu,
        peak if math.isnan(last) else last,
        row.gib * 1024,
        os.getloadavg()[0],
        reason,
        error,
    )


def table(results: list[Result], threads: int) -> str:
    """Markdown: one line per row."""
    lines = [
        "| classes | structure | weights | curvature | N | test | fit, s | predict, s | CPU, s "
        "| MiB | limit | load | sd |",
        "|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        cells = [str(r.classes), r.structure, r.weights, r.output_curvature, str(r.points), str(r.test)]
        cells += [f"{r.fit_seconds:.0f}", f"{r.predict_seconds:.0f}", f"{r.cpu_seconds:.0f}", f"{r.peak_mib:.0f}"]
        cells += [
            r.reason or f"{r.limit_mib:.0f}",
            f"{r.load:.0f}",
            "" if math.isnan(r.error_sd) else f"{r.error_sd:.2g}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    note = (
        f"ResNet-18 on 32 x 32 images, predictions in batches of {BATCH}; torch "
        f"{torch.__version__}, {threads} threads on {os.cpu_count()} cores; "
        "measured once each. load: of the machine at the end. sd: the largest error of a sampled draw, in posterior "
        "standard deviations."
    )
    return "\n".join([*lines, "", note])


def kept(path: Path) -> list[Result]:
    """The results of an earlier call."""
    if not path.exists():
        return []
    read = {"str": str, "int": int, "float": lambda text: float(text or "nan")}
    types = {f.name: read[str(f.type)] for f in fields(Result)}
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    return [Result(**{n: types[n](v) for n, v in line.items()}) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--points", type=int, default=512, help="number to fit on; fewer take less time")
    parser.add_argument("--test", type=int, default=256, help="number to predict")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(ROWS[arguments.child], arguments.threads, arguments.points, arguments.test)
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"unknown row: {', '.join(unknown)}. The rows: {', '.join(ROWS)}.")
    results = kept(RESULTS / "laplace_scale.csv")
    for name, row in ROWS.items():
        if arguments.rows and name not in arguments.rows:
            continue
        results = [r for r in results if r.row != name and r.row in ROWS] + [
            measure(name, row, arguments.threads, arguments.points, arguments.test)
        ]
        results.sort(key=lambda r: list(ROWS).index(r.row))
        text = table(results, arguments.threads)
        write_text(RESULTS / "laplace_scale.md", text + "\n")
        columns = [f.name for f in fields(Result)]
        write_text(RESULTS / "laplace_scale.csv", table_text([asdict(r) for r in results], columns))
        print(text, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
