"""`hyper=fixed_point`: MacKay's re-estimation of the precisions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bnn_runner.base import Choice, PrecisionProblem
from bnn_runner.errors import raise_all
from bnn_runner.hyper.em import em_steps
from bnn_runner.hyper.per_weight import for_each_weight
from bnn_runner.hyper.runaway import hold, is_flat
from bnn_runner.hyper.search_end import SearchEnd, concluded, evidence_terms, spent
from bnn_runner.hyper.starts import best_start
from bnn_runner.hyper.tied_precisions import (
    Family,
    Noise,
    inside,
    mean_by,
    range_problems,
    tied,
    tolerance_problems,
)


@dataclass(frozen=True)
class FixedPoint:
    """MacKay's re-estimation λ_g ← γ_g / ‖w*_g‖² with γ_g = Tr_g H (H + Λ)⁻¹, until no λ changes (MacKay 1992).

    A step of log λ_g that reverses direction is halved, since full steps can oscillate for ever. At its end the
    derivative of the evidence in every log λ_g, ½ (γ_g − λ_g ‖w*_g‖²), is zero: a stationary point of what `Evidence`
    climbs, from the same starts. Whether the search has converged is decided by that derivative (see `search_end`);
    precisions that run away are held (see `runaway`).

    Attributes:
        family: as in `Evidence`.
        noise: as in `Evidence`.
        steps: most rounds.
        tolerance: change of log λ at which the search ends.
        low: smallest λ.
        high: largest λ.
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
        initial = mean_by(inside(problem.start, self.low, self.high).log(), ties)

        def further(begin: Tensor) -> Tensor:
            return em_steps(problem, ties, begin, self.low, self.high)

        begin = best_start(problem, ties, initial, self.low, self.high, further)
        return concluded("fixed_point", problem, ties, self._iterate(problem, ties, begin))

    def resume(self, problem: PrecisionProblem) -> Choice:
        """As `choose`, but from the problem's own precisions only: for a rule that continues from round to round."""
        ties = tied(problem, self.family)
        begin = mean_by(inside(problem.start, self.low, self.high).log(), ties)
        return concluded("fixed_point", problem, ties, self._iterate(problem, ties, begin))

    def _iterate(self, problem: PrecisionProblem, ties: Tensor, begin: Tensor) -> SearchEnd:
        """The re-estimation from `begin` [G]; a variable that runs away is held, and the others continue."""
        logs, free, notes = begin, torch.ones(len(begin), dtype=torch.bool), list[str]()
        known, last, change, iteration = begin, torch.zeros_like(begin), math.inf, 0

        while True:
            dimensions, penalties = evidence_terms(problem, logs, ties)
            if spent(problem, logs.exp()[ties]):
                logs = known
                break
            known = logs
            ended = iteration >= self.steps or change <= self.tolerance or not bool(free.any())
            stuck = free & is_flat(problem, logs, ties) if ended else torch.zeros_like(free)
            if ended and not bool(stuck.any()):
                break
            if not ended:
                iteration += 1
                # λ ← γ/‖w‖²; a γ from samples can be negative, and both may be zero for weights without influence.
                moving = free & ((dimensions != 0) | (penalties != 0))
                step = torch.where(moving, (dimensions.clamp_min(0) / penalties).log(), 0.0)
                step = torch.where(step * last < 0, step / 2, step)  # full steps may oscillate
                moved, last = logs + step, step
                if bool(moved.isnan().any()):
                    return SearchEnd(begin, torch.zeros_like(begin), free, iteration, True, tuple(notes))
                stuck = free & ((moved <= math.log(self.low)) | (moved >= math.log(self.high)))
                change = float((moved - logs).abs().max())
                logs = moved
            if bool(stuck.any()):
                logs, said = hold("fixed_point", problem, ties, logs, stuck, begin, self.high)
                notes += said
                free &= ~stuck
                change = math.inf
        dimensions, penalties = evidence_terms(problem, logs, ties)
        return SearchEnd(logs, 0.5 * (dimensions - penalties), free, iteration, notes=tuple(notes))
