"""Recorded and generated recorded_curves, bundled tables and UCI classes: what is read, and how it is split."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from bnn_runner.data import recorded_curves, uci_classes
from bnn_runner.data.bundled import Bundled
from bnn_runner.data.recorded_curves import RecordedCurve, beyond
from bnn_runner.data.synthetic_curves import CURVES, MadeCurve
from bnn_runner.data.uci_classes import UCIClassification
from bnn_runner.errors import UserError
from bnn_runner.tasks import Task

ALL = {"val_fraction": 0.1, "train_size": None, "test_size": None}


def files() -> Path:
    if "BNN_DATA_DIR" not in os.environ:
        pytest.skip("BNN_DATA_DIR is not set")
    return Path(os.environ["BNN_DATA_DIR"])


def original(task: Task, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a split in original units."""
    split = task.splits()[part]
    assert task.input_mean is not None and task.input_scale is not None and split.targets is not None
    return split.inputs * task.input_scale + task.input_mean, split.targets * task.target_scale + task.target_mean


@pytest.mark.parametrize("name", recorded_curves.SETS)
def test_recorded_curves_are_the_published_points(name: str) -> None:
    """Catches: columns exchanged, rows lost, targets in other units."""
    folder = files()
    task = RecordedCurve(name=name, test_fraction=0.25, **ALL).load(folder, 0)
    pairs = [torch.cat(original(task, part), 1) for part in ("train", "val", "test")]
    points = torch.cat(pairs)
    recorded = recorded_curves.SETS[name]
    assert len(points) == recorded.rows
    published = torch.from_numpy(recorded.read(folder / recorded.source.folder)).float()
    ids = torch.cat([task.train.ids, task.val.ids, task.test.ids])
    torch.testing.assert_close(points, published[ids], rtol=1e-4, atol=1e-3)
    assert len(task.test) == round(0.25 * recorded.rows)


def test_co2_leaves_out_the_weeks_without_a_measurement_and_counts_years() -> None:
    task = RecordedCurve(name="co2", test_fraction=0.25, **ALL).load(files(), 0)
    years = torch.cat([original(task, part)[0] for part in ("train", "val", "test")])
    assert 1958 < float(years.min()) < 1959 and 2001 < float(years.max()) < 2002
    assert any("59 of 2284" in note for note in task.notes)


def test_points_beyond_the_data_lie_in_the_gap_and_outside() -> None:
    """Catches: the gap of the sorted points taken for one between unsorted ones; far points inside."""
    x = torch.cat([torch.linspace(2, 4, 50), torch.linspace(-3, -1, 50)]).double()
    found = beyond(x)
    assert ((found["gap"] > -1) & (found["gap"] < 2)).all() and len(found["gap"]) == 100
    assert ((found["far"] < -3) | (found["far"] > 4)).all()
    assert "gap" not in beyond(torch.linspace(0, 1, 100).double())


@pytest.mark.parametrize("name", CURVES)
def test_made_curves_scatter_around_their_truth_with_the_stated_noise(name: str) -> None:
    """Five standard errors of the standard deviation. Noise inside is multiplied by the slope (it is small, so the
    curve is a line over its width, but where the slope vanishes)."""
    sizes = ALL | {"val_fraction": 0}
    task = MadeCurve(name=name, num_train=4000, num_test=10, noise=1e-3, **sizes).load(Path(), 0)
    x, y = original(task, "train")
    assert task.truth is not None
    x = x.double().requires_grad_()
    truth = task.truth(x)
    z = (y - truth.detach()).flatten() / 1e-3
    if CURVES[name].noise_inside:
        (slope,) = torch.autograd.grad(truth.sum(), x)
        steep = slope.abs().flatten() > 1
        z = (z / slope.flatten())[steep]
    assert len(z) > 1000 and abs(float(z.std()) - 1) < 5 / math.sqrt(2 * len(z))
    assert float(x.detach().min()) >= CURVES[name].low - 1e-4 and float(x.detach().max()) <= CURVES[name].high + 1e-4


@pytest.mark.parametrize(("name", "rows"), [("wine", 178), ("breast_cancer", 569), ("diabetes", 442)])
def test_bundled_tables_are_whole_and_stratified(name: str, rows: int) -> None:
    task = Bundled(name=name, test_fraction=0.25, **ALL).load(Path("/nonexistent"), 3)
    assert len(task.train) + len(task.val) + len(task.test) == rows
    assert len(task.feature_names) == task.spec.input_shape[0]
    if task.spec.kind == "classification":
        assert len(task.class_names) == task.spec.num_outputs
        assert task.train.targets is not None and task.test.targets is not None
        halves = (task.train.targets, task.test.targets)
        shares = [torch.bincount(t, minlength=task.spec.num_outputs) / len(t) for t in halves]
        assert float((shares[0] - shares[1]).abs().max()) < 0.03


@pytest.mark.parametrize("name", uci_classes.SETS)
def test_uci_classes_are_the_published_rows_with_labels_from_zero(name: str) -> None:
    """Catches: labels 1 and 2 kept (class 2 is out of range); the class column among the inputs; no stratification."""
    published = uci_classes.SETS[name]
    task = UCIClassification(name=name, test_fraction=0.15, **(ALL | {"val_fraction": 0.1765})).load(files(), 0)
    sizes = [len(task.train), len(task.val), len(task.test)]
    assert sum(sizes) == published.rows
    assert [round(s / published.rows, 2) for s in sizes] == pytest.approx([0.7, 0.15, 0.15], abs=0.011)
    assert task.spec.input_shape == (published.features,)
    labels = torch.cat([s.targets for s in (task.train, task.val, task.test) if s.targets is not None])
    assert labels.unique().tolist() == list(range(published.classes))
    if name == "banana":
        assert task.class_names == ("1", "2") and any("1 is class 0, 2 is class 1" in n for n in task.notes)


def test_absent_and_wrong_files_are_reported_with_name_place_and_source(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"missing train_inputs.*widedeepnetworks"):
        RecordedCurve(name="snelson", test_fraction=0.25, **ALL).load(tmp_path, 0)
    with pytest.raises(UserError, match=r"missing X.txt, Y.txt.*BNN-predictions"):
        UCIClassification(name="glass", test_fraction=0.15, **ALL).load(tmp_path, 0)
    folder = tmp_path / "UCI_Classification" / "glass"
    folder.mkdir(parents=True)
    (folder / "X.txt").write_text("1 2 3\n")
    (folder / "Y.txt").write_text("0\n")
    with pytest.raises(UserError, match=r"X\.txt is damaged or another version"):
        UCIClassification(name="glass", test_fraction=0.15, **ALL).load(tmp_path, 0)
    (tmp_path / "co2").mkdir()
    (tmp_path / "co2" / "co2.csv").write_text("date,co2\n")
    with pytest.raises(UserError, match="is damaged"):
        RecordedCurve(name="co2", test_fraction=0.25, **ALL).load(tmp_path, 0)
    for wrong in (0, 1, 1.5, True):
        with pytest.raises(UserError, match=r"data\.test_fraction"):
            Bundled(name="wine", test_fraction=wrong, **ALL).spec()
