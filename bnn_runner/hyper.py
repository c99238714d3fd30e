"""Rules that choose the posterior's prior precision after training.

A rule sees one `PrecisionProblem`: the training prior to start from, the evidence as a
differentiable function of the precisions, and the validation log-likelihood. It knows nothing of
networks, so any posterior with an evidence can use it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from bnn_runner.ascent import maximise
from bnn_runner.dimension_errors import dimension_errors
from bnn_runner.errors import UserError, raise_all
from bnn_runner.weightwise import each_weight


@dataclass(frozen=True)
class PrecisionProblem:
    """Precisions are one a group of weights (a parameter tensor, mostly), [T] float64.

    `evidence` is in nats, of precisions [T] or of one for all, [1]; `validation` is the mean
    log-likelihood of the validation part for each of several precisions [T];
    `effective_dimensions` are Tr_g H (H + Λ)⁻¹, [T], and `squares` the squared norms ‖w_g‖² [T] of
    the weights that the evidence is taken at, which may depend on the precisions; `invariant` names the
    groups whose scale a normalisation layer takes out again. `diagonal` is H itself [P] where it is
    diagonal: then each weight may have a precision of its own, and all of the above also take
    precisions [P] (and give terms [P]); `sizes` are the numbers of weights of the groups.
    `dimension_samples`, where effective dimensions are means over posterior samples, are these, [S, T].
    """

    names: tuple[str, ...]
    start: Tensor
    evidence: Callable[[Tensor], Tensor]
    validation: Callable[[Sequence[Tensor]], list[float]]
    effective_dimensions: Callable[[Tensor], Tensor]
    squares: Callable[[Tensor], Tensor]
    invariant: tuple[str, ...] = ()
    diagonal: Tensor | None = None
    sizes: tuple[int, ...] = ()
    dimension_samples: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Choice:
    """The chosen precisions [T] (or [P], one a weight), facts for the row, and what a reader should be told."""

    precisions: Tensor
    report: dict[str, Any]
    notes: tuple[str, ...] = field(default=())


class HyperRule(Protocol):
    """A frozen dataclass whose fields are its YAML's keys."""

    needs_validation: ClassVar[bool]

    def choose(self, problem: PrecisionProblem) -> Choice: ...


def family_of(rule: HyperRule) -> str:
    """The family a rule chooses in; isotropic for one that has no such key."""
    return str(getattr(rule, "family", "isotropic"))


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
        return Choice(precisions, {"hyper_status": "fixed"})


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
        report: dict[str, Any] = {"grid_points": self.num, "grid_not_finite": self.num - len(finite)}
        if not finite:
            note = "hyper=grid: no precision gave a finite validation log-likelihood; the training prior is kept"
            return Choice(problem.start, report | {"hyper_status": "failed"}, (note,))
        best_score, best = max(finite)
        report |= {"grid_best_validation_loglik": best_score, "hyper_status": "converged"}
        notes: tuple[str, ...] = ()
        if best in (0, self.num - 1):
            report["hyper_status"] = "at bound"
            edge = f"hyper=grid: the best precision {float(values[best]):.3g} lies at the edge of the grid"
            notes = (f"{edge}; widen hyper.low or hyper.high",)
        return Choice(torch.full_like(problem.start, float(values[best])), report, notes)


Noise = Literal["trained", "evidence"]
Family = Literal["isotropic", "layerwise", "groupwise", "parameter", "g"]


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

    def __post_init__(self) -> None:
        raise_all(range_problems(self.low, self.high, self.steps))

    def choose(self, problem: PrecisionProblem) -> Choice:
        if self.family == "parameter":
            return _each_weight(problem, "evidence", self.steps, 1e-6, self.low, self.high)
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
                report = {"hyper_status": "diverged", "hyper_iterations": iterations}
                return Choice(initial.exp()[ties], report, tuple(notes))
            stuck = free & ((logs < bounds[0] + 1e-3) | (logs > bounds[1] - 1e-3))
            if not bool(stuck.any()):
                break
            notes.append(at_bound("evidence", problem, stuck[ties]))
            free &= ~stuck
            if not bool(free.any()):
                logs = initial
                break
        status = "at bound" if notes else ("converged" if gradient < 1e-2 else "not converged")
        if status == "not converged":
            notes.append(
                f"hyper=evidence: the gradient is still {gradient:.2g} nats after {iterations} iterations;"
                " raise hyper.steps"
            )
        report = {"hyper_status": status, "hyper_iterations": iterations, "hyper_gradient": gradient}
        return Choice(logs.exp()[ties], report, tuple(notes))

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


