"""The time limit shortens openly: what is changed, what is said, what is marked, and that it is found again."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bnn_runner import runner
from bnn_runner.cli.main import run
from bnn_runner.experiment import load_experiment
from bnn_runner.mcmc.hamiltonian import transition
from bnn_runner.models.likelihoods import NoiseRule
from bnn_runner.models.mlp import MLP
from bnn_runner.models.priors import Isotropic
from bnn_runner.runs import cost_estimate, fit_to_time_limit
from bnn_runner.runs.cost_estimate import Cost, Forecast
from bnn_runner.runs.time_limit import shorten
from bnn_runner.sweeps import job
from bnn_runner.sweeps.scratch_files import Member
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig
from tests.problems import make_task

TASK = make_task("classification", (3,), 3, num_train=40_000, num_test=10_000)
CPU = torch.device("cpu")


def test_what_fits_is_left_alone() -> None:
    assert shorten(Cost(training=500, fit=100, evaluation=100), 1200, TASK, [1000, 1000], Schedule(epochs=10)) == {}


@pytest.mark.parametrize(
    ("cost", "changed"),
    [
        (Cost(training=5000, fit=10, evaluation=10), {"schedule.epochs"}),
        (Cost(training=100, fit=4000, evaluation=10, fit_per_point=0.1), {"data.train_size"}),
        (Cost(training=100, fit=10, evaluation=1200, evaluation_per_point=0.1), {"data.test_size", "eval.max_ood"}),
        (Cost(training=100, fit=10, evaluation=1201, evaluation_per_point=0.05), {"data.test_size"}),
        (
            Cost(100_000, 4000, 2400, 0.1, 0.2),
            {"data.train_size", "data.test_size", "eval.max_ood", "schedule.epochs", "schedule.warmup_epochs"},
        ),
    ],
)
def test_what_is_long_is_shortened_until_it_fits(cost: Cost, changed: set[str]) -> None:
    """Planted bugs: a share applied to the wrong part; training points cut without their epochs getting cheaper."""
    limit, others, schedule = 1200.0, [1000, 1000], Schedule(epochs=100, warmup_epochs=10)
    changes = shorten(cost, limit, TASK, others, schedule)
    assert set(changes) == changed
    points = changes.get("data.train_size", len(TASK.train))
    tests = changes.get("data.test_size", len(TASK.test))
    training = cost.training * points / len(TASK.train) * changes.get("schedule.epochs", 100) / 100
    fit = cost.fit_per_point * points if "data.train_size" in changes else cost.fit
    scored = tests + sum(min(n, changes.get("eval.max_ood", n)) for n in others)
    evaluation = cost.evaluation_per_point * scored or cost.evaluation
    assert training + fit + evaluation <= limit


def test_trainings_of_unequal_size_are_estimated_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: replicates of unequal size in one group, which ends in a ValueError; each size counted once."""
    monkeypatch.setattr(LaneTrainer, "step_seconds", lambda self: 1.0)
    tasks = [make_task("regression", (3,), 1, num_train=n) for n in (20, 20, 25)]
    lanes = [Lane(task, i) for i, task in enumerate(tasks)]
    schedule = Schedule(epochs=3, batch_size=10)
    config = TrainingConfig(MLP(hidden=(4,)), schedule, Isotropic(), NoiseRule(), dtype=torch.float64)
    assert cost_estimate._training_seconds(config, lanes, CPU) == 3 * 2 + 3 * 3
    assert cost_estimate._training_seconds(replace(config, stack="never"), lanes, CPU) == 2 * 3 * 2 + 3 * 3


@pytest.mark.exhaustive
def test_a_shortened_run_is_marked_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["schedule.epochs=40", "time_limit=1", "figures=false", "metric=[marginal]", "eval.num_draws=10"]
    costs = [Cost(training=600)]
    monkeypatch.setattr(fit_to_time_limit, "estimate", lambda *_: costs.pop())
    assert run(words) == 0
    told = capsys.readouterr().out
    assert "SHORTENED to fit time_limit=1 min: schedule.epochs 40 -> 3" in told
    assert "bnn-run figures=false metric=[marginal] eval.num_draws=10 schedule.epochs=3" in told.replace("'", "")
    [cell] = [p.parent for p in tmp_path.glob("outputs/runs/gap1d/mlp/laplace/*/DONE")]
    facts = json.loads((cell / "cell.json").read_text())
    assert facts["shortened"] == {"schedule.epochs": [40, 3]}
    assert facts["config"]["schedule.epochs"] == 3
    history = list(csv.DictReader((cell / "history.csv").read_text().splitlines()))
    assert len(history) == 3
    # Typed again, nothing is estimated (the list of costs is empty) and the same cell is shown.
    assert run(words) == 0
    assert "already finished" in capsys.readouterr().out
    # A forced run is estimated again, and its result is what the same request has from then on.
    costs.append(Cost(training=1))
    assert run([*words, "schedule.epochs=4", "force=true"]) == 0
    assert "SHORTENED" not in capsys.readouterr().out
    costs.append(Cost(training=600))
    assert run([*words, "force=true"]) == 0
    costs.append(Cost(training=1200))
    assert run([*words, "force=true"]) == 0
    assert "schedule.epochs 40 -> 1" in capsys.readouterr().out
    # The command it printed is that cell.
    command = (cell / "command.txt").read_text().split()
    assert "schedule.epochs=3" in command and "schedule.epochs=40" not in command
    assert not any(word.startswith("time_limit") for word in command)


