"""The stages of scripts/gpu_check.sh, which describes them and what they need."""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGES = ("tests", "mnist", "throughput", "posterior", "kappa")
STAGE_SECONDS = 570.0
POSTERIORS = ("laplace_diag", "laplace_kfac", "laplace_last_layer", "laplace_sampled")
COMPARED = ("map", "ensemble", "laplace_kfac", "laplace_last_layer", "laplace_sampled", "mc_dropout", "swag", "sgld")
TESTS = ("tests/runtime/test_device.py", "tests/contract/test_draws_contract.py", "tests/cli/test_main.py")


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    stage: str
    item: str
    status: str
    seconds: float = 0.0
    detail: str = ""


@dataclass
class Check:
    """Runs commands within the time of a stage; cells are written under `folder`."""

    folder: Path
    results: Path
    dry: bool
    ends: float = 0.0

    def run(self, *words: str) -> tuple[int, str, float]:
        """Exit code (124: out of time), output, and seconds of a command."""
        print(f"$ {' '.join(words)}", flush=True)
        start = time.perf_counter()
        left = self.ends - time.monotonic()
        if left < 1:
            return 124, "", 0.0
        try:
            done = subprocess.run(
                words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=left
            )
        except subprocess.TimeoutExpired as error:
            return 124, str(error.stdout or ""), time.perf_counter() - start
        if done.returncode:
            print(done.stdout[-2000:], flush=True)
        return done.returncode, done.stdout, time.perf_counter() - start

    def runner(self, *words: str) -> tuple[int, str, float]:
        """`bnn-run` with these overrides, its cells under the check's folder, without a time limit or figures."""
        always = (f"output_dir={self.folder}", "time_limit=null", "figures=false")
        return self.run(sys.executable, "-m", "bnn_runner.cli.main", *words, *always)

    def cells(self, method: str) -> list[Path]:
        return sorted(p.parent for p in self.folder.glob(f"runs/*/*/{method}/*/DONE"))

    def line(self, stage: str, item: str, ended: tuple[int, str, float], detail: str = "") -> Line:
        status = {0: "ok", 124: "out of time: run it again"}.get(ended[0], f"FAILED (exit code {ended[0]})")
        return Line(stage, item, status, round(ended[2], 1), detail)


def there(method: str) -> bool:
    return (ROOT / "conf" / "method" / f"{method}.yaml").is_file()


def absent(stage: str, method: str) -> Line:
    return Line(stage, method, f"not available (no conf/method/{method}.yaml)")


def tests(check: Check, only: str) -> Iterator[Line]:
    """The tests that can run on the GPU."""
    chosen = TESTS[:1] if check.dry else TESTS
    ended = check.run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "exhaustive or not exhaustive", *chosen
    )
    last = ended[1].strip().splitlines()[-1:] or [""]
    yield check.line("tests", " ".join(chosen), ended, last[0])


def mnist(check: Check, only: str) -> Iterator[Line]:
    """KFAC Laplace in float32, with factors that have large null spaces."""
    data = ["data=digits", "schedule.epochs=2"] if check.dry else ["data=mnist", "model=lenet", "schedule.epochs=5"]
    ended = check.runner(*data, "method=laplace_kfac", "metric=[accuracy,marginal]")
    yield check.line("mnist", "laplace_kfac", ended, summary(check.cells("laplace_kfac")))


def throughput(check: Check, only: str) -> Iterator[Line]:
    """The runner's training compared with a bare loop."""
    words = [
        "--precision",
        "float32" if check.dry else "bf16",
        "--rows",
        "gpu",
        "--results",
        str(check.results),
        "--name",
        "gpu_throughput",
    ]
    words += ["--only", "ResNet-18", "--small"] if check.dry else []
    ended = check.run(sys.executable, "scripts/benchmark_training.py", *words)
    path = check.results / "gpu_throughput.csv"
    if not path.is_file():
        yield check.line("throughput", "ResNet-18", ended)
        return
    for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        speed = f"{row['points_per_second']} images/s, bare loop {row['bare_points_per_second']}, ratio {row['ratio']}"
        ended = (0 if ended[0] == 3 else ended[0], ended[1], ended[2])  # 3: a ratio above the limit
        yield check.line("throughput", f"{row['network']} {row['precision']}", ended, speed)


