"""points.npz: the points of a score, in an order that two cells share."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from bnn_runner.metrics.areas import roc_area
from bnn_runner.report.point_scores import read_points
from bnn_runner.runs.point_scores import write_points
from bnn_runner.scoring import Evaluation, Score, SplitEvaluation


def evaluation(ids, ood=(100, 101)):
    splits = {"test": SplitEvaluation(torch.tensor(ids)), "ood/far": SplitEvaluation(torch.tensor(ood))}
    return Evaluation("regression", "draws", True, True, torch.zeros(1), splits)


def test_points_are_in_the_order_of_their_ids(tmp_path: Path):
    """Planted bugs: the order of the file; blocks of two seeds taken for the same ones."""
    found = []
    for name, ids in (("a", [3, 1, 2]), ("b", [1, 2, 3]), ("c", [1, 2, 4])):
        folder = tmp_path / name
        folder.mkdir()
        points = torch.tensor([float(i) for i in ids])
        scores = [
            Score("rmse", 2.0, points=points),
            Score("joint_loglik", -1.0, tau=2, points=torch.tensor([-1.0])),
            Score("ood_auroc", 0.5, split="ood/far", points=torch.cat([points, torch.tensor([8.0, 9.0])])),
            Score("ece", 0.1),
        ]
        write_points(folder, scores, evaluation(ids), seed=0 if name == "a" else 1)
        found.append({k: read_points(folder, k) for k in ("rmse", "joint_loglik_tau2", "ood_auroc@ood/far", "ece")})
    a, b, c = found
    assert a["rmse"].values.tolist() == [1, 2, 3] and a["rmse"].units == b["rmse"].units != c["rmse"].units
    assert a["ood_auroc@ood/far"].values.tolist() == [1, 2, 3, 8, 9]
    assert a["ood_auroc@ood/far"].test_set == a["rmse"].test_set
    joint = "joint_loglik_tau2"
    assert a[joint].units != b[joint].units and a[joint].test_set == b[joint].test_set != c[joint].test_set
    assert a["ece"] is None


def test_contributions_to_an_area_have_its_error():
    """By 400 repeats: the standard deviation of the area is the mean of the errors; the mean of the points is it."""
    stream = torch.Generator().manual_seed(0)
    areas, errors = [], []
    for _ in range(400):
        low, high = torch.randn(40, generator=stream), torch.randn(60, generator=stream) + 0.8
        area, error, points = roc_area(low, high)
        assert math.isclose(area, float(points.mean()), rel_tol=1e-9)
        assert math.isclose(error, float(points.std()) / 10, rel_tol=0.15)
        areas.append(area)
        errors.append(error)
    assert math.isclose(float(torch.tensor(areas).std()), sum(errors) / 400, rel_tol=0.1)


def test_an_area_agrees_with_scikit_learn():
    from sklearn.metrics import roc_auc_score

    low, high = torch.tensor([0.0, 1.0, 1.0, 2.0]), torch.tensor([1.0, 3.0, 0.5])
    labels = [0] * 4 + [1] * 3
    assert math.isclose(roc_area(low, high)[0], roc_auc_score(labels, torch.cat([low, high]).numpy()))
