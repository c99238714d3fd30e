"""Overhead of a sweep on top of its jobs: finished cells, jobs of one second, and seeds as lanes.

    python scripts/benchmark_sweeps.py                     all three (about ten minutes of one core)
    python scripts/benchmark_sweeps.py --only finished     one of them (finished, second or lanes); keeps other rows

Writes outputs/results/sweep_costs.{csv,md}. Commands are started as a user starts them, on one thread. CPU seconds
include all processes of a command. On a busy machine they grow two- or threefold, and wall seconds more, so the load is
given, and the cost of a job also in units of `import torch`. Exit code 1 if a limit is exceeded. Lanes are networks
stacked on one axis and trained in one step.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import functools
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

from bnn_runner import runner
from bnn_runner.experiment import load_experiment
from bnn_runner.runtime.files import write_text
from bnn_runner.tasks import Task
from bnn_runner.training.state import TrainingConfig

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "outputs" / "results"
PROGRAM = "import sys; sys.argv[0] = 'bnn-run'; from bnn_runner.cli.main import main; main()"
FAST = ["method=map", "data=gap1d", "figures=false", "metric=[marginal,rmse]", "threads=1"]
SLEEPER = '''
import time
from dataclasses import dataclass

from bnn_runner.methods.map import MAP


@dataclass(frozen=True)
class Sleeper:
    """Takes one second of wall time and no CPU time."""

    finite = True
    uses_hyper = False
    predictive = "draws"

    def problems(self, spec, hyper):
        return []

    def needs(self):
        return MAP().needs()

    def fit(self, task, networks, context):
        time.sleep(1)
        return MAP().fit(task, networks, context)
'''
SMALL_SETS = ("yacht", "two_moons", "digits", "gap1d")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Row:
    """One measured quantity; it must stay below `limit` (None: no limit)."""

    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def missed(self) -> bool:
        return self.limit is not None and not self.value <= self.limit


def command(folder: Path, *words: str) -> tuple[float, float, str]:
    """CPU seconds of all processes of a command, wall seconds, and its messages. Raises RuntimeError if it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-m", *FAST, *words], cwd=folder, env=env, capture_output=True, text=True
    )
    seconds = time.perf_counter() - begun
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    try:
        while True:  # the server of its jobs ends after it and becomes our child
            os.wait()
    except ChildProcessError:
        pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds, done.stderr


def finished(folder: Path) -> list[Row]:
    """A sweep of thirty finished cells."""
    words = ["seed=range(30)", "schedule.epochs=2"]
    command(folder, *words)
    cpu, wall, messages = command(folder, *words)
    if "30 done, 0 to run" not in messages or "30 jobs: 30 done before" not in messages:
        raise RuntimeError(f"jobs were submitted: {messages}")
    return [
        Row("30 finished cells, nothing submitted: CPU", cpu, "s", 5.0),
        Row("30 finished cells, nothing submitted: wall", wall, "s"),
    ]


def second(folder: Path) -> list[Row]:
    """Jobs of one second under joblib: the overhead of each further job."""
    (folder / "sleeper.py").write_text(SLEEPER)
    choice = folder / "conf" / "method" / "sleeper.yaml"
    choice.parent.mkdir(parents=True)
    choice.write_text("# sleeps for a second\n_target_: sleeper.Sleeper\n")
    words = ["--config-dir", "conf", "allow=[sleeper]", "method=sleeper", "hydra/launcher=workers"]
    words += ["hydra.launcher.n_jobs=1", "schedule.epochs=1", "metric=[marginal]", "stack=never"]
    few, many = 2, 6
    costs = {n: command(folder, *words, f"seed=range({n * 100},{n * 101})")[:2] for n in (few, many)}
    (cpu_few, wall_few), (cpu_many, wall_many) = costs[few], costs[many]
    each = (cpu_many - cpu_few) / (many - few)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    imports = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    return [
        Row("overhead of a job of one second under joblib: CPU", each, "s"),
        Row("the same in units of `import torch` (1.7 s on an idle core)", each / imports, "", 0.5 / 1.7),
        Row("overhead of a job of one second under joblib: wall", (wall_many - wall_few) / (many - few) - 1, "s"),
        Row("imports and plan, once per sweep: CPU", cpu_few - few * each, "s"),
    ]


