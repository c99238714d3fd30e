"""Sweeps by our sweeper: what is finished is not submitted, one job's end touches no other, lanes give equal rows.

The package `moody` stands outside of bnn_runner; its method gets into the trouble that its setting names,
unless the environment variable WELL is set.
"""

from __future__ import annotations

import csv
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bnn_runner import runner
from bnn_runner.errors import Interrupted
from bnn_runner.experiment import build_experiment, load_experiment
from bnn_runner.runtime.signals import STOPPING, stop_on_signals
from bnn_runner.sweeps.child_process import run_in_child
from bnn_runner.sweeps.plan import Loader, make_plan
from bnn_runner.sweeps.plan_cache import PlanCache
from bnn_runner.tasks import Task
from bnn_runner.training.state import TrainingConfig

MOODY = """
import os
import signal
import sys
from dataclasses import dataclass

import torch

from bnn_runner.methods.map import MAP


@dataclass(frozen=True)
class Moody:
    trouble: str
    finite = True
    uses_hyper = False
    predictive = "draws"

    def problems(self, spec, hyper):
        return []

    def needs(self):
        return MAP().needs()

    def fit(self, task, networks, context):
        if not os.environ.get("WELL"):
            getattr(self, self.trouble)()
        return MAP().fit(task, networks, context)

    def leave(self):
        sys.exit(3)

    def fail(self):
        raise ValueError("the moon is full")

    def memory(self):
        raise torch.OutOfMemoryError("tried to allocate the moon")

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def litter(self):
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(12345)
        torch.backends.cudnn.benchmark = True

    def look(self):
        assert torch.get_default_dtype() == torch.float32
        assert torch.initial_seed() != 12345
        assert not torch.backends.cudnn.benchmark
"""
FAST = ["data=gap1d", "schedule.epochs=2", "figures=false", "metric=[marginal]", "threads=1"]
PROGRAM = "import sys; sys.argv[0] = 'bnn-run'; from bnn_runner.cli.main import main; main()"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "moody.py").write_text(MOODY)
    path = tmp_path / "conf" / "method" / "moody.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("# a method with moods\n_target_: moody.Moody\ntrouble: look\n")
    return tmp_path


def bnn_run(folder: Path, *words: str, program: str = PROGRAM, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])} | environment
    command = [sys.executable, "-c", program, "-m", *FAST, *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env, timeout=300)


@pytest.mark.exhaustive
def test_one_jobs_end_touches_no_other(folder: Path) -> None:
    troubles = ["litter", "leave", "fail", "memory", "die", "look"]
    words = ["--config-dir", "conf", "allow=[moody]", "method=moody", f"method.trouble={','.join(troubles)}"]
    done = bnn_run(folder, *words)
    told = done.stderr[done.stderr.index("bnn-run: 6 jobs") :]
    assert done.returncode == 1 and "6 jobs: 2 done, 4 failed" in told
    reasons = {"leave": "exit(3)", "fail": "the moon is full", "memory": "allocate the moon", "die": "SIGKILL"}
    cells = {
        json.loads(path.read_text())["config"]["method.trouble"]: path.parent
        for path in folder.glob("outputs/runs/*/*/moody/*/cell.json")
    }
    assert set(cells) == set(troubles)
    for trouble, reason in reasons.items():
        (line,) = [text for text in told.splitlines() if f"method.trouble={trouble}" in text]
        assert reason in line
        failed = (cells[trouble] / "FAILED").read_text()
        assert reason in failed.replace("SystemExit: 3", "exit(3)")
        if trouble != "die":
            assert "Traceback" in failed and "Traceback" in (cells[trouble] / "log.txt").read_text()
            assert f" {cells[trouble].relative_to(folder) / 'log.txt'}" in told

    left = bnn_run(folder, *words, "retry_failed=false")
    assert left.returncode == 1 and "6 jobs: 2 done before, 4 failed before" in left.stderr

    again = bnn_run(folder, *words, WELL="1")
    assert again.returncode == 0 and "2 done, 4 to run, 4 failed before (will run again)" in again.stderr
    assert "6 jobs: 4 done, 2 done before" in again.stderr
    attempts = {t: json.loads((cell / "cell.json").read_text())["attempts"] for t, cell in cells.items()}
    assert attempts == {t: 1 if t in ("litter", "look") else 2 for t in troubles}

    blind = "import sys; sys.modules['torch'] = None\n" + PROGRAM  # whoever imports torch now fails
    finished = bnn_run(folder, *words, program=blind)
    assert finished.returncode == 0 and "6 jobs: 6 done before" in finished.stderr
    assert not list(folder.glob("outputs/.hydra*"))


