"""One precision for each weight, where the curvature is diagonal and the evidence falls apart into weights."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bnn_runner.base import Choice, HyperStatus


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
) -> Choice:
    """The best precision of each weight, [P].

    Each round takes `best_precisions` at the squares of the last; where these do not move (the
    evidence at w*), the second round changes nothing. A weight whose λ leaves `low` to `high` (no curvature, or
    a weight that is zero, or goes to it as its λ grows) keeps its start value, and they are counted.

    Args:
        rule: the rule's name, for notes.
        diagonal: h [P], the curvature.
        start: λ [P] to begin with.
        squares: w_j² [P], which may depend on the precisions.
        steps: most rounds.
        tolerance: change of log λ that ends the search.
        low: bound of λ below.
        high: bound of λ above.
    """
    precisions, change, iteration = start, math.inf, 0
    kept = torch.zeros_like(start, dtype=torch.bool)
    while iteration < steps and change > tolerance:
        iteration += 1
        terms = squares(precisions).to(start)
        if not bool(torch.isfinite(terms).all()):
            note = f"hyper={rule}: the search met a value that is not finite; every precision keeps its start value"
            return Choice(start, "diverged", {"hyper_iterations": iteration}, (note,))
        found = best_precisions(diagonal, terms)
        kept |= ~((found > low) & (found < high))
        moved = torch.where(kept, start, found)
        change = float((moved / precisions).log().abs().max())
        precisions = moved
    gradient = 0.5 * (diagonal / (diagonal + precisions) - precisions * squares(precisions).to(start))
    free, num_kept = gradient[~kept].abs(), int(kept.sum())
    status: HyperStatus = "at bound" if num_kept else "converged"
    notes = []
    if num_kept:
        notes.append(
            f"hyper={rule}: the precisions of {num_kept:,} of {len(start):,} weights ran to a bound "
            "(no curvature, or a weight that is zero or goes to it) and keep their start value"
        )
    if change > tolerance:
        status = "not converged"
        notes.append(
            f"hyper={rule}: the precisions still move by {change:.2g} of a logarithm after {iteration} steps; "
            "raise hyper.steps"
        )
    facts = {
        "hyper_iterations": iteration,
        "hyper_gradient": float(free.max()) if len(free) else 0.0,
        "precisions_kept": num_kept,
    }
    return Choice(precisions, status, facts, tuple(notes))
