"""Pruning of a factorised Gaussian posterior by signal-to-noise ratio: scores and figure (Blundell et al. 2015)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bnn_runner.evaluation.evaluate import evaluate_split
from bnn_runner.metrics.marginal import Marginal
from bnn_runner.report import style
from bnn_runner.report.looks import look
from bnn_runner.tasks import Task
from bnn_runner.variational.posterior import MeanField

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Pruned:
    """One row: `removed_percent` of the weights that have a standard deviation; scores on the test set.

    `error` is the share of wrong classes in percent, or the root mean squared error in target units;
    `loglik` the mean marginal log-likelihood in nats per point, with its standard error.
    """

    removed_percent: float
    weights_left: int
    error: float
    error_standard_error: float
    loglik: float
    loglik_standard_error: float


def prune(
    task: Task, posterior: MeanField, percents: Sequence[float], num_draws: int, seed: int, batch_size: int
) -> list[Pruned]:
    """Scores of the posterior without its weights of the lowest |μ|/σ, whose mean and standard deviation become 0.

    Args:
        task: with the test points.
        posterior: to prune; it is not changed.
        percents: of the weights to remove, one row each.
        num_draws: draws per evaluation.
        seed: of the draws.
        batch_size: points pushed through the network at once.
    """
    rows = []
    for percent in percents:
        left = posterior.pruned(percent / 100)
        removed = sum(int((s == 0).sum()) for s in left.sigmas.values())
        evaluation = evaluate_split(task, left, task.test, "draws", num_draws, seed, batch_size)
        marginal = next(s for s in Marginal()(evaluation, seed) if s.metric == "marginal_loglik")
        test = evaluation.test
        assert test.targets is not None
        n = len(test.ids)
        if test.mean_probs is not None:
            wrong = (test.mean_probs.argmax(-1) != test.targets).double()
            error, error_se = 100 * float(wrong.mean()), 100 * float(wrong.std() / math.sqrt(n))
        else:
            assert test.means is not None
            squares = (test.means.double().mean(0) - test.targets).square().mean(-1)
            error = float(squares.mean().sqrt())
            error_se = float(squares.std() / math.sqrt(n)) / (2 * max(error, 1e-300))
        rows.append(
            Pruned(
                percent,
                posterior.network.num_parameters - removed,
                error,
                error_se,
                marginal.value,
                marginal.standard_error,
            )
        )
    return rows


def markdown(rows: Sequence[Pruned], error_name: str) -> str:
    """The rows as a Markdown table."""
    lines = [
        f"| removed % | weights left | {error_name} | log-likelihood, nats per point |",
        "| ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        lines.append(
            f"| {r.removed_percent:g} | {r.weights_left:,} | {r.error:.3g} ± {r.error_standard_error:.2g} "
            f"| {r.loglik:.4g} ± {r.loglik_standard_error:.2g} |"
        )
    return "\n".join(lines) + "\n"


def pruning_figure(
    rows: Sequence[Pruned], error_name: str, ratios: torch.Tensor, title: str, tone: str = look("bbb").colour
) -> Figure:
    """Error and log-likelihood against the proportion removed, and the distribution of |μ|/σ in decibels."""
    figure, (left, middle, right) = style.new_figure(columns=3, width=3.3, height=3.0)
    x = [r.removed_percent for r in rows]
    left.errorbar(x, [r.error for r in rows], [r.error_standard_error for r in rows], color=tone, marker="o")
    middle.errorbar(x, [r.loglik for r in rows], [r.loglik_standard_error for r in rows], color=tone, marker="s")
    decibels = 20 * torch.log10(ratios[ratios > 0].double().cpu())
    right.hist(decibels.numpy(), bins=60, color=style.GREY)
    for ax, y in ((left, error_name), (middle, "log-likelihood [nats per point]")):
        ax.set_xlabel("weights removed [%]")
        ax.set_ylabel(y)
    right.set_xlabel("|μ|/σ [dB]")
    right.set_ylabel("weights")
    style.title(figure, title)
    return figure