@pytest.mark.exhaustive
def test_fail_fast_begins_no_further_job(folder: Path) -> None:
    words = ["--config-dir", "conf", "allow=[moody]", "method=moody", "method.trouble=look,fail,litter"]
    done = bnn_run(folder, *words, "fail_fast=true")
    assert done.returncode == 1 and "3 jobs: 1 done, 1 failed, 1 not run" in done.stderr
    assert len(list(folder.glob("outputs/runs/*/*/moody/*/cell.json"))) == 2


@pytest.mark.exhaustive
def test_a_group_of_lanes_that_breaks_off_is_run_one_by_one(folder: Path) -> None:
    words = ["--config-dir", "conf", "allow=[moody]", "method=moody", "method.trouble=die", "seed=0,1"]
    done = bnn_run(folder, *words)
    assert "2 jobs that ran together failed; running them one by one" in done.stderr
    assert done.returncode == 1 and "2 jobs: 2 failed" in done.stderr
    assert len(list(folder.glob("outputs/runs/*/*/moody/*/FAILED"))) == 2


@pytest.mark.exhaustive
def test_hydras_own_sweeper_still_works(folder: Path) -> None:
    done = bnn_run(folder, "method=map", "seed=0,1", "hydra/sweeper=basic")
    assert done.returncode == 0 and "2 jobs: 2 done" in done.stderr and "sweep:" not in done.stderr
    again = bnn_run(folder, "method=map", "seed=0,1", "hydra/sweeper=basic")
    assert "2 jobs: 2 skipped" in again.stderr


