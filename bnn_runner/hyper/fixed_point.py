"""`hyper=fixed_point`: MacKay's re-estimation of the precisions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from bnn_runner.base import Choice, HyperStatus, PrecisionProblem
from bnn_runner.errors import raise_all
from bnn_runner.hyper.monte_carlo_error import dimension_errors
from bnn_runner.hyper.tied_precisions import (
    Family,
    Noise,
    at_bound,
    for_each_weight,
    inside,
    mean_by,
    range_problems,
    sum_by,
    tied,
    tolerance_problems,
)


@dataclass(frozen=True)
class FixedPoint:
    """MacKay's re-estimation λ_g ← γ_g / ‖w*_g‖² with γ_g = Tr_g H (H + Λ)⁻¹, until no λ moves (MacKay 1992).

    Where it settles the derivative of the evidence in every log λ_g, ½ (γ_g − λ_g ‖w*_g‖²), is zero, so it is
    a stationary point of what `Evidence` climbs. family and noise as there. A λ that runs to `low` or `high`,
    or meets a value that is not finite, says so and keeps its start value.
    """

    family: Family = "isotropic"
    noise: Noise = "trained"
    steps: int = 200
    tolerance: float = 1e-6
    low: float = 1e-6
    high: float = 1e8
    needs_validation: ClassVar[bool] = False
    cites: ClassVar[tuple[str, ...]] = ("mackay1992",)

    def __post_init__(self) -> None:
        problems = range_problems(self.low, self.high, self.steps)
        problems += tolerance_problems(self.tolerance)
        raise_all(problems)

    def choose(self, problem: PrecisionProblem) -> Choice:
        if self.family == "parameter":
            return for_each_weight(problem, "fixed_point", self.steps, self.tolerance, self.low, self.high)
        ties = tied(problem, self.family)
        initial = mean_by(inside(problem.start, self.low, self.high).log(), ties).exp()
        precisions, free = initial.clone(), torch.ones(len(initial), dtype=torch.bool)
        notes: list[str] = []
        change, iteration = math.inf, 0
        while iteration < self.steps and change > self.tolerance and bool(free.any()):
            iteration += 1
            dimensions, squares = self._terms(problem, precisions[ties], ties)
            moved = torch.where(free, dimensions / squares, precisions)
            if bool(moved.isnan().any()):
                note = "hyper=fixed_point: a precision became NaN; every precision keeps its start value"
                return Choice(initial[ties], "diverged", {"hyper_iterations": iteration}, (note,))
            stuck = free & ((moved <= self.low) | (moved >= self.high))
            if bool(stuck.any()):
                notes.append(at_bound("fixed_point", problem, stuck[ties]))
                free &= ~stuck
                moved = torch.where(stuck, initial, moved)
            change = float((moved / precisions).log().abs().max())
            precisions = moved
        dimensions, squares = self._terms(problem, precisions[ties], ties)
        gradient = 0.5 * (dimensions - precisions * squares)
        status: HyperStatus = "converged" if bool(free.all()) else "at bound"
        if change > self.tolerance and bool(free.any()):
            status = "not converged"
            notes.append(
                f"hyper=fixed_point: the precisions still move by {change:.2g} of a logarithm after {iteration} steps;"
                " raise hyper.steps"
            )
        largest = float(gradient[free].abs().max()) if bool(free.any()) else 0.0
        facts: dict[str, Any] = {"hyper_iterations": iteration, "hyper_gradient": largest}
        if problem.dimension_samples is not None:
            errors, unsure = dimension_errors(problem.dimension_samples(precisions[ties]), ties, problem.names)
            facts, notes = facts | errors, [*notes, *unsure]
        return Choice(precisions[ties], status, facts, tuple(notes))

    @staticmethod
    def _terms(problem: PrecisionProblem, precisions: Tensor, ties: Tensor) -> tuple[Tensor, Tensor]:
        """Effective dimension and squared norm of each variable's weights, at precisions [T]."""
        return sum_by(problem.effective_dimensions(precisions), ties), sum_by(problem.squares(precisions), ties)
