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
    """`num` precisions from `low` to `high`, evenly spaced in log λ; the best validation log-likelihood wins.

    Scores that are not finite are skipped and counted.

    Attributes:
        family: isotropic, one precision for every weight, or g, the one λ of the neural g-prior λ diag(H)/N.
        low: smallest precision.
        high: largest precision.
        num: number of precisions.
    """

    family: Literal["isotropic", "g"] = "isotropic"
    low: float = 1e-4
    high: float = 1e4
    num: int = 17
    needs_validation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.low < self.high < math.inf:
            problems.append(f"hyper.low and hyper.high must satisfy 0 < low < high; got {self.low} and {self.high}.")
        if self.num < 2:
            problems.append(f"hyper.num must be at least 2; got {self.num}.")
        raise_all(problems)

    def choose(self, problem: PrecisionProblem) -> Choice:
        values = torch.logspace(math.log10(self.low), math.log10(self.high), self.num, dtype=torch.float64)
        scores = problem.validation([torch.full_like(problem.start, float(v)) for v in values])
        finite = [(score, i) for i, score in enumerate(scores) if math.isfinite(score)]
        facts: dict[str, Any] = {"grid_points": self.num, "grid_not_finite": self.num - len(finite)}
        if not finite:
            note = "hyper=grid: no precision gave a finite validation log-likelihood, so the training prior is kept"
            return Choice(problem.start, "failed", facts, (note,))
        best_score, best = max(finite)
        facts["grid_best_validation_loglik"] = best_score
        precisions = torch.full_like(problem.start, float(values[best]))
        if best not in (0, self.num - 1):
            return Choice(precisions, "converged", facts)
        note = (
            f"hyper=grid: the best precision, {float(values[best]):.3g}, is at the edge of the grid; "
            "widen hyper.low or hyper.high"
        )
        return Choice(precisions, "at bound", facts, (note,))
