"""Which of several precisions the validation part prefers: the best, or the smallest that is nearly as good.

A posterior with a smaller precision is more uncertain, which costs little of the marginal score near its best and gains
much of the joint one. "Nearly" is in paired standard errors: the one-standard-error rule (Breiman et al. 1984).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

INDIFFERENT_NATS = 5e-4
"""A difference per label that counts as none. Where validation prefers the network itself, every posterior is worse by
many paired standard errors, however little it is; one that costs this much gains far more jointly."""


def mean(values: Tensor) -> float:
    """Of the scores of points or blocks, in nats."""
    return float(values.mean())


def paired(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean difference of two sets of scores [R, M] of M points or blocks, and its standard error; 0 if M is 1.

    The error is that of the differences of one permutation; R of them share their points and make it no smaller.
    """
    each = one - other
    count = each.shape[1]
    error = math.sqrt(float(each.var(dim=1).mean()) / count) if count > 1 else 0.0
    return float(each.mean()), error


def highest(scores: Sequence[Tensor]) -> int | None:
    """The one with the highest finite mean; None if there is none."""
    finite = [(mean(score), i) for i, score in enumerate(scores) if math.isfinite(mean(score))]
    return max(finite)[1] if finite else None


def preferred(scores: Sequence[Tensor], standard_errors: float, least: int = 0, labels: int = 1) -> int | None:
    """The first of those below the best, without a gap, that are worse by at most so many paired standard errors.

    Also of those that are worse by at most `INDIFFERENT_NATS` per label.

    Args:
        scores: of each precision, [R, M], in ascending order of the precisions.
        standard_errors: 0 for the best itself.
        least: the first that may be selected without being the best.
        labels: of a point or block.

    Returns:
        None where no score is finite.
    """
    best = highest(scores)
    if best is None or standard_errors == 0:
        return best
    first = best
    while first > least and math.isfinite(mean(scores[first - 1])):
        difference, error = paired(scores[first - 1], scores[best])
        if difference < -max(standard_errors * error, INDIFFERENT_NATS * labels):
            break
        first -= 1
    return first
