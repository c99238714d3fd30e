"""How a search of precisions ended: the status of every rule is decided here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bnn_runner.base import Choice, HyperStatus, PrecisionProblem
from bnn_runner.hyper.monte_carlo_error import dimension_errors
from bnn_runner.hyper.tied_precisions import sum_by

GRADIENT_NATS = 1e-2
"""Largest derivative of the evidence in a free log precision at which a search has converged."""


@dataclass(frozen=True)
class SearchEnd:
    """Where a search of G log precisions ended.

    Attributes:
        logs: the log precisions, [G].
        gradient: the derivative of the evidence in them, [G].
        free: those that were searched to the end, [G]; the others ran away and are held (see `runaway`).
        iterations: of the search.
        diverged: a value that is not finite was met, and all precisions keep their start values.
        notes: name the precisions that are held.
    """

    logs: Tensor
    gradient: Tensor
    free: Tensor
    iterations: int
    diverged: bool = False
    notes: tuple[str, ...] = ()

    @property
    def largest_gradient(self) -> float:
        """The largest derivative in a free log precision, in nats; 0 where none is free."""
        return float(self.gradient[self.free].abs().max()) if bool(self.free.any()) else 0.0


def evidence_terms(problem: PrecisionProblem, logs: Tensor, ties: Tensor) -> tuple[Tensor, Tensor]:
    """γ_g and λ_g ‖w_g‖² of each variable, [G]; the evidence's derivative in log λ_g is half their difference."""
    each = logs.exp()[ties]
    dimensions, squares = problem.effective_dimensions(each), problem.squares(each)
    return sum_by(dimensions, ties), sum_by(each * squares, ties)


def gradient_error(problem: PrecisionProblem, precisions: Tensor, penalties: Tensor) -> float:
    """The largest error of a derivative because v* was not quite reached, in nats.

    With L_h at most `gap` above its minimum, ‖v − v*‖_Λ ≤ √(2 gap), and λ_g ‖v_g‖² / 2 changes by at
    most √(2 gap · λ_g ‖v_g‖²) (Cauchy–Schwarz).
    """
    largest = float(penalties.max()) if len(penalties) else 0.0
    return math.sqrt(max(2 * problem.gap(precisions) * largest, 0.0))


def spent(problem: PrecisionProblem, precisions: Tensor) -> bool:
    """Whether v* was not reached at these precisions and no pass over the data is left to search it."""
    return problem.exhausted() and problem.gap(precisions) > 0


def status_of(gradient: float, error: float, exhausted: bool, held: bool, diverged: bool = False) -> HyperStatus:
    """The status of a search, for every rule.

    Args:
        gradient: the largest derivative of the evidence in a free log precision, in nats.
        error: its largest error because v* was not quite reached, in nats.
        exhausted: no pass over the data is left to search v*.
        held: some precision ran away.
        diverged: a value that is not finite was met.
    """
    if diverged:
        return "diverged"
    if not error <= GRADIENT_NATS or (exhausted and not gradient <= GRADIENT_NATS):
        return "v* not reached"
    if not gradient <= GRADIENT_NATS:
        return "not converged"
    return "at bound" if held else "converged"


def concluded(rule: str, problem: PrecisionProblem, ties: Tensor, end: SearchEnd) -> Choice:
    """The choice [T] of a search over variables `ties` [T], with its status, facts and notes."""
    precisions, notes = end.logs.exp()[ties], list(end.notes)
    facts: dict[str, Any] = {"hyper_iterations": end.iterations}
    if end.diverged:
        values = ", ".join(f"{v:.3g}" for v in sorted(set(end.logs.exp().tolist())))
        notes.append(
            f"hyper={rule}: the search met a value that is not finite, so all precisions keep their start values "
            f"({values})"
        )
        return Choice(precisions, "diverged", facts, tuple(notes))
    gradient = end.largest_gradient
    _, penalties = evidence_terms(problem, end.logs, ties)
    error = gradient_error(problem, precisions, penalties[end.free])
    status = status_of(gradient, error, problem.exhausted(), held=not bool(end.free.all()))
    notes += status_notes(rule, status, gradient, error, end.iterations)
    facts["hyper_gradient"] = gradient
    if problem.dimension_samples is not None and rule != "evidence":
        errors, unsure = dimension_errors(problem.dimension_samples(precisions), ties, problem.names)
        facts, notes = facts | errors, [*notes, *unsure]
    return Choice(precisions, status, facts, tuple(notes))


def status_notes(rule: str, status: HyperStatus, gradient: float, error: float, iterations: int) -> Sequence[str]:
    """What to do about a search that has not converged; empty for other statuses."""
    if status == "v* not reached":
        known = f"{gradient:.2g} nats" if error <= GRADIENT_NATS else f"only known to within {error:.2g} nats"
        return (
            f"hyper={rule}: the search ended after {iterations} iterations because v* was not reached: the evidence's "
            f"derivative in a log precision is {known}. Raise method.tangent_passes, or use method.mode=network",
        )
    if status == "not converged":
        return (
            f"hyper={rule}: the evidence's derivative in a log precision is still {gradient:.2g} nats after "
            f"{iterations} iterations; raise hyper.steps",
        )
    return ()
