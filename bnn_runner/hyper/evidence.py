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

    family=isotropic: one λ; layerwise: one a group of weights (tensor, or layer where blocks are
    layers); groupwise: one for each scale-invariant group and one for all others (Antorán et al.
    2022); parameter: one a weight, in closed form where the curvature is diagonal; g: the one λ of the
    neural g-prior λ diag(H)/N. Several λ are searched from where the evidence is largest: at the training prior, at
    the best single λ, or where some EM steps lead from there; so they end no lower than the best single λ.
    noise=evidence chooses one common factor of the regression noise with them. A λ that runs away is named and held
    (see `hyper.runaway`); a search that meets a value that is not finite says so and keeps the values that it began
    with. Converged: see `hyper.search_end`.
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
        """BFGS from `begin` [G]; a variable that runs away is held, and the others are searched on."""
        free = torch.ones(len(begin), dtype=torch.bool)
        low, high = math.log(self.low), math.log(self.high)
        notes: list[str] = []
        iterations = 0

        def objective(logs: Tensor) -> Tensor:
            return problem.evidence(logs.exp() if len(logs) == 1 else logs.exp()[ties])

        def unsettled(logs: Tensor) -> bool:
            return spent(problem, logs.exp()[ties])

        logs = begin
        while True:
            found = maximise(objective, logs, free, low, high, self.steps, unsettled)
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