def test_of_a_job_of_a_sweep_nothing_is_estimated_but_for_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bugs: every one of 300 jobs timed for a line that nobody reads; a limit that a sweep's job overlooks."""
    monkeypatch.chdir(tmp_path)
    costs: list[Cost] = []
    monkeypatch.setattr(fit_to_time_limit, "estimate", lambda *_: costs.pop())
    words = ["method=map", "schedule.epochs=2", "figures=false", "metric=[marginal]"]
    free, limited = (load_experiment([*words, f"time_limit={limit}"]) for limit in ("null", 1))
    with pytest.raises(IndexError):
        runner.run_together([limited], estimated=False)
    with pytest.raises(IndexError):
        runner.run_together([free])
    assert runner.run_together([free], estimated=False)[0].status == "done"


def test_only_a_job_of_a_sweep_is_not_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the way from the sweep to the run left out."""
    monkeypatch.chdir(tmp_path)
    estimated: list[bool] = []

    def run_together(experiments: list[Any], estimated_: bool = True, **more: bool) -> list[runner.Outcome]:
        estimated.append(more["estimated"])
        return [runner.Outcome("done") for _ in experiments]

    monkeypatch.setattr(runner, "run_together", run_together)
    assert run(["method=map"]) == 0
    job._run_and_write(tmp_path / "result.json", [Member(0, ["method=map"])], None, tmp_path)
    assert estimated == [True, False]


def test_nothing_is_shortened_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long run says what it will take, with the command of a shorter one, and runs whole."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit_to_time_limit, "estimate", lambda *_: Cost(training=7200))
    assert run(["schedule.epochs=30", "figures=false", "metric=[marginal]", "method=map"]) == 0
    said = capsys.readouterr().out
    assert "this run will take about 2.0 h (" in said and "Ctrl-C keeps what is done" in said
    [command] = [line.partition("bnn-run ")[2] for line in said.splitlines() if "for a run of about 20 min" in line]
    assert "schedule.epochs=4" in command and "SHORTENED" not in said
    assert not load_experiment([]).settings.time_limit
    [history] = tmp_path.glob("outputs/runs/gap1d/mlp/map/*/history.csv")
    assert len(history.read_text().splitlines()) == 31


def test_a_shortened_run_reads_its_data_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the files of an image set read again for the smaller experiment and for each replicate."""
    monkeypatch.chdir(tmp_path)
    reads: list[str] = []
    for module in ("data.uci", "runs.download"):
        monkeypatch.setattr(f"bnn_runner.{module}.ensure", lambda *_: tmp_path)
    table = torch.randn(308, 7, dtype=torch.float64).numpy()

    def loadtxt(path: Path, **_: Any) -> Any:
        reads.append(path.name)
        return table

    monkeypatch.setattr("bnn_runner.data.uci.np.loadtxt", loadtxt)
    costs = [Cost(training=600)]
    monkeypatch.setattr(fit_to_time_limit, "estimate", lambda *_: costs.pop())
    words = ["data=yacht", "method=map", "schedule.epochs=40", "time_limit=1", "figures=false", "metric=[rmse]"]
    [outcome] = runner.run_together([load_experiment([*words, "replicates=2", f"data_dir={tmp_path}"])])
    assert outcome.status == "done" and reads == ["data.txt"]


def test_the_first_steps_correct_an_estimate_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: one of three trainings taken for all; said at every step; a good estimate "corrected" too."""
    for stage, per_step, said in (
        ("training", 1.0, ["estimate corrected after 10 steps: about 4 min in total"]),
        ("training 1 of 3", 1.0, []),
        ("training", 3.0, []),
    ):
        clock = iter(range(10_000))
        monkeypatch.setattr(cost_estimate.time, "perf_counter", lambda clock=clock, s=per_step: s * next(clock))
        lines: list[str] = []
        forecast = Forecast(Cost(training=300, fit=300), lambda *_: None, lines.append)
        for done in range(100):
            forecast(stage, done, 120 if stage == "training" and per_step == 1.0 else 100)
        assert lines == said


def test_a_long_fit_is_left_at_once_and_its_time_told_by_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: chains run to their end, three times over, to say what they will cost; the part taken for all."""
    moved = []

    def counted(*arguments: Any) -> Any:
        moved.append(1)
        return transition(*arguments)

    monkeypatch.setattr("bnn_runner.mcmc.chains.transition", counted)
    monkeypatch.setattr(cost_estimate, "_PROBE_SECONDS", 0.0)
    experiment = load_experiment(["method=hmc", "method.warmup=500", "method.max_leapfrogs=3", "model.hidden=[4]"])
    config = TrainingConfig(
        experiment.model, experiment.schedule, experiment.prior, experiment.noise, dtype=torch.float64
    )
    task = make_task("regression", (1,), 1, num_train=10)
    begin = time.perf_counter()
    fit, evaluation = cost_estimate._posterior_seconds(experiment, config, task, 8, CPU)
    assert len(moved) == 1, "progress after the first transition ends the probe"
    assert fit > 100 * (time.perf_counter() - begin) / 2 and evaluation > 0
