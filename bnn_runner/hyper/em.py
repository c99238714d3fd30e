"""EM for the prior precisions: expected squares of the weights under the posterior, then the best prior for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bnn_runner.base import Choice, HyperStatus, PrecisionProblem
from bnn_runner.errors import raise_all
from bnn_runner.hyper.monte_carlo_error import dimension_errors
from bnn_runner.hyper.tied_precisions import at_bound, inside, mean_by, range_problems, sum_by, tied, tolerance_problems

LONGEST = 1e4
"""At most so many EM steps are leapt over at once."""


@dataclass(frozen=True)
class EM:
    """λ_g ← D_g / (‖w_g‖² + Tr_g Σ), with Σ = (H + Λ)⁻¹ and D_g weights (Dempster et al. 1977; Antorán et al. 2023).

    E step: Tr_g Σ = (D_g − γ_g)/λ_g, with γ_g = Tr_g H (H + Λ)⁻¹ exact, or the mean over posterior samples where
    the method has these (the same standard normals in every step, so that the steps have a limit). M step: closed
    form. Its fixed points are those of MacKay's γ_g / ‖w_g‖², which are the stationary points of the evidence; it
    has settled when no precision is further than `tolerance` of a logarithm from what that asks for. Plain EM creeps
    where data inform few weights (each step goes the share γ_g/D_g of the way), so each pair of steps is extrapolated
    (SQUAREM, Varadhan & Roland 2008, scheme S3). family: isotropic, layerwise or groupwise. A precision that
    runs to `low` or `high`, or becomes NaN, says so and keeps its start value. steps: E steps at most.
    """

    family: Literal["isotropic", "layerwise", "groupwise"] = "isotropic"
    steps: int = 1000
    tolerance: float = 1e-6
    low: float = 1e-6
    high: float = 1e8
    needs_validation: ClassVar[bool] = False
    cites: ClassVar[tuple[str, ...]] = ("dempster1977", "mackay1992")

    def __post_init__(self) -> None:
        problems = range_problems(self.low, self.high, self.steps)
        problems += tolerance_problems(self.tolerance)
        raise_all(problems)

    def choose(self, problem: PrecisionProblem) -> Choice:
        ties = tied(problem, self.family)
        initial = mean_by(inside(problem.start, self.low, self.high).log(), ties)
        free = torch.ones(len(initial), dtype=torch.bool)
        search = _Search(problem, ties)
        notes: list[str] = []
        logs = initial
        while bool(free.any()):
            logs, end = self._climb(search, initial, free)
            if end == "diverged":
                note = "hyper=em: a precision became NaN; every precision keeps its start value"
                return Choice(initial.exp()[ties], "diverged", {"hyper_iterations": search.count}, (note,))
            stuck = free & ((logs <= math.log(self.low)) | (logs >= math.log(self.high)))
            if not bool(stuck.any()):
                break
            notes.append(at_bound("em", problem, stuck[ties]))
            free &= ~stuck
            logs = torch.where(stuck, initial, logs)
        status: HyperStatus = "converged" if bool(free.all()) else "at bound"
        _, gap, gradient = search.step(logs)
        left = float(gap[free].abs().max()) if bool(free.any()) else 0.0
        if left > self.tolerance:
            status = "not converged"
            notes.append(
                f"hyper=em: a precision is still {left:.2g} of a logarithm from its fixed point after {search.count} "
                "steps; raise hyper.steps"
            )
        facts: dict[str, Any] = {
            "hyper_iterations": search.count,
            "hyper_gradient": float(gradient[free].abs().max()) if bool(free.any()) else 0.0,
            "em_e_step": "exact moments",
        }
        precisions = logs.exp()[ties]
        if problem.dimension_samples is not None:
            samples = problem.dimension_samples(precisions)
            errors, unsure = dimension_errors(samples, ties, problem.names)
            facts |= errors | {"em_e_step": f"{len(samples)} posterior samples"}
            notes += unsure
        return Choice(precisions, status, facts, tuple(notes))

    def _climb(
        self, search: _Search, start: Tensor, free: Tensor
    ) -> tuple[Tensor, Literal["stopped", "at bound", "diverged"]]:
        """Log precisions where no free one moves any more or the steps are spent (stopped), or one meets a bound."""
        low, high = math.log(self.low), math.log(self.high)

        def step(logs: Tensor) -> tuple[Tensor, Tensor]:
            moved, gap, _ = search.step(logs)
            return torch.where(free, moved, logs), torch.where(free, gap, 0.0)

        logs = start
        while True:
            first, gap = step(logs)
            if bool(first.isnan().any()):
                return start, "diverged"
            # Where w_g or γ_g is nothing at all, no finite precision is a fixed point.
            if bool(gap.isinf().any()):
                return torch.where(gap.isinf(), torch.where(gap > 0, high, low), logs), "at bound"
            if float(gap.abs().max()) <= self.tolerance or search.count >= self.steps:
                return logs, "stopped"
            second, _ = step(first)
            once, twice = first - logs, second - first
            bend = float((twice - once).norm())
            length = min(max(float(once.norm()) / bend, 1.0), LONGEST) if bend > 0 else 1.0
            leapt = (logs + 2 * length * once + length**2 * (twice - once)).clamp(low, high)
            third, _ = step(leapt)
            worse = float((third - leapt).norm()) > float(once.norm())
            logs = second if worse or bool(third.isnan().any()) else third.clamp(low, high)
            if bool((free & ((logs <= low) | (logs >= high))).any()):
                return logs, "at bound"


class _Search:
    """The EM step of a problem whose groups are tied, and how often it was made."""

    def __init__(self, problem: PrecisionProblem, ties: Tensor) -> None:
        self.problem, self.ties, self.count = problem, ties, 0
        self.sizes = sum_by(torch.tensor(problem.sizes, dtype=torch.float64), ties)

    def step(self, logs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """New log precisions; log of MacKay's precision over the present one; the evidence's gradient ½(γ − λ‖w‖²)."""
        self.count += 1
        each = logs.exp()[self.ties]
        dimensions = sum_by(self.problem.effective_dimensions(each), self.ties)
        squares = sum_by(self.problem.squares(each), self.ties)
        spread = (self.sizes - dimensions).clamp_min(0) / logs.exp()  # Tr_g Σ
        moved = self.sizes.log() - (squares + spread).log()
        gap = dimensions.log() - squares.log() - logs
        return moved, gap, 0.5 * (dimensions - logs.exp() * squares)