def lanes(folder: Path) -> list[Row]:
    """Twenty seeds of an MLP as lanes, compared with twenty jobs; scores are compared in float64.

    Once as commands, with each data set's own network and schedule, and once in one process on gap1d with 300 epochs,
    without the cost of starting processes. Lanes save the part of a step that is not arithmetic. They save least on
    gap1d, where a step takes all 135 points at once and is mostly arithmetic.
    """

    def experiments(output: str, epochs: int) -> list[runner.Experiment]:
        words = [*FAST, f"schedule.epochs={epochs}", f"output_dir={folder / output}", "time_limit=null"]
        return [load_experiment([*words, f"seed={seed}"], None, folder) for seed in range(20)]

    def seconds(work: Callable[[], object]) -> float:
        begun = time.process_time()
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            work()
        return time.process_time() - begun

    seconds(lambda: runner.run(experiments("warm", 2)[0]))
    made = experiments("lanes", 300), experiments("single", 300)
    together = seconds(lambda: runner.run_together(made[0]))
    alone = seconds(lambda: [runner.run(e) for e in made[1]])

    typed: list[Row] = []
    for data in SMALL_SETS:
        words = [f"data={data}", "seed=range(20)"]
        stacked = command(folder, *words, f"output_dir=stacked_{data}")
        jobs = command(folder, *words, f"output_dir=jobs_{data}", "stack=never")
        typed += [
            Row(f"seed=range(20) on {data}: as lanes ÷ as twenty jobs, wall", stacked[1] / jobs[1], "", 0.25),
            Row(f"the same on {data}, CPU of all processes", stacked[0] / jobs[0], "", 0.25),
            Row(f"seed=range(20) on {data}, as lanes: wall", stacked[1], "s"),
        ]

    to, config = Task.to, runner.TrainingConfig
    runner.TrainingConfig = functools.partial(TrainingConfig, dtype=torch.float64)  # type: ignore[assignment, misc]
    Task.to = lambda self, device, dtype: to(self, device, torch.float64)  # type: ignore[method-assign]
    try:
        seconds(lambda: runner.run_together(experiments("lanes64", 10)))
        seconds(lambda: [runner.run(e) for e in experiments("single64", 10)])
    finally:
        runner.TrainingConfig, Task.to = config, to  # type: ignore[misc, method-assign]
    return [
        *typed,
        Row("20 seeds as lanes ÷ 20 runs in one process, 300 epochs: CPU", together / alone, ""),
        Row("largest relative difference of a score in float64", difference(folder, "lanes64", "single64"), "", 1e-9),
    ]


def difference(folder: Path, one: str, other: str) -> float:
    """Largest relative difference between the scores of two output folders' cells."""
    found = 0.0
    tables = sorted(folder.glob(f"{one}/runs/*/*/*/*/metrics.csv"))
    if len(tables) != 20:
        raise RuntimeError(f"there must be 20 cells; found {len(tables)}")
    for path in tables:
        twin = folder / other / path.relative_to(folder / one)
        for a, b in zip(*(list(csv.DictReader(p.read_text().splitlines())) for p in (path, twin)), strict=True):
            found = max(found, abs(float(a["value"]) - float(b["value"])) / abs(float(b["value"])))
    return found


PARTS = {"lanes": lanes, "finished": finished, "second": second}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="measure one part and keep the other rows")
    only = parser.parse_args().only
    torch.set_num_threads(1)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    missed = False
    for name, part in PARTS.items():
        if only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                rows = part(Path(folder))
            print(*rows, sep="\n", flush=True)
            missed |= any(row.missed for row in rows)
            keep(name, rows)
    return int(missed)


def keep(part: str, rows: list[Row]) -> None:
    """Replace the rows of a part in the kept table."""
    file = RESULTS / "sweep_costs.csv"
    heads = ["part", "what", "value", "unit", "limit", "load", "torch"]
    kept = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
    machine = [f"{os.getloadavg()[0]:.1f}", torch.__version__]
    new = [
        [part, r.what, f"{r.value:.3g}", r.unit, "" if r.limit is None else f"{r.limit:.2g}", *machine] for r in rows
    ]
    lines = [[row[h] for h in heads] for row in kept if row["part"] != part] + new
    lines.sort(key=lambda line: list(PARTS).index(line[0]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *lines])
    write_text(file, text.getvalue())
    table = ["| " + " | ".join(line) + " |" for line in [heads, ["---"] * len(heads), *lines]]
    write_text(file.with_suffix(".md"), "\n".join(table) + "\n")


if __name__ == "__main__":
    sys.exit(main())
