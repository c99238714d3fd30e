"""Checks on real data: runs commands as a user types them, and prints what holds.

    python scripts/check_real_data.py           small sizes, about two minutes on 2 cores
    python scripts/check_real_data.py --full    the full sizes, about half an hour on 2 cores

Needs MNIST, CIFAR-10 and the UCI sets in BNN_DATA_DIR (or the default data folder). Runs in a temporary folder, or in
--folder, which is kept. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30


@dataclass(frozen=True)
class Ended:
    """A finished command: what it printed, and its seconds."""

    out: str
    seconds: float


@dataclass
class Checks:
    """Runs commands in `folder` and counts the checks that fail."""

    folder: Path
    failures: int = 0

    def run(self, command: str, *more: str) -> Ended:
        program, *words = [*command.split(), *more]
        print(f"$ {' '.join([program, *words])}", flush=True)
        start = time.perf_counter()
        path = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        done = subprocess.run([path or program, *words], cwd=self.folder, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - start
        self.holds(done.returncode == 0, f"exit code 0, in {seconds:.0f} s")
        if done.returncode != 0:
            print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
        return Ended(done.stdout + done.stderr, seconds)

    def holds(self, right: bool, what: str) -> None:
        self.failures += not right
        print(f"  {'ok    ' if right else 'FAILED'} {what}", flush=True)

    def cells(self, pattern: str) -> list[Path]:
        return sorted(p.parent for p in self.folder.glob(f"outputs/runs/{pattern}/*/DONE"))

    def score(self, pattern: str, metric: str) -> float:
        """A metric on the test set, averaged over the finished cells; NaN if there are none."""
        values = []
        for cell in self.cells(pattern):
            rows = list(csv.DictReader((cell / "metrics.csv").read_text(encoding="utf-8").splitlines()))
            values += [float(row["value"]) for row in rows if row["metric"] == metric and row["split"] == "test"][:1]
        return sum(values) / len(values) if values else float("nan")


def mnist(checks: Checks, full: bool) -> None:
    """MAP is accurate and fast enough. KFAC Laplace trains nothing, and its linearised mean has MAP's accuracy."""
    small = [] if full else ["schedule.epochs=3", "data.train_size=6000", "data.test_size=2000", "figures=false"]
    map_run = checks.run("bnn-run data=mnist model=lenet method=map", *small)
    accuracy, wanted = checks.score("mnist/lenet/map", "accuracy"), 0.988 if full else 0.90
    checks.holds(accuracy >= wanted, f"test accuracy {accuracy:.4f}, at least {wanted}")
    if full:
        checks.holds(map_run.seconds < 300, "in under 5 minutes")
    laplace = checks.run("bnn-run data=mnist model=lenet method=laplace_kfac", *small)
    checks.holds("nothing to train" in laplace.out, "trains nothing and says so")
    centre = checks.score("mnist/lenet/laplace_kfac", "centre_accuracy")
    checks.holds(centre == accuracy, f"the linearised mean's accuracy {centre:.4f} is MAP's")
    kfac = checks.score("mnist/lenet/laplace_kfac", "accuracy")
    # Draws average probabilities, so a few points near a boundary may change sides.
    checks.holds(abs(kfac - accuracy) < 0.005, f"the draws' accuracy {kfac:.4f} is close to it")


def cifar10(checks: Checks, full: bool) -> None:
    """CIFAR-10 with a ResNet-20 and Laplace, within limits of time and memory."""
    sizes = "data.train_size=5000 data.test_size=1000 eval.num_draws=50"
    if not full:
        sizes = "data.train_size=300 data.test_size=100 eval.num_draws=5 eval.max_ood=100 figures=false"
        sizes += " schedule.epochs=2 schedule.warmup_epochs=0"
    done = checks.run(f"bnn-run data=cifar10 model=resnet20 method=laplace {sizes}")
    [*cells] = checks.cells("cifar10/resnet20/laplace")
    checks.holds(len(cells) == 1, "one finished cell")
    if full:
        checks.holds(done.seconds < 600, "in under 10 minutes")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    checks.holds(peak < 4 * GIB, f"peak memory so far {peak / GIB:.2f} GiB, under 4")
    if cells:
        facts = json.loads((cells[0] / "cell.json").read_text(encoding="utf-8"))
        checks.holds(facts["shortened"] is None, f"not shortened ({facts['shortened']})")


