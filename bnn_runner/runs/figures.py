"""The figures of a finished cell, drawn from its evaluation and from the posterior on a grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.base import Network, Posterior
from bnn_runner.evaluation.evaluate import evaluate_split
from bnn_runner.experiment import Experiment
from bnn_runner.report.figures import run_figures
from bnn_runner.rng import derive_seed
from bnn_runner.scoring import Evaluation, Score, SplitEvaluation
from bnn_runner.tasks import Split, Task


def draw_figures(
    folder: Path,
    task: Task,
    posterior: Posterior,
    experiment: Experiment,
    evaluation: Evaluation,
    scores: Sequence[Score],
    networks: Sequence[Network],
    failed: Callable[[str], None],
) -> list[Path]:
    """Draws all figures that apply into folder/figures; they show the same draws that were scored.

    Args:
        folder: The folder of the cell.
        task: The data.
        posterior: The fitted posterior.
        experiment: The experiment of the cell.
        evaluation: The evaluation of the posterior.
        scores: The scores.
        networks: The trained networks, for their histories.
        failed: Called with a note for every figure that could not be drawn.

    Returns:
        The files.
    """
    settings = experiment.settings.eval
    seed = experiment.settings.seed
    device, dtype = task.train.inputs.device, torch.float32

    def predict_on(x: Tensor) -> SplitEvaluation:
        grid = Split(x.to(device, dtype), None, torch.arange(len(x)))
        scored = evaluate_split(
            task,
            posterior,
            grid,
            experiment.method.predictive,
            settings.num_draws,
            derive_seed(seed, "posterior"),
            settings.batch_size,
            temperature=evaluation.temperature,
        )
        return scored.test

    return run_figures(folder, task, evaluation, scores, [n.history for n in networks], predict_on, failed)


def redraw_figures(
    folder: Path, task: Task, evaluation: Evaluation, scores: Sequence[Score], failed: Callable[[str], None]
) -> list[Path]:
    """Draws the figures again that depend only on evaluation and scores; the others stay. Returns the files."""
    return run_figures(folder, task, evaluation, scores, [], None, failed)
