"""Which of several precisions the validation part prefers: by one score, or by two with the error of the first.

The standard error of a difference is paired: that of the mean over points of the difference at each point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from bnn_runner.base import ValidationScore

Preference = Literal["marginal", "dyadic", "joint", "marginal_one_se", "dyadic_one_se"]
NEEDS: dict[Preference, tuple[ValidationScore, ...]] = {
    "marginal": ("marginal",),
    "dyadic": ("dyadic",),
    "joint": ("joint",),
    "marginal_one_se": ("marginal",),
    "dyadic_one_se": ("marginal", "dyadic"),
}
"""The scores that each preference compares, the one that limits the choice first."""


def mean(values: Tensor) -> float:
    """Of the scores of points or blocks, in nats."""
    return float(values.mean())


def paired(one: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean difference of two rows of scores [1, V] and its standard error; 0 for one point."""
    each = (one - other).flatten()
    error = float(each.std() / math.sqrt(len(each))) if len(each) > 1 else 0.0
    return float(each.mean()), error


def highest(rows: Sequence[Mapping[ValidationScore, Tensor]], score: ValidationScore) -> int | None:
    """The row with the highest finite mean; None if there is none."""
    finite = [(mean(row[score]), i) for i, row in enumerate(rows) if math.isfinite(mean(row[score]))]
    return max(finite)[1] if finite else None


def preferred(rows: Sequence[Mapping[ValidationScore, Tensor]], preference: Preference) -> int | None:
    """The row that is selected; None where no score is finite.

    marginal, dyadic, joint: the highest. marginal_one_se: the first row of those around the highest marginal whose
    marginal is at most one standard error lower. dyadic_one_se: of the same rows the one with the highest dyadic score.

    Args:
        rows: scores of each precision, in ascending order of the precisions.
        preference: the rule.
    """
    best = highest(rows, NEEDS[preference][0])
    if best is None or preference in ("marginal", "dyadic", "joint"):
        return best
    near = _within_one_error(rows, best)
    if preference == "marginal_one_se":
        return near[0]
    among = highest([rows[i] for i in near], "dyadic")
    return best if among is None else near[among]


def _within_one_error(rows: Sequence[Mapping[ValidationScore, Tensor]], best: int) -> list[int]:
    """The rows around `best`, without a gap, whose marginal is at most one standard error of the difference lower."""

    def near(i: int) -> bool:
        if not math.isfinite(mean(rows[i]["marginal"])):
            return False
        difference, error = paired(rows[i]["marginal"], rows[best]["marginal"])
        return difference >= -error

    first = last = best
    while first > 0 and near(first - 1):
        first -= 1
    while last < len(rows) - 1 and near(last + 1):
        last += 1
    return list(range(first, last + 1))
