"""`hyper=fixed`: the training prior as it is, or one given precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from bnn_runner.base import Choice, PrecisionProblem
from bnn_runner.errors import UserError


@dataclass(frozen=True)
class Fixed:
    """The training prior as it is, or `precision` for every weight.

    family=g: the neural g-prior λ diag(H)/N with λ = `precision`; null is 1, the information of one point.
    """

    precision: float | None = None
    family: Literal["isotropic", "g"] = "isotropic"
    needs_validation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.precision is not None and not 0 < self.precision < math.inf:
            raise UserError(f"hyper.precision={self.precision} is not a precision. It must be above 0 and finite.")

    def choose(self, problem: PrecisionProblem) -> Choice:
        precisions = problem.start if self.precision is None else torch.full_like(problem.start, self.precision)
        if not bool((precisions > 0).all()):
            raise UserError(
                "the training prior has precision 0, under which the posterior is improper. "
                "Give hyper.precision=VALUE above 0, or use hyper=evidence or hyper=grid."
            )
        return Choice(precisions, "fixed")
