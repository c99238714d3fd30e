"""`hyper=grid`: the precision that the validation part prefers, on a grid that goes on where the best is at its end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bnn_runner.base import Choice, HyperStatus, PrecisionProblem, ValidationScore
from bnn_runner.errors import raise_all
from bnn_runner.hyper.validation_choice import highest, mean, preferred
from bnn_runner.tasks import TaskSpec

LOWEST, HIGHEST = 1e-8, 1e12
"""Bounds of a grid that is extended."""
STEPS = 4
"""Precisions by which a grid is extended at once."""
LABELS: dict[ValidationScore, int] = {"marginal": 1, "dyadic": 10, "joint": 10}
"""Of one point or block."""
NEAR = 1.01
"""A precision nearer to a bound than this factor is the bound."""
FLAT_NATS = 1e-4
"""A step that gains less, per point or block, ends the extension: the posterior is almost the trained network."""


@dataclass(frozen=True)
class Grid:
    """`num` precisions from `low` to `high`, evenly spaced in log λ; the one that the validation part prefers wins.

    While the best is at an end of the grid, it is extended in steps of the same size, up to 1e-8 and 1e12. Then each
    gap next to the choice gets `refine` further precisions. Scores that are not finite are skipped and counted.

    Attributes:
        family: isotropic, one precision for every weight, or g, the one λ of the neural g-prior λ diag(H)/N.
        score: log-likelihood that is compared: marginal, dyadic (10 labels over 2 points) or joint (10 points).
        standard_errors: the smallest precision wins whose score is at most so many paired standard errors below the
            best, or at most 5e-4 nats per label, but none below the training prior's (or the g-prior's λ = 1) unless it
            is the best; 0 for the best.
        low: smallest precision at first.
        high: largest precision at first.
        num: number of precisions at first.
        extend: whether the grid is extended.
        refine: further precisions on each side of the choice.
        points: most validation points that are scored, at random; None for all.
    """

    family: Literal["isotropic", "g"] = "isotropic"
    score: ValidationScore = "marginal"
    standard_errors: float = 0.5
    low: float = 1e-2
    high: float = 1e6
    num: int = 9
    extend: bool = True
    refine: int = 3
    points: int | None = 1000
    needs_validation: ClassVar[bool] = True
    uses_evidence: ClassVar[bool] = False

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.low < self.high < math.inf:
            problems.append(f"hyper.low and hyper.high must satisfy 0 < low < high; got {self.low} and {self.high}.")
        if self.num < 2:
            problems.append(f"hyper.num must be at least 2; got {self.num}.")
        if self.refine < 0:
            problems.append(f"hyper.refine must be at least 0; got {self.refine}.")
        if not 0 <= self.standard_errors < math.inf:
            problems.append(f"hyper.standard_errors must be at least 0 and finite; got {self.standard_errors}.")
        if self.points is not None and self.points < 1:
            problems.append(f"hyper.points must be at least 1, or null for all; got {self.points}.")
        raise_all(problems)

    def problems(self, spec: TaskSpec) -> list[str]:
        """Why the rule does not support the task (empty when it does)."""
        if spec.kind == "regression" and self.score != "marginal":
            return [
                f"hyper.score={self.score} requires classes; data={spec.name} is a regression, whose joint densities "
                "need more draws than a search has. Use hyper.score=marginal."
            ]
        return []

    def choose(self, problem: PrecisionProblem) -> Choice:
        search = _Search(problem, self)
        search.add(torch.logspace(math.log10(self.low), math.log10(self.high), self.num, dtype=torch.float64))
        while self.extend and len(more := search.beyond()):
            search.add(more)
        if self.refine and search.chosen is not None:
            search.add(search.between(self.refine))
        if search.chosen is None:
            note = "hyper=grid: no precision gave a finite validation log-likelihood, so the training prior is kept"
            return Choice(problem.start, "failed", search.facts(), (note,))
        status, notes = search.end()
        return Choice(torch.full_like(problem.start, search.precision), status, search.facts(), notes)


@dataclass
class _Search:
    """The precisions that were scored, ascending, and their scores."""

    problem: PrecisionProblem
    rule: Grid
    values: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def add(self, values: Tensor) -> None:
        """Score further precisions, all in one pass."""
        candidates, score = [torch.full_like(self.problem.start, float(v)) for v in values], self.rule.score
        found = [row[score] for row in self.problem.validation(candidates, [score], self.rule.points)]
        all_values, all_scores = [*self.values, *values.tolist()], [*self.scores, *found]
        order = sorted(range(len(all_values)), key=all_values.__getitem__)
        self.values, self.scores = [all_values[i] for i in order], [all_scores[i] for i in order]

    @property
    def chosen(self) -> int | None:
        floor = float(self.problem.start.min())
        least = sum(value < floor for value in self.values)
        return preferred(self.scores, self.rule.standard_errors, least, LABELS[self.rule.score])

    @property
    def precision(self) -> float:
        assert self.chosen is not None
        return self.values[self.chosen]

    def _flat(self, end: int, inner: int) -> bool:
        """Whether the last step at an end changed the score by next to nothing."""
        return not abs(mean(self.scores[end]) - mean(self.scores[inner])) > FLAT_NATS

    def beyond(self) -> Tensor:
        """Precisions beyond the end at which the best one is; none where it is inside, flat or at a bound."""
        nothing, last = torch.empty(0, dtype=torch.float64), len(self.scores) - 1
        best = highest(self.scores)
        if best is None:
            return nothing
        step = math.log10(self.rule.high / self.rule.low) / (self.rule.num - 1)
        steps = torch.arange(1, STEPS + 1, dtype=torch.float64) * step
        if best == last and self.values[-1] < HIGHEST and not self._flat(last, last - 1):
            return _inside(self.values[-1] * 10**steps)
        if 0 in (best, self.chosen) and self.values[0] > LOWEST and not self._flat(0, 1):
            return _inside(self.values[0] / 10**steps)
        return nothing

    def between(self, count: int) -> Tensor:
        """`count` precisions in each gap next to the chosen one."""
        assert self.chosen is not None
        logs = torch.tensor(self.values, dtype=torch.float64).log()
        gaps = [(i, i + 1) for i in (self.chosen - 1, self.chosen) if 0 <= i < len(logs) - 1]
        shares = torch.arange(1, count + 1, dtype=torch.float64) / (count + 1)
        return torch.cat([(logs[a] + shares * (logs[b] - logs[a])).exp() for a, b in gaps])

    def facts(self) -> dict[str, Any]:
        """For the row."""
        score = self.rule.score
        bad = sum(not math.isfinite(mean(each)) for each in self.scores)
        total, limit = self.problem.validation_points, self.rule.points
        facts: dict[str, Any] = {
            "hyper_score": score,
            "grid_points": len(self.scores),
            "grid_not_finite": bad,
            "grid_searched": [self.values[0], self.values[-1]],
            "grid_validation_points": total if limit is None else min(limit, total),
        }
        if self.chosen is not None:
            name = "loglik" if score == "marginal" else f"{score}_loglik"
            facts[f"grid_best_validation_{name}"] = mean(self.scores[self.chosen])
        return facts

    def end(self) -> tuple[HyperStatus, tuple[str, ...]]:
        """How the search ended, and what a reader should know."""
        chosen, last = self.chosen, len(self.scores) - 1
        alone = self.rule.extend and highest(self.scores) == last and self._flat(last, last - 1)
        if alone:
            return "converged", (
                "hyper=grid: the validation part prefers the trained network without uncertainty; the selected "
                f"precision, {self.precision:.3g}, is the smallest that is nearly as good there",
            )
        if chosen not in (0, last):
            return "converged", ()
        where = f"hyper=grid: the best precision, {self.precision:.3g}, is at the "
        if not self.rule.extend:
            return "at bound", (f"{where}edge of the grid; widen hyper.low or hyper.high, or set hyper.extend=true",)
        if chosen == 0 and self._flat(0, 1):
            return "converged", ()
        ends = f"{LOWEST:.0e} and {HIGHEST:.0e}"
        return "at bound", (f"{where}end of the search, which goes to {ends} at most",)


def _inside(values: Tensor) -> Tensor:
    """Those within the bounds, and the bound itself where one lies beyond it or at it (to rounding)."""
    near = torch.where(values < LOWEST * NEAR, LOWEST, torch.where(values > HIGHEST / NEAR, HIGHEST, values))
    return near.unique()
