"""One precision for each weight, where the curvature is diagonal and the evidence is a sum over weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bnn_runner.base import Choice, PrecisionProblem
from bnn_runner.hyper.search_end import gradient_error, spent, status_notes, status_of
from bnn_runner.hyper.tied_precisions import inside


def best_precisions(diagonal: Tensor, squares: Tensor) -> Tensor:
    """The λ_j that maximise −½ [λ_j w_j² + log(1 + h_j/λ_j)], for h [P] and w² [P].

    The derivative in log λ_j is ½ [h/(h + λ) − λ w²], whose only positive root is
    λ = 2 / (w² + √(w⁴ + 4 w²/h)): about 1/w² where the data fix the weight (h w² ≫ 1). It is 0
    for h = 0, infinite for w = 0, and NaN where both are.
    """
    return 2 / (squares + (squares.square() + 4 * squares / diagonal).sqrt())


def for_each_weight(
    problem: PrecisionProblem, rule: str, steps: int, tolerance: float, low: float, high: float
) -> Choice:
    """The best precision of each weight, [P], for a diagonal curvature.

    Each round takes `best_precisions` at the squares of the last one; where these are constant (the
    evidence at w*), the second round changes nothing. A weight whose λ leaves the bounds (no curvature, or
    a weight that is zero, or tends to zero as its λ grows) keeps its start value; such weights are counted. The search
    has converged when the evidence's derivatives are small (see `search_end`) and the precisions no longer change: a
    weight that is being pruned has a small derivative all the time.

    Args:
        problem: with curvature h [P] and the squares w_j² [P], which may depend on the precisions.
        rule: the rule's name, for notes.
        steps: most rounds.
        tolerance: change of log λ that ends the search.
        low: smallest λ.
        high: largest λ.
    """
    assert problem.diagonal is not None, "refused before the fit"
    diagonal = problem.diagonal
    start = inside(problem.start, low, high).repeat_interleave(torch.tensor(problem.sizes))
    precisions, known, change, iteration = start, start, math.inf, 0
    kept = torch.zeros_like(start, dtype=torch.bool)
    while iteration < steps and change > tolerance:
        terms = problem.squares(precisions).to(start)
        if spent(problem, precisions):
            precisions = known
            break
        known, iteration = precisions, iteration + 1
        if not bool(torch.isfinite(terms).all()):
            note = f"hyper={rule}: the search met a value that is not finite, so all precisions keep their start values"
            return Choice(start, "diverged", {"hyper_iterations": iteration}, (note,))
        found = best_precisions(diagonal, terms)
        kept |= ~((found > low) & (found < high))
        moved = torch.where(kept, start, found)
        change = float((moved / precisions).log().abs().max())
        precisions = moved
    penalties = precisions * problem.squares(precisions).to(start)
    gradient = (0.5 * (diagonal / (diagonal + precisions) - penalties))[~kept].abs()
    largest, num_kept = float(gradient.max()) if len(gradient) else 0.0, int(kept.sum())
    error = gradient_error(problem, precisions, penalties[~kept])
    status = status_of(largest, error, problem.exhausted(), held=num_kept > 0)
    notes = [*status_notes(rule, status, largest, error, iteration)]
    if num_kept:
        notes.insert(
            0,
            f"hyper={rule}: the precisions of {num_kept:,} of {len(start):,} weights reached a bound "
            "(no curvature, or a weight that is zero or tends to zero) and keep their start values",
        )
    if change > tolerance and status in ("converged", "at bound"):
        status = "v* not reached" if problem.exhausted() else "not converged"
        remedy = "method.tangent_passes" if problem.exhausted() else "hyper.steps"
        notes.append(f"hyper={rule}: after {iteration} steps log λ still changes by {change:.2g}; raise {remedy}")
    facts = {"hyper_iterations": iteration, "hyper_gradient": largest, "precisions_kept": num_kept}
    return Choice(precisions, status, facts, tuple(notes))
