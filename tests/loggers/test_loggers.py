"""Loggers: each logs a real cell with its real package (skipped if it is not installed), and ends no run."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from bnn_runner import run
from bnn_runner.errors import UserError
from bnn_runner.experiment import load_experiment
from bnn_runner.loggers.base import LoggedCell, NoLogger
from bnn_runner.loggers.finished import _history, log_finished, logged_cell
from bnn_runner.loggers.mlflow import MLflow

SMALL = ["data=gap1d", "method=ensemble", "method.size=2", "schedule.epochs=3", "eval.num_draws=4", "data.num_train=20"]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of one finished run, with figures."""
    folder = tmp_path_factory.mktemp("logged")
    run([*SMALL, f"output_dir={folder}", "threads=1"])
    return folder


def cell_of(folder: Path) -> LoggedCell:
    (done,) = folder.glob("runs/*/*/*/*/DONE")
    return logged_cell(done.parent, folder)


def test_what_a_logger_receives(finished: Path) -> None:
    """Planted bugs: members' curves on top of each other; scores of different tau under one name; NaN as a number."""
    cell = cell_of(finished)
    assert cell.name.startswith("gap1d/mlp/ensemble/0-") and cell.config["schedule.epochs"] == 3
    series = cell.series()
    assert [epoch for epoch, _ in series["train/loss/member1"]] == [1, 2, 3]
    assert series["train/loss/member0"] != series["train/loss/member1"]
    assert {"joint_loglik_tau2", "joint_loglik_tau10", "rmse"} <= set(cell.scores)
    assert all(value == value for value in cell.scores.values()) and cell.figures


def test_the_fit_of_a_posterior_is_logged_next_to_the_training(finished: Path, tmp_path: Path) -> None:
    """Bayes by Backprop writes lines of its own. Planted bugs: its member taken for a number; curves mixed up."""
    cell = cell_of(finished)
    rows = [{"member": "0", "epoch": 1.0, "nll": 2.0}, {"member": "posterior", "epoch": 1.0, "nll": 3.0, "kl": 4.0}]
    assert replace(cell, history=rows).series() == {
        "train/nll": [(1, 2.0)],
        "fit/nll": [(1, 3.0)],
        "fit/kl": [(1, 4.0)],
    }
    table = "member,epoch,nll,kl\n0,1,2.0,\nposterior,1,3.0,nan\n"
    (tmp_path / "history.csv").write_text(table)
    assert _history(tmp_path / "history.csv") == [rows[0], {"member": "posterior", "epoch": 1.0, "nll": 3.0}]


@needs("tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_back_what_was_logged(finished: Path, tmp_path: Path) -> None:
    """Planted bug: epochs lost, so that all points stand at step 0; a second log next to the first."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from bnn_runner.loggers.tensorboard import TensorBoard

    cell = cell_of(finished)
    for _ in range(2):
        TensorBoard(str(tmp_path)).log(cell)
    events = EventAccumulator(str(tmp_path / cell.name))
    events.Reload()
    scalars = events.Scalars("train/loss/member1")
    assert [s.step for s in scalars] == [1, 2, 3]
    assert [s.value for s in scalars] == pytest.approx([v for _, v in cell.series()["train/loss/member1"]])
    assert events.Scalars("score/rmse")[0].value == pytest.approx(cell.scores["rmse"])
    assert events.Tags()["images"]


def test_a_run_that_mlflow_rejects_in_part_is_failed(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without the package: its client stands for the service. Planted bugs: left RUNNING; `@` in a name."""
    sent: list[tuple[str, str]] = []

    class Client:
        def __init__(self, tracking_uri: str) -> None: ...

        def get_experiment_by_name(self, name: str) -> SimpleNamespace:
            return SimpleNamespace(experiment_id="1")

        def search_runs(self, where: list[str], filter_string: str) -> list[SimpleNamespace]:
            return []

        def create_run(self, where: str, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
            return SimpleNamespace(info=SimpleNamespace(run_id="7"))

        def log_batch(self, run: str, **parts: list[tuple[str, ...]]) -> None:
            sent.extend(("name", str(name)) for name, *_ in chain(*parts.values()))

        def log_artifact(self, run: str, file: str, folder: str) -> None:
            raise OSError("the disk is full")

        def set_terminated(self, run: str, status: str = "FINISHED") -> None:
            sent.append((run, status))

    together = SimpleNamespace(**dict.fromkeys(("Metric", "Param", "RunTag"), lambda *fields: fields))
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "mlflow.entities", together)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=Client))
    with pytest.raises(OSError, match="disk is full"):
        MLflow("sqlite://", "tests").log(cell_of(finished))
    assert sent[-1] == ("7", "FAILED") and [s for s in sent if s[0] == "7"] == sent[-1:]
    names = {name for what, name in sent if what == "name"}
    assert {"marginal_loglik/val", "train/loss/member1", "schedule.epochs", "folder"} <= names
    assert not any("@" in name for name in names)


@needs("mlflow")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_one_run_a_cell_in_a_local_store(finished: Path, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    cell, uri = cell_of(finished), f"sqlite:///{tmp_path / 'mlflow.db'}"
    for _ in range(2):
        MLflow(uri, "tests").log(cell)
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["schedule.epochs"] == "3"
    assert run.data.metrics["rmse"] == pytest.approx(cell.scores["rmse"])
    assert run.data.metrics["marginal_loglik/val"] == pytest.approx(cell.scores["marginal_loglik@val"])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/loss/member1")] == [1, 2, 3]
    assert client.list_artifacts(run.info.run_id, "figures")


@needs("wandb")
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_writes_an_offline_run(finished: Path) -> None:
    from bnn_runner.loggers.wandb import WeightsAndBiases

    WeightsAndBiases("tests", "offline").log(cell_of(finished))
    assert list(finished.glob("wandb/offline-run-*/*.wandb"))


def test_a_failing_logger_ends_no_run(finished: Path) -> None:
    """Planted bug: the service's exception goes through."""

    class Broken(NoLogger):
        def log(self, cell: LoggedCell) -> None:
            raise ConnectionError("no route to host\nat all")

    (done,) = finished.glob("runs/*/*/*/*/DONE")
    problem = log_finished(Broken(), done.parent, finished)
    assert problem is not None and "(ConnectionError: no route to host)" in problem and "cell itself is" in problem
    assert log_finished(NoLogger(), done.parent, finished) is None


def test_a_missing_package_is_reported_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else known(name, *more)
    )
    with pytest.raises(UserError, match=r"pip install 'bnn-runner\[wandb\]'"):
        load_experiment([*SMALL, "logger=wandb"])
    with pytest.raises(UserError, match="one of online, offline, disabled"):
        load_experiment([*SMALL, "logger=wandb", "logger.mode=on"])


def test_a_logger_changes_no_key() -> None:
    from bnn_runner.config.keys import cell_hash

    plain = load_experiment(SMALL)
    other = load_experiment([*SMALL, "logger=none"])
    assert cell_hash(plain.config, False, True) == cell_hash(other.config, False, True)
    assert "logger" in plain.config