def posterior(check: Check, only: str) -> Iterator[Line]:
    """Seconds and peak memory of each posterior on one trained network."""
    data = ["data=digits", "schedule.epochs=2", "eval.num_draws=4"]
    if not check.dry:
        data = ["data=cifar10", "model=resnet18", "schedule=sgd", "schedule.epochs=10", "precision=bf16"]
        data += ["augment=crop_flip", "data.test_size=2000", "eval.num_draws=20", "eval.max_ood=0"]
    for method in POSTERIORS:
        if not there(method):
            yield absent("posterior", method)
            continue
        ended = check.runner(*data, f"method={method}", "metric=[accuracy,marginal]")
        yield check.line("posterior", method, ended, summary(check.cells(method)[-1:]))


def kappa(check: Check, only: str) -> Iterator[Line]:
    """Dyadic scores over seeds, and the table of bnn-report."""
    data, seeds = ["data=digits", "schedule.epochs=2", "eval.num_draws=4"], (0,)
    if not check.dry:
        data, seeds = ["data=cifar10", "model=resnet20", "schedule.epochs=20", "eval.max_ood=0"], (0, 1, 2)
    for method in [only] if only else COMPARED[:2] if check.dry else COMPARED:
        if not there(method):
            yield absent("kappa", method)
            continue
        for seed in seeds:
            ended = check.runner(*data, f"method={method}", f"seed={seed}", "metric=[marginal,joint,dyadic]")
            yield check.line("kappa", f"{method} seed {seed}", ended)
    if not any(check.cells(method) for method in COMPARED):
        return
    check.ends += 60
    report = ["--output-dir", str(check.folder), "--metrics", "marginal,dyadic", "--name", "gpu_kappa"]
    ended = check.run(sys.executable, "-m", "bnn_runner.cli.report", *report)
    for path in sorted((check.folder / "results").glob("gpu_kappa.*")):
        (check.results / path.name).write_bytes(path.read_bytes())
    yield check.line("kappa", "table", ended, "gpu_kappa.md")


def summary(cells: list[Path]) -> str:
    """Seconds, peak memory and repairs of the last finished cell, from its provenance."""
    if not cells:
        return ""
    found = json.loads((cells[-1] / "provenance.json").read_text(encoding="utf-8"))
    parts = []
    for stage in ("training", "posterior", "evaluation"):
        peak = found["peak_memory"][stage]
        name, value = ("device", peak["device_mib"]) if "device_mib" in peak else ("process", peak["process_mib"])
        parts.append(f"{stage} {found['seconds'][stage]:.1f} s, {value:.0f} MiB ({name})")
    scores = csv.DictReader((cells[-1] / "metrics.csv").read_text(encoding="utf-8").splitlines())
    parts += [f"{s['metric']} {float(s['value']):.4f}" for s in scores if s["split"] == "test"][:2]
    return "; ".join([*parts, f"repairs {found['repairs'] or 'none'}"])


def gpu_name() -> str:
    """The device's name, from a separate process, so that this one uses no GPU memory."""
    module = "bnn_runner.runs.provenance"
    code = f"from bnn_runner.runtime.devices import pick_device; from {module} import device_name"
    code += "; print(device_name(pick_device('auto')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The device is not available: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def write(lines: list[Line], results: Path, device: str) -> None:
    """The table as CSV and Markdown; stages that were not run keep the lines of their last run."""
    path, names = results / "gpu_check.csv", [f.name for f in fields(Line)]
    ran = {line.stage for line in lines}
    rows = [{**asdict(line), "device": device} for line in lines]
    if path.is_file():
        old = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
        rows = [row for row in old if row["device"] == device and row["stage"] not in ran] + rows
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*names, "device"])
        table.writeheader()
        table.writerows(rows)
    text = [f"{device}", "", f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    text += [f"| {' | '.join(str(row[name]) for name in names)} |" for row in rows]
    (results / "gpu_check.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(["", *text]))


def main() -> int:
    """Run the given stages; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("stage", help="|".join((*STAGES, "kappa:METHOD", "all")))
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on generated or bundled data")
    words = parser.parse_args()
    name, _, only = words.stage.partition(":")
    if name not in (*STAGES, "all"):
        parser.error(f"unknown stage: {name}. The stages: {', '.join(STAGES)}, all.")
    results = Path(os.environ.get("RESULTS") or ROOT / "outputs" / "results").resolve()
    results.mkdir(parents=True, exist_ok=True)
    folder = results.parent / ("gpu_check_dry" if words.dry else "gpu_check")
    device = gpu_name()
    lines: list[Line] = []
    for stage in STAGES if name == "all" else (name,):
        check = Check(folder / stage, results, words.dry, time.monotonic() + STAGE_SECONDS)
        lines += globals()[stage](check, only)
    write(lines, results, device)
    return int(any(line.status.startswith("FAILED") for line in lines))


if __name__ == "__main__":
    sys.exit(main())
