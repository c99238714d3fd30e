"""What rules with several precisions share: which groups have the same precision, bounds, sums over groups."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.base import HyperRule, PrecisionProblem

Noise = Literal["trained", "evidence"]
Family = Literal["isotropic", "layerwise", "groupwise", "parameter", "g"]


def family_of(rule: HyperRule) -> str:
    """The family of a rule; isotropic for one without such a key."""
    return str(getattr(rule, "family", "isotropic"))


def tied(problem: PrecisionProblem, family: Family) -> Tensor:
    """Which variable holds the precision of each of the T groups, [T] int64."""
    count = len(problem.names)
    if family in ("isotropic", "g"):
        return torch.zeros(count, dtype=torch.int64)
    if family == "layerwise":
        return torch.arange(count)
    own = torch.tensor([name in problem.invariant for name in problem.names])
    if bool(own.all()):
        return torch.arange(count)
    return torch.where(own, own.cumsum(0), 0)


def sum_by(values: Tensor, ties: Tensor) -> Tensor:
    """Sums [G] of values [T] over the groups of each variable."""
    return torch.zeros(int(ties.max()) + 1, dtype=values.dtype).index_add(0, ties, values)


def mean_by(values: Tensor, ties: Tensor) -> Tensor:
    """Means [G] of values [T] over the groups of each variable."""
    return sum_by(values, ties) / sum_by(torch.ones_like(values), ties)


def named(problem: PrecisionProblem, some: Tensor) -> str:
    """The groups where `some` [T] is true, in words."""
    if bool(some.all()):
        return "all weights"
    return ", ".join(n for n, s in zip(problem.names, some.tolist(), strict=True) if s)


def range_problems(low: float, high: float, steps: int) -> list[str]:
    """What is wrong with the bounds and the length of a search."""
    problems = []
    if not 0 < 4 * low <= high < math.inf:
        problems.append(f"hyper.low and hyper.high must satisfy 0 < 4 low <= high; got {low} and {high}.")
    if steps < 1:
        problems.append(f"hyper.steps must be at least 1; got {steps}.")
    return problems


def tolerance_problems(tolerance: float) -> list[str]:
    """What is wrong with the change of log λ at which a rule has converged."""
    if 0 < tolerance < 1:
        return []
    return [f"hyper.tolerance must be between 0 and 1 (a change of log λ); got {tolerance}."]


def inside(start: Tensor, low: float, high: float) -> Tensor:
    """Start values well inside the bounds, where a gradient step can still move them; 1 for a prior of 0."""
    bounds = low * 2, max(low * 2, high / 2)
    return torch.where(start > 0, start, torch.ones_like(start)).clamp(*bounds)
