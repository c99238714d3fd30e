"""Where a search for several precisions starts; their evidence has many maxima."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from bnn_runner.base import PrecisionProblem
from bnn_runner.hyper.bfgs import maximise
from bnn_runner.hyper.search_end import spent

SINGLE_STEPS = 100
"""Most iterations for the best single precision, which takes about ten."""


def value(problem: PrecisionProblem, logs: Tensor, ties: Tensor) -> float:
    """The evidence in nats; −∞ where it is not finite or not taken at v*."""
    each = logs.exp()[ties]
    with torch.no_grad():
        found = float(problem.evidence(logs.exp() if len(logs) == 1 else each))
    return found if math.isfinite(found) and not spent(problem, each) else -math.inf


def best_single(problem: PrecisionProblem, logs: Tensor, low: float, high: float) -> Tensor:
    """The single precision with the largest evidence, for every variable, [G]; `logs` [G] where none is found."""
    one, free = logs.mean(0, keepdim=True), torch.ones(1, dtype=torch.bool)

    def unknown(logs: Tensor) -> bool:
        return spent(problem, logs.exp().expand(len(problem.names)))

    found = maximise(
        lambda point: problem.evidence(point.exp()), one, free, math.log(low), math.log(high), SINGLE_STEPS, unknown
    )
    return found.point.expand(len(logs)).clone() if found.finite else logs


def best_start(
    problem: PrecisionProblem,
    ties: Tensor,
    initial: Tensor,
    low: float,
    high: float,
    further: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The start [G] with the largest evidence: the training prior, the best single precision, or what `further` gives.

    A single precision has one start, and so has an evidence from samples, whose values are expensive.

    Args:
        problem: the evidence.
        ties: which variable each group belongs to, [T].
        initial: the training prior's log precisions, [G].
        low: smallest precision.
        high: largest precision.
        further: a further start from the better of the first two (some EM steps, which never lower the evidence).
    """
    if len(initial) == 1 or problem.dimension_samples is not None:
        return initial

    def by_evidence(logs: Tensor) -> float:
        return value(problem, logs, ties)

    best = max((initial, best_single(problem, initial, low, high)), key=by_evidence)
    if further is None or not problem.sizes or problem.exhausted():
        return best
    return max((best, further(best)), key=by_evidence)
