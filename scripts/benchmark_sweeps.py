"""What a sweep costs beside its jobs: finished cells, jobs of one second side by side, and seeds as lanes.

    python scripts/benchmark_sweeps.py                     all three (about ten minutes of one core)
    python scripts/benchmark_sweeps.py --only finished     one of them (finished, second or lanes); the rest stays

Writes outputs/results/sweep_costs.{csv,md}. Commands are started as a person starts them, on one thread. CPU seconds
are those of all processes of a command; beside other work they grow two- or threefold, and wall seconds more, so that
the load is given, and the cost of a job also in imports of torch. Exit code 1 where a limit is missed.
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
    """Takes one second of time and none of the processor."""

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
    """One measured quantity; `limit` is what it must stay below (None: told only)."""

    what: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def missed(self) -> bool:
        return self.limit is not None and not self.value <= self.limit


def command(folder: Path, *words: str) -> tuple[float, float, str]:
    """CPU seconds of all its processes, wall seconds, and what it told. Raises where it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "-m", *FAST, *words], cwd=folder, env=env, capture_output=True, text=True
    )
    seconds = time.perf_counter() - begun
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    try:
        while True:  # the server of its jobs ends after it, and comes to us
            os.wait()
    except ChildProcessError:
        pass
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds, done.stderr


def finished(folder: Path) -> list[Row]:
    """A sweep of thirty finished cells."""
    words = ["seed=range(30)", "schedule.epochs=2"]
    command(folder, *words)
    cpu, wall, told = command(folder, *words)
    if "30 done, 0 to run" not in told or "30 jobs: 30 done before" not in told:
        raise RuntimeError(f"jobs were submitted: {told}")
    return [
        Row("30 finished cells, nothing submitted: CPU", cpu, "s", 5.0),
        Row("30 finished cells, nothing submitted: wall", wall, "s"),
    ]


def second(folder: Path) -> list[Row]:
    """Jobs of one second under joblib: what each further one costs."""
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
        Row("a job of one second under joblib beyond that second: CPU", each, "s"),
        Row("the same in imports of torch (1.7 s on a quiet core)", each / imports, "", 0.5 / 1.7),
        Row(
            "a job of one second under joblib beyond that second: wall", (wall_many - wall_few) / (many - few) - 1, "s"
        ),
        Row("imports and plan, once a sweep: CPU", cpu_few - few * each, "s"),
    ]


def lanes(folder: Path) -> list[Row]:
    """Twenty seeds of an MLP as lanes, beside twenty jobs; rows compared in float64.

    As typed, with each data set's own network and schedule; and for gap1d in one process, 300 epochs, where nothing is
    started. Lanes save what a step costs beyond its arithmetic: a step of gap1d is 135 points at once, mostly
    arithmetic, and saves the least.
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
            Row(f"seed=range(20) on {data}: as lanes / as twenty jobs, wall", stacked[1] / jobs[1], "", 0.25),
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
        Row("20 seeds as lanes / 20 runs in one process, 300 epochs: CPU", together / alone, ""),
        Row("largest relative difference of a score in float64", difference(folder, "lanes64", "single64"), "", 1e-9),
    ]


def difference(folder: Path, one: str, other: str) -> float:
    """Largest relative difference between the scores of two output folders' cells."""
    found = 0.0
    tables = sorted(folder.glob(f"{one}/runs/*/*/*/*/metrics.csv"))
    if len(tables) != 20:
        raise RuntimeError(f"{len(tables)} cells instead of 20")
    for path in tables:
        twin = folder / other / path.relative_to(folder / one)
        for a, b in zip(*(list(csv.DictReader(p.read_text().splitlines())) for p in (path, twin)), strict=True):
            found = max(found, abs(float(a["value"]) - float(b["value"])) / abs(float(b["value"])))
    return found


PARTS = {"lanes": lanes, "finished": finished, "second": second}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="one part; the rows of the others stay")
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
    """Put the rows of a part in place of its earlier ones."""
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
