"""`hyper=evidence`: the precisions with the largest log marginal likelihood, by BFGS in log λ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from bnn_runner.base import Choice, HyperStatus, PrecisionProblem
from bnn_runner.errors import raise_all
from bnn_runner.hyper.bfgs import maximise
from bnn_runner.hyper.tied_precisions import (
    Family,
    Noise,
    at_bound,
    for_each_weight,
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
    neural g-prior λ diag(H)/N. Several λ are searched from the best single one, so that they end no lower in the
    evidence than it. noise=evidence chooses one common factor of the regression noise
    with them. A λ that runs to `low` or `high`, or a search that meets a value that is not finite,
    says so and keeps its start value.
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
        start = inside(problem.start, self.low, self.high).log()
        initial = mean_by(start, ties)
        free = torch.ones(len(initial), dtype=torch.bool)
        notes: list[str] = []
        bounds = math.log(self.low), math.log(self.high)

        def objective(logs: Tensor) -> Tensor:
            return problem.evidence(logs.exp() if len(logs) == 1 else logs.exp()[ties])

        begin = self._common(objective, initial, bounds) if len(initial) > 1 else initial
        while True:
            found = maximise(objective, torch.where(free, begin, initial), free, *bounds, self.steps)
            logs, gradient, iterations = found.point, found.gradient, found.iterations
            if not found.finite:
                values = ", ".join(f"{v:.3g}" for v in sorted(set(initial.exp().tolist())))
                notes.append(
                    f"hyper=evidence: the search met a value that is not finite; the start value is kept ({values})"
                )
                return Choice(initial.exp()[ties], "diverged", {"hyper_iterations": iterations}, tuple(notes))
            stuck = free & ((logs < bounds[0] + 1e-3) | (logs > bounds[1] - 1e-3))
            if not bool(stuck.any()):
                break
            notes.append(at_bound("evidence", problem, stuck[ties]))
            free &= ~stuck
            if not bool(free.any()):
                logs = initial
                break
        status: HyperStatus = "converged"
        if not bool(free.all()):
            status = "at bound"
        elif not gradient < 1e-2:
            status = "not converged"
            notes.append(
                f"hyper=evidence: the gradient is still {gradient:.2g} nats after {iterations} iterations;"
                " raise hyper.steps"
            )
        facts = {"hyper_iterations": iterations, "hyper_gradient": gradient}
        return Choice(logs.exp()[ties], status, facts, tuple(notes))

    def _common(self, objective: Callable[[Tensor], Tensor], initial: Tensor, bounds: tuple[float, float]) -> Tensor:
        """Where a search for several λ begins: at the best single one [G], if that beats the start values."""
        count = len(initial)
        middle, free = initial.mean(0, keepdim=True), torch.ones(1, dtype=torch.bool)
        found = maximise(objective, middle, free, *bounds, self.steps)
        if not found.finite:
            return initial
        common = found.point.expand(count).clone()
        with torch.no_grad():
            return common if float(objective(common)) > float(objective(initial)) else initial
