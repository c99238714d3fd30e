"""One precision for each weight, where the curvature is diagonal and the evidence falls apart into weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def best_precisions(diagonal: Tensor, squares: Tensor) -> Tensor:
    """The λ_j that maximise −½ [λ_j w_j² + log(1 + h_j/λ_j)], for h [P] and w² [P].

    The derivative in log λ_j is ½ [h/(h + λ) − λ w²], whose only positive root is
    λ = 2 / (w² + √(w⁴ + 4 w²/h)): about 1/w² where the data fix the weight (h w² ≫ 1). It is 0
    for h = 0, infinite for w = 0, and NaN where both are.
    """
    return 2 / (squares + (squares.square() + 4 * squares / diagonal).sqrt())


def each_weight(
    rule: str,
    diagonal: Tensor,
    start: Tensor,
    squares: Callable[[Tensor], Tensor],
    steps: int,
    tolerance: float,
    low: float,
    high: float,
) -> tuple[Tensor, dict[str, Any], tuple[str, ...]]:
    """Precisions [P], facts for the row and notes. `squares` are w_j² [P], which may depend on the precisions.

    Each round takes `best_precisions` at the squares of the last; where these do not move (the
    evidence at w*), the second round changes nothing. A weight whose λ leaves `low` to `high` (no curvature, or
    a weight that is zero, or goes to it as its λ grows) keeps its start value, and they are counted.
    """
    precisions, change, iteration = start, math.inf, 0
    kept = torch.zeros_like(start, dtype=torch.bool)
    while iteration < steps and change > tolerance:
        iteration += 1
        terms = squares(precisions).to(start)
        if not bool(torch.isfinite(terms).all()):
            note = f"hyper={rule}: the search met a value that is not finite; every precision keeps its start value"
            return start, {"hyper_status": "diverged", "hyper_iterations": iteration}, (note,)
        found = best_precisions(diagonal, terms)
        kept |= ~((found > low) & (found < high))
        moved = torch.where(kept, start, found)
        change = float((moved / precisions).log().abs().max())
        precisions = moved
    gradient = 0.5 * (diagonal / (diagonal + precisions) - precisions * squares(precisions).to(start))
    free = gradient[~kept].abs()
    report: dict[str, Any] = {
        "hyper_status": "at bound" if bool(kept.any()) else "converged",
        "hyper_iterations": iteration,
        "hyper_gradient": float(free.max()) if len(free) else 0.0,
        "precisions_kept": int(kept.sum()),
    }
    notes = []
    if report["precisions_kept"]:
        notes.append(
            f"hyper={rule}: the precisions of {report['precisions_kept']:,} of {len(start):,} weights ran to a bound "
            "(no curvature, or a weight that is zero or goes to it) and keep their start value"
        )
    if change > tolerance:
        report["hyper_status"] = "not converged"
        notes.append(
            f"hyper={rule}: the precisions still move by {change:.2g} of a logarithm after {iteration} steps; "
            "raise hyper.steps"
        )
    return precisions, report, tuple(notes)
