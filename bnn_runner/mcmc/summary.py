"""Summary of chains for the row: mixing in function space, function diversity, and notes where either is poor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bnn_runner.base import FitReport
from bnn_runner.mcmc.diagnostics import FEWEST, effective_draws, rhat
from bnn_runner.mcmc.target import LogPosterior
from bnn_runner.posteriors.function_diversity import diversity_notes, function_diversity

RHAT_LIMIT = 1.1
MOST_RHAT = 1000.0
"""Reported for chains that do not move at all, whose R-hat is infinite."""


@torch.no_grad()
def functions(target: LogPosterior, weights: Tensor, x: Tensor) -> Tensor:
    """Outputs [L, M, B, K] of draws [L, M, P] at points [B, ...]."""
    lanes, count, _ = weights.shape
    inputs = x.expand(lanes, *x.shape)
    return torch.stack([target.outputs(weights[:, m].to(target.dtype), inputs) for m in range(count)], 1).double()


def summarise(target: LogPosterior, weights: Tensor, x: Tensor, classes: bool, remedy: str) -> FitReport:
    """R-hat and effective draws of the functions at points x, their diversity, and notes.

    `rhat` is the largest over points and outputs (or log-probabilities of classes) and `ess` the smallest, each with
    its median.

    Args:
        target: evaluates the functions.
        weights: draws [L, M, P].
        x: points [B, ...].
        classes: whether outputs are logits.
        remedy: ends the note on chains that have not mixed.
    """
    outputs = functions(target, weights, x)
    diversity = function_diversity(outputs.flatten(0, 1), target.likelihood)
    values = (outputs.log_softmax(-1) if classes else outputs).flatten(2)
    mixing, effective = rhat(values).clamp_max(MOST_RHAT), effective_draws(values)
    worst = _or_none(mixing.nan_to_num(-1).max())
    facts: dict[str, Any] = {
        "chains": weights.shape[0],
        "draws_kept": weights.shape[0] * weights.shape[1],
        "rhat": worst,
        "rhat_median": _or_none(mixing.nanmedian()),
        "ess": _or_none(effective.nan_to_num(float("inf")).min()),
        "ess_median": _or_none(effective.nanmedian()),
        "function_diversity": diversity,
    }
    advice = "Raise method.step, or the length of the chains."
    notes = diversity_notes(diversity, target.likelihood, "the chains have", advice)
    if weights.shape[1] < FEWEST:
        notes.append(f"R-hat and effective draws require {FEWEST} draws per chain; there are {weights.shape[1]}")
    elif worst is not None and worst > RHAT_LIMIT:
        notes.append(
            f"the chains have not mixed: the largest R-hat in function space is {worst:.2f} (median "
            f"{facts['rhat_median']:.2f}; it should be below {RHAT_LIMIT:g}), and the fewest effective draws are "
            f"{facts['ess']:.0f}. {remedy}"
        )
    return FitReport(facts, tuple(notes))


def _or_none(value: Tensor) -> float | None:
    number = float(value)
    return number if number == number and 0 <= number < float("inf") else None