def yacht(checks: Checks, full: bool) -> None:
    """Three methods with three seeds and one report; the same command again has nothing to do."""
    small = [] if full else ["schedule.epochs=100", "figures=false"]
    sweep = "bnn-run -m data=yacht method=map,ensemble,laplace seed=0,1,2"
    checks.run(sweep, *small)
    cells = checks.cells("yacht/mlp/*")
    checks.holds(len(cells) == 9, f"{len(cells)} finished cells, of nine")
    again = checks.run(sweep, *small)
    checks.holds("9 done, 0 to run" in again.out, "the same command again skips all nine")
    checks.holds(again.seconds < 60, "in seconds")
    checks.run("bnn-report --data yacht --format csv")
    rows = list(csv.DictReader((checks.folder / "outputs/results/comparison.csv").read_text().splitlines()))
    numbers = [row["n"] for row in rows if "n" in row]
    checks.holds(bool(numbers) and set(numbers) == {"3"}, f"the report has n = 3 everywhere ({len(numbers)} rows)")
    single, ensemble = (checks.score(f"yacht/mlp/{method}", "rmse") for method in ("map", "ensemble"))
    checks.holds(
        ensemble < 1.25 * single, f"RMSE of the ensemble {ensemble:.3f}, of MAP {single:.3f}: at most 25 % above it"
    )


def own_network(checks: Checks, full: bool) -> None:
    """Two posteriors, then a table, for a torchvision ResNet-18 that plain torch trained and saved."""
    points, fitted, tested = (2000, 512, 256) if full else (128, 32, 20)
    plain_resnet18(checks.folder / "r18.pt", points, epochs=2 if full else 1)
    methods = "laplace_last_layer,laplace_kfac" if full else "map,laplace_last_layer"
    sizes = f"data.train_size={fitted} data.test_size={tested} eval.num_draws=20 eval.max_ood=50 figures=false"
    own = "model=torchvision model.name=resnet18 model.weights=r18.pt"
    done = checks.run(f"bnn-run -m method={methods} data=cifar10 {own} {sizes}")
    checks.holds("1 pretrained (r18.pt), nothing to train" in done.out, "trains nothing and says so")
    cells = checks.cells("cifar10/torchvision/*")
    checks.holds(len(cells) == 2, f"{len(cells)} finished cells, of two")
    for cell in cells:
        facts = json.loads((cell / "cell.json").read_text(encoding="utf-8"))
        provenance = json.loads((cell / "provenance.json").read_text(encoding="utf-8"))
        accuracy = facts["pretrained"][0]["parts"]["test"]["accuracy"]
        seconds, memory = provenance["seconds"], provenance["peak_memory"]
        parts = ", ".join(f"{stage} {value:.0f} s" for stage, value in seconds.items())
        peak = f"{max(stage['process_mib'] for stage in memory.values()) / 1024:.1f} GiB"
        checks.holds(accuracy > 0.2 or not full, f"{facts['method']}: accuracy {accuracy:.3f}; {parts}; peak {peak}")
    report = checks.run("bnn-report --data cifar10 --model torchvision --metrics marginal_loglik,accuracy --no-figure")
    checks.holds(report.out.count("torchvision") == 2, "a table of both")


def plain_resnet18(path: Path, points: int, epochs: int) -> None:
    """Trains without this package: the usual loop, on pixels standardised as in data=cifar10."""
    import torch
    from torchvision import datasets, models

    folder = os.environ.get("BNN_DATA_DIR", str(Path("~/.cache/bnn_runner/data").expanduser()))
    published = datasets.CIFAR10(folder, train=True)
    mean, std = torch.tensor((0.4914, 0.4822, 0.4465)), torch.tensor((0.2470, 0.2435, 0.2616))
    x = (torch.from_numpy(published.data[:points]).float() / 255 - mean) / std
    x, y = x.permute(0, 3, 1, 2).contiguous(), torch.tensor(published.targets[:points])
    torch.manual_seed(0)
    network = models.resnet18(num_classes=10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
    torch.save(network.state_dict(), path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the full sizes, with limits for times and scores")
    parser.add_argument("--folder", type=Path, help="run in this folder and keep it, instead of a temporary one")
    parser.add_argument("--only", choices=list(CHECKS), help="one check")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        checks = Checks(folder)
        for name, check in CHECKS.items():
            if arguments.only in (None, name):
                check(checks, arguments.full)
    print("all checks passed" if not checks.failures else f"{checks.failures} checks failed")
    return int(checks.failures > 0)


CHECKS = {"yacht": yacht, "mnist": mnist, "cifar10": cifar10, "own_network": own_network}

if __name__ == "__main__":
    sys.exit(main())
