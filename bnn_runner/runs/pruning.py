"""Pruning of a factorised Gaussian posterior by signal-to-noise ratio: scores and figure (Blundell et al. 2015)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bnn_runner.evaluation.evaluate import evaluate_split
from bnn_runner.metrics.marginal import Marginal
from bnn_runner.report import style
from bnn_runner.report.looks import look
from bnn_runner.scoring import SplitEvaluation
from bnn_runner.tasks import Task
from bnn_runner.variational.posterior import MeanField

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Pruned:
    """One row: `removed_percent` of the weights that have a standard deviation; scores on the test set.

    `error` is the share of wrong classes in percent, or the root mean squared error in target units; `cost` the error
    minus that with all weights, with the standard error of the difference over the same points; `loglik` the mean
    marginal log-likelihood in nats per point, with its standard error.
    """

    removed_percent: float
    weights_left: int
    error: float
    error_standard_error: float
    cost: float
    cost_standard_error: float
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
    found: dict[float, Pruned] = {}
    whole, whole_parts = 0.0, torch.zeros(0)
    for percent in dict.fromkeys([0.0, *percents]):
        left = posterior.pruned(percent / 100)
        removed = sum(int((s == 0).sum()) for s in left.sigmas.values())
        evaluation = evaluate_split(task, left, task.test, "draws", num_draws, seed, batch_size)
        marginal = next(s for s in Marginal()(evaluation, seed) if s.metric == "marginal_loglik")
        error, parts = _error(evaluation.test)
        if percent == 0:
            whole, whole_parts = error, parts
        found[percent] = Pruned(
            percent,
            posterior.network.num_parameters - removed,
            error,
            _standard_error(parts),
            error - whole,
            _standard_error(parts - whole_parts),
            marginal.value,
            marginal.standard_error,
        )
    return [found[percent] for percent in percents]


def _error(test: SplitEvaluation) -> tuple[float, Tensor]:
    """The error, and each point's part [N] of its variation: the error's standard error is sd(parts)/√N."""
    assert test.targets is not None
    if test.mean_probs is not None:
        wrong = 100 * (test.mean_probs.argmax(-1) != test.targets).double()
        return float(wrong.mean()), wrong
    assert test.means is not None
    squares = (test.means.double().mean(0) - test.targets).square().mean(-1)
    error = float(squares.mean().sqrt())
    return error, squares / (2 * max(error, 1e-300))


def _standard_error(parts: Tensor) -> float:
    return float(parts.std() / math.sqrt(len(parts)))


def markdown(rows: Sequence[Pruned], error_name: str) -> str:
    """The rows as a Markdown table."""
    lines = [
        f"| removed % | weights left | {error_name} | above all weights | log-likelihood, nats per point |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        cost = f"{r.cost:.2g} ± {r.cost_standard_error:.2g}" if r.removed_percent else ""
        lines.append(
            f"| {r.removed_percent:g} | {r.weights_left:,} | {r.error:.3g} ± {r.error_standard_error:.2g} "
            f"| {cost} | {r.loglik:.4g} ± {r.loglik_standard_error:.2g} |"
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
