"""v* by Newton steps, each by preconditioned conjugate gradients, with a bound on what is left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bnn_runner.base import Likelihood
from bnn_runner.curvature.base import WeightGaussian
from bnn_runner.laplace.sampled_rows import SampledRows
from bnn_runner.laplace.tangent_state import State, TangentOptimum, dual_gap, gradient_gap

Applied = Callable[[Tensor], Tensor]
STEP_TOLERANCE = 0.1
"""Relative residual of a Newton step, in the preconditioned norm; smaller near the optimum."""


class Passes(Protocol):
    """Passes over the training set of a tangent model."""

    passes: float
    likelihood: Likelihood

    @property
    def rounding(self) -> float: ...

    def state(self, v: Tensor, precisions: Tensor) -> State: ...

    def curvature_product(self, outputs: Tensor, direction: Tensor, precisions: Tensor) -> tuple[Tensor, Tensor]: ...

    def preconditioner(self, outputs: Tensor, precisions: Tensor) -> SampledRows | None: ...


@dataclass(frozen=True)
class _Step:
    """x ≈ −(H + Λ)⁻¹g [P], with J x [N, K] and H x [P]."""

    direction: Tensor
    moved: Tensor
    bent: Tensor


def newton(
    model: Passes,
    precisions: Tensor,
    start: Tensor,
    tolerance: float,
    max_passes: float,
    guess: WeightGaussian | None = None,
    enough: float = 0.0,
) -> TangentOptimum:
    """v* by Newton steps until the relative gradient is `tolerance`, or the gap at most `enough` nats.

    With the full curvature and Gaussian noise it takes one step, which is the closed form
    (H + Λ)⁻¹JᵀB(y − f + Jw*).

    Args:
        model: the tangent model.
        precisions: the diagonal of Λ, [P]; a weight where it is 0 is held.
        start: first v [P].
        tolerance: stop where ‖∇L_h‖ is this fraction of the sum of its parts' norms (data, prior).
        max_passes: most passes over the data.
        guess: the preconditioner Σ ≈ (H + Λ)⁻¹, for which the full curvature is a good one; None samples rows of H at
            every step (see `sampled_rows`). Kronecker factors and diagonals are no good ones: on trained networks they
            needed more steps than the prior.
        enough: nats.
    """
    spent, v = model.passes, start
    at = model.state(v, precisions)
    lowest = at.value - gradient_gap(at.gradient, precisions)  # what L_h cannot fall below
    while at.ratio > tolerance and max(at.value - lowest, 0.0) >= enough and model.passes - spent < max_passes:
        applied = _preconditioner(model, at, precisions, guess)
        step = _newton_step(
            model, at, precisions, applied, min(STEP_TOLERANCE, math.sqrt(at.ratio)), spent + max_passes
        )
        left = dual_gap(model.likelihood, at.outputs, step.moved, at.gradient, step.bent, precisions)
        lowest = max(lowest, at.value - left)
        length = 1.0
        while True:
            tried = model.state(v + length * step.direction, precisions)
            slope = float(at.gradient @ step.direction)
            lower = tried.value <= at.value + 1e-4 * length * slope + 1e-12 * abs(at.value)
            if lower or length < 1e-6 or model.passes - spent >= max_passes:
                break
            length /= 2
        if not lower:
            break
        v, at = v + length * step.direction, tried
        lowest = max(lowest, at.value - gradient_gap(at.gradient, precisions))
    by_value = max(at.value - lowest, model.rounding * abs(at.value))
    gap = min(by_value, gradient_gap(at.gradient, precisions))
    return TangentOptimum(v, at.loglik, at.ratio, gap, model.passes - spent)


def _preconditioner(model: Passes, at: State, precisions: Tensor, guess: WeightGaussian | None) -> Applied:
    free = precisions > 0
    if guess is not None:
        return lambda vector: torch.where(free, guess.product(vector.unsqueeze(0))[0], 0)
    rows = model.preconditioner(at.outputs, precisions)
    if rows is not None:
        return rows.product
    variances = torch.where(free, 1 / precisions, 0)
    return lambda vector: variances * vector


def _newton_step(
    model: Passes, at: State, precisions: Tensor, applied: Applied, tolerance: float, last: float
) -> _Step:
    """−(JᵀBJ + Λ)⁻¹ g at h, to a relative residual of `tolerance` in the preconditioned norm."""
    solution, residual, moved = torch.zeros_like(at.gradient), -at.gradient, torch.zeros_like(at.outputs)
    preconditioned = applied(residual)
    direction, size = preconditioned, float(residual @ preconditioned)
    first = size
    while size > tolerance**2 * first and (model.passes < last or not bool(solution.any())):
        product, along = model.curvature_product(at.outputs, direction, precisions)
        alpha = size / float(direction @ product)
        solution, residual = solution + alpha * direction, residual - alpha * product
        moved = moved + alpha * along
        preconditioned = applied(residual)
        before, size = size, float(residual @ preconditioned)
        direction = preconditioned + (size / before) * direction
    return _Step(solution, moved, -at.gradient - residual - precisions * solution)