@pytest.mark.exhaustive
def test_a_sweep_asked_to_stop_is_cut_and_goes_on(folder: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    words = [*FAST, "method=map", "seed=0,1", "stack=never", "schedule.epochs=200000", "time_limit=null"]
    command = [sys.executable, "-c", PROGRAM, "-m", *words]
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process:
        while not list(folder.glob("outputs/runs/*/*/map/0-*/cell.json")) and process.poll() is None:
            time.sleep(0.1)
        time.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130 and "1 interrupted" in told and "1 no result" in told
    assert [p.parent.name[:2] for p in folder.glob("outputs/runs/*/*/map/*/INTERRUPTED")] == ["0-"]


# ------------------------------------------------------------------------------------------ plan


def speak(path: Path) -> None:
    path.write_text(os.environ["WORD"])
    print("out", os.environ["WORD"], flush=True)
    print("err", os.environ["WORD"], file=sys.stderr, flush=True)


@pytest.mark.exhaustive
def test_each_job_has_the_environment_and_the_streams_of_its_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bug: jobs of a second sweep in one process (a notebook) in the first one's environment, and telling
    where the first one told.
    """
    kept = [os.dup(1), os.dup(2)]
    try:
        for word in ("first", "second"):
            with (tmp_path / f"{word}.txt").open("w") as told:
                os.dup2(told.fileno(), 1)
                os.dup2(told.fileno(), 2)
                monkeypatch.setenv("WORD", word)
                assert run_in_child(speak, tmp_path / "read.txt") == (0, 0)
            assert (tmp_path / "read.txt").read_text() == word
    finally:
        for number, copy in enumerate(kept, 1):
            os.dup2(copy, number)
            os.close(copy)
    for word in ("first", "second"):
        assert (tmp_path / f"{word}.txt").read_text().split("\n")[:-1] == [f"out {word}", f"err {word}"]


def plan(points: list[list[str]], folder: Path, **changes):
    options = {"config_dir": None, "start": folder, "cache": PlanCache(folder / "plans", "version")}
    return make_plan(points, **options | {"retry_failed": True, "max_lanes": 32} | changes)


@pytest.mark.exhaustive
def test_lanes_are_made_where_they_are_faster(folder: Path) -> None:
    seeds = [["method=map", f"seed={s}"] for s in range(5)]
    splits = [["data=boston", "method=map", "seed=1", f"data.split={s}"] for s in range(3)]
    others = [["method=map", "seed=9", "schedule.lr=0.3"], ["method=map", "seed=9", "stack=never"]]
    conv = [["data=mnist", "model=lenet", "device=cpu", "method=map", f"seed={s}"] for s in range(2)]
    made = plan([*seeds, *splits, *others, *conv], folder)
    assert [len(group) for group in made.groups] == [5, 3, 1, 1, 1, 1]
    assert [len(group) for group in plan(seeds, folder, max_lanes=2).groups] == [2, 2, 1]


def test_the_plan_counts_shared_trainings_and_mistakes(folder: Path) -> None:
    points = [[f"method={m}", f"seed={s}"] for m in ("map", "laplace") for s in (0, 1)]
    made = plan([*points, ["method=map", "schedule.lr=-1"]], folder)
    told = "\n".join(made.summary_lines())
    assert "5 jobs, 4 cells; 0 done, 4 to run, 1 with errors" in told
    assert "4 networks needed, 2 of them different" in told
    assert "schedule.lr" in made.jobs[-1].problems[0]


def test_experiments_of_other_seeds_are_as_composed(folder: Path) -> None:
    loader = Loader(None, folder)
    for seed in (3, 4, 5):
        quick = loader.load(["method=map", f"seed={seed}", "data.noise=0.2"])
        full = load_experiment(["method=map", f"seed={seed}", "data.noise=0.2"], None, folder)
        built = build_experiment(quick)
        assert built.run.tree == full.run.tree and built.settings == full.settings
        assert load_experiment(quick.overrides, None, folder).config == full.config


def own_table(path: Path, slope: float) -> None:
    rows = [f"{x / 40},{slope * x}" for x in range(40)]
    path.write_text("\n".join(["x,y", *rows]) + "\n")


def test_finished_cells_of_other_data_are_run_again(folder: Path) -> None:
    own_table(folder / "mine.csv", 1.0)
    words = ["data=csv", "data.path=mine.csv", "data.target=y", "method=map", *FAST[1:], "seed=3"]
    runner.run(load_experiment(words, None, folder))
    assert plan([words], folder).jobs[0].status == "done", "looked at in full"
    assert plan([words], folder).jobs[0].status == "done", "remembered"
    own_table(folder / "mine.csv", 2.0)
    assert plan([words], folder, read_only=True).jobs[0].status == "open"
    assert [plan([words], folder).jobs[0].status for _ in range(2)] == ["open", "open"]
    runner.run(load_experiment(words, None, folder))
    assert plan([words], folder).jobs[0].status == "done"
    wider = [*words, "metric=[marginal,rmse]"]
    assert plan([wider], folder).jobs[0].status == "open", "its scores are to be made again"


# ------------------------------------------------------------------------------------------ lanes


@pytest.mark.exhaustive
def test_lanes_give_the_rows_of_single_runs_in_float64(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to = Task.to
    monkeypatch.setattr(runner, "TrainingConfig", functools.partial(TrainingConfig, dtype=torch.float64))
    monkeypatch.setattr(Task, "to", lambda self, device, dtype: to(self, device, torch.float64))
    words = [*FAST, "schedule.epochs=40", "method=map", "seed="]

    def rows(where: str, together: bool) -> dict[str, list[dict[str, str]]]:
        made = [load_experiment([*words[:-1], f"seed={s}", f"output_dir={where}"], None, folder) for s in range(3)]
        outcomes = runner.run_together(made) if together else [runner.run(e) for e in made]
        cells = [outcome.cells[0] for outcome in outcomes]
        return {c.name: list(csv.DictReader((c / "metrics.csv").read_text().splitlines())) for c in cells}

    lanes, single = rows("lanes", True), rows("single", False)
    assert lanes.keys() == single.keys() and len(lanes) == 3
    for name, found in lanes.items():
        assert len(found) == len(single[name]) > 0
        for a, b in zip(found, single[name], strict=True):
            assert float(a["value"]) == pytest.approx(float(b["value"]), rel=1e-9)


@pytest.mark.parametrize("number", [s for s in STOPPING if s != signal.SIGINT])
def test_schedulers_signals_ask_for_a_stop_however_often_they_come(number: int) -> None:
    with stop_on_signals() as stop:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop() and signal.Signals(number).name in stop.reason
        with pytest.raises(Interrupted):
            stop.check("training")
