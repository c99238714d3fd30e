"""`hyper=fixed`: the training prior, or one given precision."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from bnn_runner.base import Choice, PrecisionProblem
from bnn_runner.errors import UserError


@dataclass(frozen=True)
class Fixed:
    """The training prior, or `precision` for every weight.

    Attributes:
        precision: λ; None keeps the training prior.
        family: isotropic, or g for the neural g-prior λ diag(H)/N, where None is λ = 1, the information of one point.
    """

    precision: float | None = None
    family: Literal["isotropic", "g"] = "isotropic"
    needs_validation: ClassVar[bool] = False
    uses_evidence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.precision is not None and not 0 < self.precision < math.inf:
            raise UserError(f"hyper.precision must be positive and finite; got {self.precision}.")

    def choose(self, problem: PrecisionProblem) -> Choice:
        precisions = problem.start if self.precision is None else torch.full_like(problem.start, self.precision)
        if not bool((precisions > 0).all()):
            raise UserError(
                "hyper=fixed requires a positive prior precision; the training prior has precision 0, which makes the "
                "posterior improper. Set hyper.precision to a positive value, or use hyper=evidence or hyper=grid."
            )
        return Choice(precisions, "fixed")
