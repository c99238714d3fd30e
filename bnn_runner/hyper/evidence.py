"""`hyper=evidence`: the precisions with the largest log marginal likelihood, by BFGS in log λ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bnn_runner.base import Choice, PrecisionProblem
from bnn_runner.errors import raise_all
from bnn_runner.hyper.bfgs import maximise
from bnn_runner.hyper.em import em_steps
from bnn_runner.hyper.per_weight import for_each_weight
from bnn_runner.hyper.runaway import hold, is_flat
from bnn_runner.hyper.search_end import SearchEnd, concluded, spent
from bnn_runner.hyper.starts import best_start
from bnn_runner.hyper.tied_precisions import (
    Family,
    Noise,
    inside,
    mean_by,
    range_problems,
    tied,
)


@dataclass(frozen=True)
class Evidence:
    """The largest log marginal likelihood, by BFGS in log λ (MacKay 1992; Immer et al. 2021).

    Several λ are searched from the start with the largest evidence: the training prior, the best single λ, or the
    result of some EM steps from there; so their evidence is no lower than that of the best single λ. Whether the
    search has converged is decided by the evidence's gradient (see `search_end`); precisions that run away are held
    (see `runaway`).

    Attributes:
        family: isotropic: one λ; layerwise: one per group of weights (a tensor, or a layer where blocks are
            layers); groupwise: one for each scale-invariant group and one for all others (Antorán et al. 2022);
            parameter: one per weight, in closed form, for a diagonal curvature; g: the one λ of the neural
            g-prior λ diag(H)/N.
        noise: trained keeps the regression noise; evidence selects one common factor of it together with λ.
        steps: most BFGS iterations.
        low: smallest λ.
        high: largest λ.
    """

    family: Family = "isotropic"
    noise: Noise = "trained"
    steps: int = 100
    low: float = 1e-6
    high: float = 1e8
    needs_validation: ClassVar[bool] = False
    cites: ClassVar[tuple[str, ...]] = ("mackay1992", "immer2021evidence")

    def __post_init__(self) -> None:
        raise_all(range_problems(self.low, self.high, self.steps))

    def choose(self, problem: PrecisionProblem) -> Choice:
        if self.family == "parameter":
            return for_each_weight(problem, "evidence", self.steps, 1e-6, self.low, self.high)
        ties = tied(problem, self.family)
        initial = mean_by(inside(problem.start, self.low, self.high).log(), ties)

        def further(begin: Tensor) -> Tensor:
            return em_steps(problem, ties, begin, self.low, self.high)

        begin = best_start(problem, ties, initial, self.low, self.high, further)
        return concluded("evidence", problem, ties, self._climb(problem, ties, begin))

    def _climb(self, problem: PrecisionProblem, ties: Tensor, begin: Tensor) -> SearchEnd:
        """BFGS from `begin` [G]; a variable that runs away is held, and the search of the others continues."""
        free = torch.ones(len(begin), dtype=torch.bool)
        low, high = math.log(self.low), math.log(self.high)
        notes: list[str] = []
        iterations = 0

        def objective(logs: Tensor) -> Tensor:
            return problem.evidence(logs.exp() if len(logs) == 1 else logs.exp()[ties])

        def unknown(logs: Tensor) -> bool:
            return spent(problem, logs.exp()[ties])

        logs = begin
        while True:
            found = maximise(objective, logs, free, low, high, self.steps, unknown)
            logs, iterations = found.point, iterations + found.iterations
            if not found.finite:
                return SearchEnd(begin, torch.zeros_like(begin), free, iterations, True, tuple(notes))
            stuck = free & ((logs < low + 1e-3) | (logs > high - 1e-3) | is_flat(problem, logs, ties))
            if not bool(stuck.any()):
                break
            logs, said = hold("evidence", problem, ties, logs, stuck, begin, self.high)
            notes += said
            free &= ~stuck
            if not bool(free.any()):
                break
        point = logs.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(point), point)
        return SearchEnd(logs, gradient, free, iterations, notes=tuple(notes))
