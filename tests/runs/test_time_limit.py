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
from bnn_runner.runs import time_limit as budgets
from bnn_runner.runs.time_limit import Cost, limit_seconds, shorten
from bnn_runner.sweeps import job
from bnn_runner.sweeps.scratch_files import Member
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig
from tests.problems import make_task

TASK = make_task("classification", (3,), 3, num_train=40_000, num_test=10_000)
CPU = torch.device("cpu")


def test_the_limit_in_force() -> None:
    assert limit_seconds("auto", CPU) == 20 * 60
    assert limit_seconds("auto", torch.device("cuda")) is None
    assert limit_seconds(None, CPU) is None and limit_seconds(0.0, CPU) is None
    assert limit_seconds(1.5, torch.device("cuda")) == 90


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
    assert budgets._training_seconds(config, lanes, CPU) == 3 * 2 + 3 * 3
    assert budgets._training_seconds(replace(config, stack="never"), lanes, CPU) == 2 * 3 * 2 + 3 * 3


def test_a_shortened_run_is_marked_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["schedule.epochs=40", "time_limit=1", "figures=false", "metric=[marginal]", "eval.num_draws=10"]
    costs = [Cost(training=600)]
    monkeypatch.setattr(budgets, "estimate", lambda *_: costs.pop())
    assert run(words) == 0
    told = capsys.readouterr().out
    assert "SHORTENED to fit time_limit=1 min: schedule.epochs 40 -> 3" in told
    assert "schedule.epochs=3" in told and "time_limit=null" in told
    [cell] = [p.parent for p in tmp_path.glob("outputs/runs/gap1d/mlp/laplace/*/DONE")]
    facts = json.loads((cell / "cell.json").read_text())
    assert facts["shortened"] == {"schedule.epochs": [40, 3]}
    assert facts["config"]["schedule.epochs"] == 3
    history = list(csv.DictReader((cell / "history.csv").read_text().splitlines()))
    assert len(history) == 3
    # Typed again, nothing is estimated (the list of costs is empty) and the same cell is shown.
    assert run(words) == 0
    assert "already finished" in capsys.readouterr().out
    # A forced run is estimated anew, and what it finds is what the same request has from then on.
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
    assert "schedule.epochs=3" in command and "time_limit=null" in command and "schedule.epochs=40" not in command


def test_of_a_job_of_a_sweep_nothing_is_estimated_but_for_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bugs: every one of 300 jobs timed for a line that nobody reads; a limit that a sweep's job overlooks."""
    monkeypatch.chdir(tmp_path)
    costs: list[Cost] = []
    monkeypatch.setattr(budgets, "estimate", lambda *_: costs.pop())
    words = ["method=map", "schedule.epochs=2", "figures=false", "metric=[marginal]"]
    free, limited = (load_experiment([*words, f"time_limit={limit}"]) for limit in ("null", 1))
    with pytest.raises(IndexError):
        runner.run_together([limited], estimated=False)
    with pytest.raises(IndexError):
        runner.run_together([free])
    assert runner.run_together([free], estimated=False)[0].status == "done"


def test_only_a_job_of_a_sweep_says_that_it_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: the way from the sweep to the run left out."""
    told: list[bool] = []

    def run_together(experiments: list[Any], estimated: bool = True) -> list[runner.Outcome]:
        told.append(estimated)
        return [runner.Outcome("done") for _ in experiments]

    monkeypatch.setattr(runner, "run_together", run_together)
    job.run_members([Member(0, ["method=map"])], None, tmp_path)
    job._run_into(tmp_path / "result.json", [Member(0, ["method=map"])], None, tmp_path)
    assert told == [True, False]


def test_a_long_fit_is_left_at_once_and_its_time_told_by_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: chains run to their end, three times over, to say what they will cost; the part taken for all."""
    moved = []

    def counted(*arguments: Any) -> Any:
        moved.append(1)
        return transition(*arguments)

    monkeypatch.setattr("bnn_runner.mcmc.chains.transition", counted)
    monkeypatch.setattr(budgets, "_PROBE_SECONDS", 0.0)
    experiment = load_experiment(["method=hmc", "method.warmup=500", "method.max_leapfrogs=3", "model.hidden=[4]"])
    config = TrainingConfig(
        experiment.model, experiment.schedule, experiment.prior, experiment.noise, dtype=torch.float64
    )
    task = make_task("regression", (1,), 1, num_train=10)
    begin = time.perf_counter()
    fit, evaluation = budgets._posterior_seconds(experiment, config, task, 8, CPU)
    assert len(moved) == 1, "progress after the first transition ends the probe"
    assert fit > 100 * (time.perf_counter() - begin) / 2 and evaluation > 0
