"""`hyper=grid`: the precision with the best validation log-likelihood on a grid."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from bnn_runner.base import Choice, PrecisionProblem
from bnn_runner.errors import raise_all


@dataclass(frozen=True)
class Grid:
    """`num` precisions from `low` to `high`, spaced in the logarithm; the best validation log-likelihood wins.

    One precision for every weight, or with family=g the one λ of the neural g-prior λ diag(H)/N.
    Scores that are not finite are left out and counted.
    """

    family: Literal["isotropic", "g"] = "isotropic"
    low: float = 1e-4
    high: float = 1e4
    num: int = 17
    needs_validation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.low < self.high < math.inf:
            problems.append(f"hyper.low={self.low} and hyper.high={self.high} span no grid. They need 0 < low < high.")
        if self.num < 2:
            problems.append(f"hyper.num={self.num} is no grid. It must be 2 or more.")
        raise_all(problems)

    def choose(self, problem: PrecisionProblem) -> Choice:
        values = torch.logspace(math.log10(self.low), math.log10(self.high), self.num, dtype=torch.float64)
        scores = problem.validation([torch.full_like(problem.start, float(v)) for v in values])
        finite = [(score, i) for i, score in enumerate(scores) if math.isfinite(score)]
        facts: dict[str, Any] = {"grid_points": self.num, "grid_not_finite": self.num - len(finite)}
        if not finite:
            note = "hyper=grid: no precision gave a finite validation log-likelihood; the training prior is kept"
            return Choice(problem.start, "failed", facts, (note,))
        best_score, best = max(finite)
        facts["grid_best_validation_loglik"] = best_score
        precisions = torch.full_like(problem.start, float(values[best]))
        if best not in (0, self.num - 1):
            return Choice(precisions, "converged", facts)
        note = (
            f"hyper=grid: the best precision {float(values[best]):.3g} lies at the edge of the grid; "
            "widen hyper.low or hyper.high"
        )
        return Choice(precisions, "at bound", facts, (note,))
