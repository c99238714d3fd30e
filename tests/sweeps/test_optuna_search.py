"""Searches by Optuna: what is searched and averaged, which score counts, and a killed study that goes on as itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bnn_runner.cli import main as bnn_run
from bnn_runner.errors import UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.sweeps.objective import find_objective
from tests.sweeps.test_sweep_of_sixty import BRITTLE

optuna = pytest.importorskip("optuna", reason="pip install -e '.[optuna]'")

PROGRAM = "import sys; sys.argv[0] = 'bnn-run'; from bnn_runner.cli.main import main; main()"
FAST = ["method=map", "data=gap1d", "schedule.epochs=2", "figures=false", "metric=[marginal]", "threads=1"]
SEARCH = [
    "-m", "hydra/sweeper=optuna", "objective=val/marginal_loglik", "hydra.sweeper.startup=2", *FAST, "seed=0,1",
    "schedule.lr=tag(log,interval(1e-4,1e-1))", "model.activation=relu,tanh",
]  # fmt: skip


def start(folder: Path, output: str, *words: str) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", PROGRAM, *SEARCH, f"output_dir={output}", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def trials(folder: Path, output: str) -> list[tuple[dict[str, object], float]]:
    (file,) = (folder / output / "studies").glob("val-marginal_loglik-*.db")
    study = optuna.load_study(study_name="bnn-run", storage=f"sqlite:///{file}")
    return [(t.params, t.value) for t in study.trials]


@pytest.mark.exhaustive
def test_a_killed_search_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    with start(tmp_path, "whole", "hydra.sweeper.trials=3") as process:
        told, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "bnn-run: 6 jobs: 6 done" in told
    best = max(value for _, value in trials(tmp_path, "whole"))
    assert f"best: val/marginal_loglik = {best:.6g}" in told
    assert "bnn-run -m method=map" in told and "schedule.lr=" in told.split("best: ")[1]

    with start(tmp_path, "cut", "hydra.sweeper.trials=3") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("trial 0:"):
                process.send_signal(signal.SIGKILL)
                break
    with start(tmp_path, "cut", "hydra.sweeper.trials=3") as process:
        told, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "3 trials, 1 done before" in told and "trial 0:" not in told
    assert trials(tmp_path, "cut") == trials(tmp_path, "whole")
    assert len({params["schedule.lr"] for params, _ in trials(tmp_path, "cut")}) == 3
    cells = [json.loads(path.read_text()) for path in tmp_path.glob("cut/runs/*/*/map/*/cell.json")]
    assert len(cells) == 6 and {cell["seed"] for cell in cells} == {0, 1}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (SEARCH[:2] + SEARCH[3:], "objective=val/marginal_loglik"),
        ([*SEARCH, "objective=val/marginal_logli"], "Did you mean val/marginal_loglik"),
        (SEARCH[:-2], "requires a key with several values"),
        ([*SEARCH, "hydra.sweeper.sampler=tpx"], "must be one of tpe, gp, random"),
        ([*SEARCH, "seed=interval(0,3)"], "seed=0,1,2"),
        (["-m", *SEARCH[2:3], *FAST, "seed=0,1"], "Add hydra/sweeper=optuna"),
        ([SEARCH[2], *FAST], "Add -m hydra/sweeper=optuna"),
    ],
)
def test_a_search_that_cannot_be_is_a_mistake(
    words: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bnn_run.run(words) == 2
    told = capsys.readouterr().err
    assert "1 error, nothing was run" in told and hint in told
    assert not list(tmp_path.glob("outputs/studies/*"))


@pytest.mark.exhaustive
def test_a_failed_trial_is_taken_up_again_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted bugs: the failed trial stays without a value; it counts as one more of the trials asked for."""
    (tmp_path / "brittle_search.py").write_text(BRITTLE)
    method = tmp_path / "conf" / "method" / "brittle.yaml"
    method.parent.mkdir(parents=True)
    method.write_text("# a method that may fail\n_target_: brittle_search.Brittle\n")
    monkeypatch.chdir(tmp_path)
    words = ["--config-dir", "conf", "allow=[brittle_search]", "-m", *SEARCH[1:4], *FAST, "method=brittle", "seed=3"]
    words += ["schedule.epochs=2,3,4", "hydra.sweeper.trials=2", "output_dir=out"]
    assert bnn_run.run(words) == 1
    assert capsys.readouterr().err.count("no value") == 2
    monkeypatch.setenv("WELL", "1")
    assert bnn_run.run([*words, "retry_failed=false"]) == 1
    told = capsys.readouterr().err
    assert "trial 0:" not in told and "2 failed before" in told
    assert bnn_run.run(words) == 0
    told = capsys.readouterr()
    assert "no value" not in told.err and "trial 0:" in told.err and "trial 1:" in told.err
    values = [value for _, value in trials(tmp_path, "out")]
    assert values[:2] == [None, None] and len(values) == 4
    assert f"best: val/marginal_loglik = {max(values[2:]):.6g}" in told.out
    assert bnn_run.run(words) == 0
    told = capsys.readouterr()
    assert "nothing left to run" in told.err and "best: " in told.out
    assert len(trials(tmp_path, "out")) == 4


def test_the_plan_of_a_search_leaves_no_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bnn_run.run([*SEARCH, "plan_only=true"]) == 0
    told = capsys.readouterr().err
    assert "20 trials, 0 done before" in told and "a mean over seed=0,1 (2 jobs)" in told
    assert "schedule.lr: numbers from 0.0001 to 0.1, evenly in the logarithm" in told
    assert not list(tmp_path.rglob("*.db"))


@pytest.mark.parametrize(
    ("data", "text", "better"),
    [
        ("gap1d", "val/marginal_loglik", "higher"),
        ("gap1d", "test/rmse", "lower"),
        ("gap1d", "test/joint_loglik_tau10", "higher"),
        ("gap1d", "ood/far/ood_auroc", "higher"),
        ("two_moons", "test/dyadic_loglik_tau10_kappa2", "higher"),
        ("two_moons", "test/brier", "lower"),
    ],
)
def test_which_direction_is_better_is_the_metrics_own_word(data: str, text: str, better: str) -> None:
    objective = find_objective(text, load_experiment(["method=laplace", f"data={data}"]))
    assert (objective.better, objective.name) == (better, text)


def test_scores_that_there_will_not_be_are_refused() -> None:
    for words, text, hint in [
        (["data=gap1d"], "test/accuracy", "Scores: "),
        (["data=gap1d"], "marginal_loglik", "must be split/score"),
        (["data=gap1d"], "test/coverage_50", "no better direction"),
        (["data=two_moons", "data.val_fraction=0"], "val/marginal_loglik", "set data.val_fraction"),
    ]:
        with pytest.raises(UserError, match=hint):
            find_objective(text, load_experiment(["method=map", *words]))
