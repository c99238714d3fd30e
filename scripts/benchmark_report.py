"""Cost of `bnn-report` on a large sweep: time and memory on 2,000 synthetic cells, with and without figures.

    python scripts/benchmark_report.py                 writes outputs/results/report_costs.{csv,md}
    python scripts/benchmark_report.py --cells 200     a smaller sweep, nothing is written

The cells look like those of classification runs: a configuration of 80 settings, 52 scores (marginal, accuracy,
calibration, joint by block size and number of draws, dyadic) and a history of 100 epochs, for ten methods, ten data
sets and several seeds. Each row is the best of three processes, start-up included, in wall and CPU seconds. Exit code 1
if a report misses the target.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from bnn_runner.runtime.files import write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "outputs" / "results"
METHODS = ("map", "ensemble", "laplace", "laplace_kfac", "laplace_diag", "swag", "mc_dropout", "sgld", "hmc", "bbb")
DATA = ("mnist", "fashion_mnist", "kmnist", "digits", "two_moons", "glass", "vehicle", "waveform", "satellite", "svhn")
FIELDS = ["metric", "value", "standard_error", "n", "split", "tau", "kappa", "draws", "better", "unit", "status"]
PARTS = ("data", "model", "schedule", "prior", "eval")
CALLS = {
    "tables and figures": [],
    "tables alone": ["--no-figure"],
    "with differences, ranks, medians": ["--baseline", "method=map", "--ranks", "--summary", "median"],
}
AIM_SECONDS, AIM_MIB = 5.0, 1024


def table_text(rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> str:
    """CSV without importing torch: the peak memory of a child process includes that of its parent before the fork."""
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def scores(stream: random.Random) -> list[dict[str, object]]:
    """The rows of one metrics.csv."""

    def row(metric: str, value: float, better: str, **more: object) -> dict[str, object]:
        value += stream.gauss(0, 0.02)
        return {"metric": metric, "value": value, "n": 1000, "split": "test", "better": better, "status": "ok"} | more

    rows = [row("marginal_loglik", -0.4, "higher", unit="nats per point", draws=100)]
    rows += [row(name, 0.9, "higher") for name in ("accuracy", "ood_auroc")]
    rows += [row(name, 0.1, "lower") for name in ("ece", "brier", "rmse")]
    for tau, draws in product((2, 5, 10, 20, 50, 100), (25, 50, 100)):
        name = "joint_loglik" if draws == 100 else "joint_loglik_at_draws"
        rows.append(row(name, -0.35 * tau, "higher", tau=tau, draws=draws, unit="nats per block"))
    for kappa in (2, 3, 4, 5, 11):
        more = {"tau": 10 * (kappa - 1), "kappa": kappa, "draws": 100, "unit": "nats per block"}
        rows.append(row("dyadic_loglik", -3.0 * (kappa - 1), "higher", **more))
    return rows


def make(root: Path, count: int) -> None:
    stream = random.Random(0)
    for i in range(count):
        data, method = DATA[i % 10], METHODS[i // 10 % 10]
        seed = i // 100
        cell = root / "runs" / data / "mlp" / method / f"{seed}-{i:08x}"
        cell.mkdir(parents=True)
        config = {f"{part}.setting_{k}": k for part in PARTS for k in range(15)}
        config |= {"seed": seed, "data.name": data, "method._target_": method, "threads": 1, "device": "cpu"}
        facts = {"data": data, "model": "mlp", "method": method, "seed": seed, "hash": f"{i:08x}", "config": 1}
        facts |= {"choices": {"schedule": "adam", "prior": "isotropic"}, "version": "0", "kind": "classification"}
        facts |= {"config": config, "report": {"evidence_nats": -100.0, "notes": ["made for a measurement"]}}
        (cell / "cell.json").write_text(json.dumps(facts, indent=2))
        (cell / "metrics.csv").write_text(table_text(scores(stream), FIELDS))
        rows = [
            {"member": 0, "epoch": e, "seconds": e, "loss": 2 / e, "nll": 1.9 / e, "lr": 0.1} for e in range(1, 101)
        ]
        (cell / "history.csv").write_text(table_text(rows, list(rows[0])))
        (cell / "command.txt").write_text(f"bnn-run data={data} method={method} seed={seed}\n")
        (cell / "DONE").write_text("{}\n")


def measure(root: Path, words: list[str]) -> dict[str, float]:
    """Seconds and peak memory of one report."""
    program = "import sys; from bnn_runner.cli.report import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "--output-dir", str(root), *words]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)}) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"bnn-report failed with exit code {process.returncode}")
    seconds = time.perf_counter() - begin
    unit = 1 if sys.platform == "darwin" else 1024
    processor = used.ru_utime + used.ru_stime
    return {"seconds": seconds, "processor_seconds": processor, "peak_mib": used.ru_maxrss * unit / 2**20}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), arguments.cells)
        for name, words in CALLS.items():
            found = [measure(Path(folder), words) for _ in range(arguments.repeats)]
            best = {key: min(f[key] for f in found) for key in found[0]}
            rows.append({"report": name, "cells": arguments.cells} | {k: round(v, 2) for k, v in best.items()})
            print(rows[-1], flush=True)
    if arguments.cells == 2000:
        lines = ["| report of 2,000 cells | seconds | CPU seconds | peak MiB |", "|---|---:|---:|---:|"]
        lines += [
            f"| {r['report']} | {r['seconds']:.1f} | {r['processor_seconds']:.1f} | {r['peak_mib']:.0f} |" for r in rows
        ]
        text = (
            "\n".join(lines) + f"\n\nTarget: under {AIM_SECONDS:g} s and {AIM_MIB} MiB with figures. One process each, "
        )
        text += "start-up included.\n"
        write_text(RESULTS / "report_costs.csv", table_text(rows, list(rows[0])))
        write_text(RESULTS / "report_costs.md", text)
    held = all(float(str(r["seconds"])) < AIM_SECONDS and float(str(r["peak_mib"])) < AIM_MIB for r in rows)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