@dataclass(frozen=True)
class FixedPoint:
    """MacKay's re-estimation λ_g ← γ_g / ‖w*_g‖² with γ_g = Tr_g H (H + Λ)⁻¹, until no λ moves (MacKay 1992).

    Where it settles the derivative of the evidence in every log λ_g, ½ (γ_g − λ_g ‖w*_g‖²), is zero, so it is
    a stationary point of what `Evidence` climbs. family and noise as there. A λ that runs to `low` or `high`,
    or meets a value that is not finite, says so and keeps its start value.
    """

    family: Family = "isotropic"
    noise: Noise = "trained"
    steps: int = 200
    tolerance: float = 1e-6
    low: float = 1e-6
    high: float = 1e8
    needs_validation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = range_problems(self.low, self.high, self.steps)
        problems += tolerance_problems(self.tolerance)
        raise_all(problems)

    def choose(self, problem: PrecisionProblem) -> Choice:
        if self.family == "parameter":
            return _each_weight(problem, "fixed_point", self.steps, self.tolerance, self.low, self.high)
        ties = tied(problem, self.family)
        initial = mean_by(inside(problem.start, self.low, self.high).log(), ties).exp()
        precisions, free = initial.clone(), torch.ones(len(initial), dtype=torch.bool)
        notes: list[str] = []
        change, iteration = math.inf, 0
        while iteration < self.steps and change > self.tolerance and bool(free.any()):
            iteration += 1
            dimensions, squares = self._terms(problem, precisions[ties], ties)
            moved = torch.where(free, dimensions / squares, precisions)
            if bool(moved.isnan().any()):
                note = "hyper=fixed_point: a precision became NaN; every precision keeps its start value"
                return Choice(initial[ties], {"hyper_status": "diverged", "hyper_iterations": iteration}, (note,))
            stuck = free & ((moved <= self.low) | (moved >= self.high))
            if bool(stuck.any()):
                notes.append(at_bound("fixed_point", problem, stuck[ties]))
                free &= ~stuck
                moved = torch.where(stuck, initial, moved)
            change = float((moved / precisions).log().abs().max())
            precisions = moved
        dimensions, squares = self._terms(problem, precisions[ties], ties)
        gradient = 0.5 * (dimensions - precisions * squares)
        status = "at bound" if notes else "converged"
        if change > self.tolerance and bool(free.any()):
            status = "not converged"
            notes.append(
                f"hyper=fixed_point: the precisions still move by {change:.2g} of a logarithm after {iteration} steps;"
                " raise hyper.steps"
            )
        largest = float(gradient[free].abs().max()) if bool(free.any()) else 0.0
        report: dict[str, Any] = {"hyper_status": status, "hyper_iterations": iteration, "hyper_gradient": largest}
        if problem.dimension_samples is not None:
            facts, unsure = dimension_errors(problem.dimension_samples(precisions[ties]), ties, problem.names)
            report, notes = report | facts, [*notes, *unsure]
        return Choice(precisions[ties], report, tuple(notes))

    @staticmethod
    def _terms(problem: PrecisionProblem, precisions: Tensor, ties: Tensor) -> tuple[Tensor, Tensor]:
        """Effective dimension and squared norm of each variable's weights, at precisions [T]."""
        return sum_by(problem.effective_dimensions(precisions), ties), sum_by(problem.squares(precisions), ties)


def tied(problem: PrecisionProblem, family: Family) -> Tensor:
    """Which variable each of the T groups has its precision from, [T] int64."""
    count = len(problem.names)
    if family in ("isotropic", "g"):
        return torch.zeros(count, dtype=torch.int64)
    if family == "layerwise":
        return torch.arange(count)
    own = torch.tensor([name in problem.invariant for name in problem.names])
    if bool(own.all()):
        return torch.arange(count)
    return torch.where(own, own.cumsum(0), 0)


def _each_weight(problem: PrecisionProblem, rule: str, steps: int, tolerance: float, low: float, high: float) -> Choice:
    assert problem.diagonal is not None, "refused before the fit"
    start = inside(problem.start, low, high).repeat_interleave(torch.tensor(problem.sizes))
    return Choice(*each_weight(rule, problem.diagonal, start, problem.squares, steps, tolerance, low, high))


def sum_by(values: Tensor, ties: Tensor) -> Tensor:
    """Sums [G] of values [T] over the groups of each variable."""
    return torch.zeros(int(ties.max()) + 1, dtype=values.dtype).index_add(0, ties, values)


def mean_by(values: Tensor, ties: Tensor) -> Tensor:
    """Means [G] of values [T] over the groups of each variable."""
    return sum_by(values, ties) / sum_by(torch.ones_like(values), ties)


def at_bound(rule: str, problem: PrecisionProblem, stuck: Tensor) -> str:
    """What is said of precisions that ran away, `stuck` [T]."""
    some = ", ".join(n for n, s in zip(problem.names, stuck.tolist(), strict=True) if s)
    which = "all weights" if bool(stuck.all()) else some
    return f"hyper={rule}: the precision of {which} ran to a bound and keeps its start value"


def range_problems(low: float, high: float, steps: int) -> list[str]:
    """What is wrong with the bounds and the length of a search."""
    problems = []
    if not 0 < 4 * low <= high < math.inf:
        problems.append(f"hyper.low={low} and hyper.high={high} leave no room. They need 0 < 4 low <= high.")
    if steps < 1:
        problems.append(f"hyper.steps={steps} searches nothing. It must be 1 or more.")
    return problems


def tolerance_problems(tolerance: float) -> list[str]:
    """What is wrong with the change of log λ at which a rule has settled."""
    if 0 < tolerance < 1:
        return []
    return [f"hyper.tolerance={tolerance} is no change of a logarithm. It must be between 0 and 1."]


def inside(start: Tensor, low: float, high: float) -> Tensor:
    """Start values well inside the bounds, where a gradient or a step can still move them; 1 for a prior of 0."""
    bounds = low * 2, max(low * 2, high / 2)
    return torch.where(start > 0, start, torch.ones_like(start)).clamp(*bounds)
