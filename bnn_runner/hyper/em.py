"""`hyper=em`: expected squares of the weights under the posterior, then the best prior for them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from bnn_runner.base import Choice, PrecisionProblem
from bnn_runner.errors import raise_all
from bnn_runner.hyper.runaway import hold, is_flat
from bnn_runner.hyper.search_end import SearchEnd, concluded, evidence_terms, spent
from bnn_runner.hyper.starts import best_start
from bnn_runner.hyper.tied_precisions import inside, mean_by, range_problems, sum_by, tied, tolerance_problems

LONGEST, MORE = 1e4, 4.0
"""Most EM steps that one extrapolation skips, and the factor by which it may grow after a successful one."""


@dataclass(frozen=True)
class EM:
    """λ_g ← D_g / (‖w_g‖² + Tr_g Σ), with Σ = (H + Λ)⁻¹ and D_g weights (Dempster et al. 1977; Antorán et al. 2023).

    E step: Tr_g Σ = (D_g − γ_g)/λ_g, with γ_g = Tr_g H (H + Λ)⁻¹ exact, or the mean over posterior samples where
    the method has them (the same standard normals in every step, so that the steps converge). M step: closed
    form. Its fixed points are those of MacKay's γ_g / ‖w_g‖², the stationary points of the evidence. Plain EM is slow
    where data determine few weights (a step covers the fraction γ_g/D_g of the remaining distance), so each pair of
    steps is extrapolated (SQUAREM, Varadhan & Roland 2008, scheme S3). Several λ start at the better of the best
    single one and the training prior. Whether the search has converged is decided by the evidence's gradient (see
    `search_end`); precisions that run away are held (see `runaway`).

    Attributes:
        family: one λ (isotropic), one per group of weights (layerwise), or one for each scale-invariant group and one
            for all others (groupwise).
        steps: most E steps.
        tolerance: distance of log λ from its fixed point at which the search ends.
        low: smallest precision.
        high: largest precision.
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

        begin = best_start(problem, ties, initial, self.low, self.high)
        choice = concluded("em", problem, ties, self._iterate(problem, ties, begin))
        samples = "exact moments"
        if problem.dimension_samples is not None and choice.status != "diverged":
            samples = f"{len(problem.dimension_samples(choice.precisions))} posterior samples"
        return replace(choice, facts={**choice.facts, "em_e_step": samples})

    def _iterate(self, problem: PrecisionProblem, ties: Tensor, begin: Tensor) -> SearchEnd:
        """EM from `begin` [G]; a variable that runs away is held, and the others continue."""
        search = _Search(problem, ties)
        free, notes = torch.ones(len(begin), dtype=torch.bool), list[str]()
        logs = begin
        while bool(free.any()):
            logs, end = self.climb(search, logs, free)
            if end == "diverged":
                return SearchEnd(begin, torch.zeros_like(begin), free, search.count, True, tuple(notes))
            stuck = free & ((logs <= math.log(self.low)) | (logs >= math.log(self.high)))
            if end == "stopped" and not problem.exhausted():
                stuck |= free & is_flat(problem, logs, ties)
            if not bool(stuck.any()):
                break
            logs, said = hold("em", problem, ties, logs, stuck, begin, self.high)
            notes += said
            free &= ~stuck
        dimensions, penalties = evidence_terms(problem, logs, ties)
        return SearchEnd(logs, 0.5 * (dimensions - penalties), free, search.count, notes=tuple(notes))

    def climb(
        self, search: _Search, start: Tensor, free: Tensor
    ) -> tuple[Tensor, Literal["stopped", "at bound", "diverged"]]:
        """Log precisions once no free one moves or the steps run out (stopped), or one reaches a bound.

        Where the passes for v* run out, it stops at the last precisions for which v* was reached.
        """
        low, high = math.log(self.low), math.log(self.high)

        def step(logs: Tensor) -> tuple[Tensor, Tensor]:
            moved, gap = search.step(logs)
            return torch.where(free, moved, logs), torch.where(free, gap, 0.0)

        logs = known = start
        longest = MORE
        while True:
            first, gap = step(logs)
            if search.spent(logs):
                return known, "stopped"
            known = logs
            if bool(first.isnan().any()):
                return logs, "diverged"
            # Where w_g or γ_g is zero, no finite precision is a fixed point.
            if bool(gap.isinf().any()):
                return torch.where(gap.isinf(), torch.where(gap > 0, high, low), logs), "at bound"
            if float(gap.abs().max()) <= self.tolerance or search.count >= self.steps:
                return logs, "stopped"
            second, _ = step(first)
            once, twice = first - logs, second - first
            bend = float((twice - once).norm())
            length = min(max(float(once.norm()) / bend, 1.0), longest) if bend > 0 else 1.0
            ahead = (logs + 2 * length * once + length**2 * (twice - once)).clamp(low, high)
            third, _ = step(ahead)
            worse = bool(third.isnan().any()) or float((third - ahead).norm()) > float(once.norm())
            if worse:
                longest = max(longest / MORE, 1.0)
            elif length >= longest:
                longest = min(longest * MORE, LONGEST)
            logs = second if worse else third.clamp(low, high)
            if bool((free & ((logs <= low) | (logs >= high))).any()):
                return logs, "at bound"


FIRST_STEPS = 30
"""EM steps to a further start value, for other rules."""


def em_steps(problem: PrecisionProblem, ties: Tensor, begin: Tensor, low: float, high: float) -> Tensor:
    """Log precisions [G] after `FIRST_STEPS` EM steps from `begin`; `begin` itself where they meet NaN."""
    rule = EM(steps=FIRST_STEPS, low=low, high=high)
    moved, _ = rule.climb(_Search(problem, ties), begin, torch.ones(len(begin), dtype=torch.bool))
    # A search must be able to move its variables, so none starts at a bound.
    return torch.where((moved > math.log(low)) & (moved < math.log(high)), moved, begin)


class _Search:
    """The EM step of a problem whose groups are tied; counts its calls."""

    def __init__(self, problem: PrecisionProblem, ties: Tensor) -> None:
        self.problem, self.ties, self.count = problem, ties, 0
        self.sizes = sum_by(torch.tensor(problem.sizes, dtype=torch.float64), ties)

    def spent(self, logs: Tensor) -> bool:
        """Whether v* was not reached at these log precisions and no pass is left to search it."""
        return spent(self.problem, logs.exp()[self.ties])

    def step(self, logs: Tensor) -> tuple[Tensor, Tensor]:
        """New log precisions, and log(MacKay's precision / current one)."""
        self.count += 1
        each = logs.exp()[self.ties]
        dimensions = sum_by(self.problem.effective_dimensions(each), self.ties)
        squares = sum_by(self.problem.squares(each), self.ties)
        variances = (self.sizes - dimensions).clamp_min(0) / logs.exp()  # Tr_g Σ
        moved = self.sizes.log() - (squares + variances).log()
        # Both may be zero for weights without influence on the outputs.
        gap = torch.where((dimensions == 0) & (squares == 0), 0.0, dimensions.log() - squares.log() - logs)
        return moved, gap
