import math

import pytest
import torch

from bnn_runner.report.figures import run_figures
from bnn_runner.scoring import Evaluation, Score, SplitEvaluation
from bnn_runner.tasks import Split, Task, TaskSpec

DRAWS = 8
HISTORY = [{"epoch": e + 1, "loss": 2.0 / (e + 1), "nll": 1.0 / (e + 1), "lr": 0.1} for e in range(5)]


def _split(x, y):
    return Split(x, y, torch.arange(len(x)))


def _task(kind, inputs, truth=None):
    x = torch.linspace(-1, 1, 40).reshape(-1, 1).expand(-1, inputs) * torch.linspace(1.0, -1.5, inputs)
    y = torch.sin(3 * x[:, :1]) if kind == "regression" else (x[:, 0] > 0).long()
    split = _split(x, y)
    far = _split(x * 2, None)
    spec = TaskSpec("made", kind, (inputs,), 1 if kind == "regression" else 2, 0.1)
    one = torch.ones(1)
    scale = {"input_mean": torch.full((inputs,), 3.0), "input_scale": torch.full((inputs,), 2.0)}
    return Task(spec, split, split, split, {"far": far}, "", 5 * one, 10 * one, truth=truth, **scale)


def _predict(task):
    slopes = torch.linspace(0.5, 1.5, DRAWS)

    def regression(x):
        means = 5 + 10 * torch.sin(3 * slopes[:, None] * x[:, 0])[..., None]
        return SplitEvaluation(torch.arange(len(x)), means=means, variances=torch.ones(1, 1, 1))

    def classes(x):
        logits = torch.stack([0 * x[:, 0], x[:, 0]], -1) * slopes[:, None, None] * 4
        p = torch.softmax(logits, -1)
        entropy = -(p * p.log()).sum(-1).mean(0)
        return SplitEvaluation(torch.arange(len(x)), mean_probs=p.mean(0), mean_entropy=entropy)

    return regression if task.spec.kind == "regression" else classes


def _evaluation(task):
    predict = _predict(task)
    splits = {}
    for name, split in task.splits().items():
        found = predict(split.inputs)
        targets = split.targets
        if targets is not None and task.spec.kind == "regression":
            targets = 5 + 10 * targets
        fields = {k: v for k, v in vars(found).items() if k not in ("ids", "targets")}
        splits[name] = SplitEvaluation(split.ids, targets=targets, **fields)
    return Evaluation(task.spec.kind, "draws", False, True, torch.zeros(DRAWS), splits)


def _scores():
    fields = {"better": "higher", "unit": "nats per block", "n": 10}
    scores = []
    for tau in (1, 5, 10):
        status = "ok" if tau < 10 else "not converged"
        scores.append(Score("joint_loglik", -1.0 * tau, 0.1 * tau, tau=tau, draws=DRAWS, status=status, **fields))
        for s in (2, 4, 8):
            scores.append(Score("joint_loglik_at_draws", -1.5 * tau, 0.1, tau=tau, draws=s, **fields))
        scores.append(Score("joint_loglik_effective_draws", 4.0, 0.1, tau=tau, draws=DRAWS, **fields))
    return scores


@pytest.mark.parametrize(
    ("kind", "inputs", "names"),
    [
        ("regression", 1, ["bands", "joint", "training"]),
        ("regression", 6, ["predictions", "joint", "training"]),
        ("classification", 2, ["decision", "reliability", "joint", "training"]),
        ("classification", 5, ["reliability", "joint", "training"]),
    ],
)
def test_every_kind_gets_its_figures(tmp_path, is_picture, kind, inputs, names):
    task = _task(kind, inputs, truth=lambda x: 5 + 10 * torch.sin(3 * (x - 3) / 2) if inputs == 1 else None)
    cell = tmp_path / "runs/made/mlp/laplace/0-abcdef12"
    files = run_figures(cell, task, _evaluation(task), _scores(), [HISTORY, HISTORY], _predict(task))
    assert [f.stem for f in files] == names
    assert all(f.parent == cell / "figures" and is_picture(f) for f in files)
    assert {p.name for p in (cell / "figures").iterdir()} == {f"{n}.png" for n in names}


def test_grid_reaches_the_network_in_its_own_units(tmp_path):
    """Plant: hand original units to the network; with mean 3 and scale 2 the grid would be elsewhere."""
    task = _task("regression", 1)
    seen = []

    def predict(x):
        seen.append(x)
        return _predict(task)(x)

    run_figures(tmp_path / "made/mlp/map/0-ab", task, _evaluation(task), [], [], predict)
    (x,) = seen
    assert x.dtype == task.train.inputs.dtype
    assert float(x.min()) == pytest.approx(-2 - 0.12 * 4, abs=1e-5)  # the far set is twice as wide as the data
    assert float(x.max()) == pytest.approx(2 + 0.12 * 4, abs=1e-5)


def test_nothing_to_draw_is_no_crash(tmp_path):
    task = _task("regression", 1)
    broken = _evaluation(task)
    nan = torch.full((DRAWS, 300, 1), math.nan)

    def predict(x):
        return SplitEvaluation(torch.arange(len(x)), means=nan, variances=torch.ones(1, 1, 1))

    assert run_figures(tmp_path / "made/mlp/map/0-ab", task, broken, [], [[]], predict) == []
