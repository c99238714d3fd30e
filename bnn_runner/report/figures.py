"""The figures of a finished run, and the numbers they take from the task and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bnn_runner.evaluation.predictive import log_weights, mixture_mean, pit, variance_parts
from bnn_runner.report import style
from bnn_runner.report.calibration_figures import predicted_and_pit, reliability
from bnn_runner.report.curve_figures import History, joint_curves, shift_curves, training_curves
from bnn_runner.report.drawing import attempt
from bnn_runner.report.looks import look
from bnn_runner.report.predictive_figures import bands_1d, decision_map_2d
from bnn_runner.scoring import Evaluation, Score, SplitEvaluation
from bnn_runner.tasks import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Standardised network inputs [M, D] to what evaluation says of a split, without targets and ids of use:
# regression `means` [S, M, K] and `variances` (and `epistemic` of a closed form), original units; classes
# `mean_probs` [M, K] and `mean_entropy` [M]. The draws are those of the evaluation.
PredictOn = Callable[[Tensor], SplitEvaluation]
Array = NDArray[np.floating]

GRID_1D = 300
GRID_2D = 80
_MARGIN = 0.12


def run_figures(
    cell_folder: Path,
    task: Task,
    evaluation: Evaluation,
    scores: Sequence[Score],
    histories: Sequence[History],
    predict_on: PredictOn | None,
    failed: Callable[[str], None] | None = None,
) -> list[Path]:
    """Draw every figure that applies into `cell_folder`/figures; returns the files, the most interesting first.

    1-D regression: bands.png. Other regression: predictions.png. Classes: reliability.png, and with two
    inputs decision.png; with shifted test points shift.png. Also, if there is something to show:
    training.png (`histories`: one list of rows for each trained network) and joint.png. `predict_on` None
    leaves the first kinds out. If a figure cannot be drawn, `failed` gets a note, and the others are drawn; without
    `failed` the error is raised.
    """
    title = " · ".join(cell_folder.parts[-4:-1]) + f" · seed {cell_folder.name.split('-')[0]}"
    figures, tone = cell_folder / "figures", look(cell_folder.parts[-2]).colour
    weights = log_weights(evaluation)
    drawings: dict[str, Callable[[], Figure | None]] = {}
    if task.spec.kind == "regression":
        if task.spec.input_shape == (1,) and predict_on is not None:
            drawings["bands"] = lambda: _bands(task, predict_on, weights, title, tone)
        elif evaluation.test.targets is not None and len(evaluation.test.ids):
            drawings["predictions"] = lambda: _predictions(evaluation.test, weights, title, tone)
    else:
        if task.spec.input_shape == (2,) and predict_on is not None:
            drawings["decision"] = lambda: _decision(task, predict_on, title)
        drawings["reliability"] = lambda: _reliability(evaluation, title, tone)
    drawings["shift"] = lambda: shift_curves(scores, title, tone)
    drawings["joint"] = lambda: joint_curves(scores, title, tone)
    drawings["training"] = lambda: training_curves(histories, title, tone)
    written = []
    for name, drawing in drawings.items():

        def draw(drawing: Callable[[], Figure | None] = drawing, path: Path = figures / f"{name}.png") -> Path | None:
            figure = drawing()
            return None if figure is None else style.save(figure, path)

        if failed is None:
            path = draw()
        else:
            path, note = attempt(f"{name}.png", draw)
            if note:
                failed(note)
        written += [] if path is None else [path]
    return written


def predictive_moments(split: SplitEvaluation, log_weight: Tensor) -> tuple[Array, Array | None, Array]:
    """Mean [N, K] of y, its epistemic variance [N, K] (None of one function) and its total variance [N, K]."""
    assert split.means is not None
    aleatoric, epistemic = variance_parts(split, log_weight)
    known = len(split.means) > 1 or split.epistemic is not None
    mean = mixture_mean(split.means, log_weight)
    return _array(mean), _array(epistemic) if known else None, _array(aleatoric + epistemic)


def _bands(task: Task, predict_on: PredictOn, weights: Tensor, title: str, tone: str) -> Figure | None:
    train, test = _points(task, "train"), _points(task, "test")
    ood = [_inputs(task, name) for name in task.splits() if name.startswith("ood/")]
    every = np.concatenate([train[0], test[0], *ood])[:, 0]
    reach = _MARGIN * max(float(np.ptp(every)), 1e-12)
    x = np.linspace(every.min() - reach, every.max() + reach, GRID_1D)
    found = predict_on(_network_inputs(task, x[:, None]))
    mean, epistemic, total = predictive_moments(found, weights)
    if not np.isfinite(mean).any():
        return None
    grid = torch.from_numpy(x[:, None]).to(torch.float64)
    truth = None if task.truth is None else _array(task.truth(grid))[:, 0]
    true_noise = None if task.true_noise is None else _array(task.true_noise(grid))[:, 0]
    assert found.means is not None and found.variances is not None
    varies = found.variances.shape[1] > 1 and found.epistemic is None
    noise = total if epistemic is None else total - epistemic
    return bands_1d(
        x,
        mean[:, 0],
        None if epistemic is None else np.sqrt(np.maximum(epistemic[:, 0], 0)),
        np.sqrt(np.maximum(total[:, 0], 0)),
        (train[0][:, 0], train[1]),
        (test[0][:, 0], test[1]),
        truth,
        _array(found.means)[..., 0],
        title,
        np.sqrt(np.maximum(noise[:, 0], 0)) if varies else None,
        true_noise,
        tone,
    )


def _decision(task: Task, predict_on: PredictOn, title: str) -> Figure:
    points, labels = _points(task, "train")
    low, high = points.min(0), points.max(0)
    reach = 0.35 * np.maximum(high - low, 1e-12)  # methods differ beyond the data
    x0, x1 = (np.linspace(low[d] - reach[d], high[d] + reach[d], GRID_2D) for d in (0, 1))
    grid = np.stack(np.meshgrid(x0, x1), axis=-1).reshape(-1, 2)
    found = predict_on(_network_inputs(task, grid))
    assert found.mean_probs is not None
    probs = _array(found.mean_probs)
    entropy = -(probs * np.log(np.maximum(probs, 1e-300))).sum(-1)
    information = None
    if found.mean_entropy is not None:
        information = np.maximum(entropy - _array(found.mean_entropy), 0).reshape(GRID_2D, GRID_2D)
    return decision_map_2d(
        x0,
        x1,
        probs.reshape(GRID_2D, GRID_2D, -1),
        information,
        entropy.reshape(GRID_2D, GRID_2D),
        points,
        labels.astype(int),
        task.class_names,
        title,
    )


def _reliability(evaluation: Evaluation, title: str, tone: str) -> Figure | None:
    test = evaluation.test
    if test.mean_probs is None or test.targets is None or not bool(torch.isfinite(test.mean_probs).all()):
        return None
    ood = {
        name: _array(split.mean_probs)
        for name, split in evaluation.splits.items()
        if name.startswith("ood/") and split.mean_probs is not None and len(split.mean_probs)
    }
    return reliability(_array(test.mean_probs), test.targets.cpu().numpy().astype(int), ood, title, tone)


def _predictions(test: SplitEvaluation, weights: Tensor, title: str, tone: str) -> Figure | None:
    if test.means is None or test.variances is None or test.targets is None:
        return None
    mean, _, total = predictive_moments(test, weights)
    if not np.isfinite(mean).all():
        return None
    target = _array(test.targets).reshape(mean.shape)[:, 0]
    if mean.shape[1] > 1:
        title += f" · output 1 of {mean.shape[1]}"
    transformed = _array(pit(test, weights))[:, 0]
    return predicted_and_pit(mean[:, 0], np.sqrt(np.maximum(total[:, 0], 0)), target, transformed, title, tone)


def _array(values: Tensor) -> Array:
    return values.detach().cpu().double().numpy()


def _inputs(task: Task, name: str) -> Array:
    """Inputs [N, D] of a split in original units."""
    split = task.splits()[name]
    x = _array(split.gather(torch.arange(len(split), device=split.inputs.device))[0])
    if task.input_mean is not None and task.input_scale is not None:
        x = _array(task.input_mean) + _array(task.input_scale) * x
    return x


def _points(task: Task, name: str) -> tuple[Array, Array]:
    """Inputs [N, D] and first target [N] (or classes) of a split, original units."""
    split = task.splits()[name]
    assert split.targets is not None
    y = _array(split.targets)
    if task.spec.kind == "regression":
        y = (_array(task.target_mean) + _array(task.target_scale) * y.reshape(len(split), -1))[:, 0]
    return _inputs(task, name), y


def _network_inputs(task: Task, x: Array) -> Tensor:
    """Network inputs from inputs [M, D] in original units, on the device and in the type of the data."""
    if task.input_mean is not None and task.input_scale is not None:
        x = (x - _array(task.input_mean)) / _array(task.input_scale)
    example, _ = task.train.gather(torch.zeros(1, dtype=torch.long, device=task.train.inputs.device))
    return torch.from_numpy(x).to(example.device, example.dtype)
