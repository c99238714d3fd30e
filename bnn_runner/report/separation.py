"""Which rows of a table are bold, and which difference would have been.

Bold has one meaning in every table and format: the best row of its data set, separated from each of its rivals. Each
comparison is a two-sided t test of the difference from the nearest rival (`differences`), and Holm's rule over all
comparisons of the table (data sets times columns) keeps the chance that a table has any bold number at all below 5 %
where nothing differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bnn_runner.report.differences import FEWEST, Difference, Measured, difference, lower_bound
from bnn_runner.report.student import holm, quantile

LEVEL = 0.05


@dataclass(frozen=True)
class Candidate:
    """A row in one column: its place in the table, its scores by seed, and whether it may be bold itself."""

    place: int
    scores: Mapping[int, Measured]
    may_win: bool = True

    @property
    def mean(self) -> float:
        return math.fsum(m.value for m in self.scores.values()) / len(self.scores)


@dataclass(frozen=True)
class Outcome:
    """Of one comparison: the best row, the p-value against its rivals, and its difference from the second."""

    winner: int
    p_value: float
    second: Difference


def compare(candidates: Sequence[Candidate], sign: float) -> Outcome | None:
    """The best candidate (sign 1: higher is better) against every other; None if no comparison is possible.

    The p-value is the largest of those against each rival. Below three seeds of the best two rows it is 1.
    """
    if len(candidates) < 2 or not sign:
        return None
    best, *rivals = sorted(candidates, key=lambda c: -sign * c.mean)
    second = difference(best.scores, rivals[0].scores)
    p_value = second.p_value if best.may_win else 1.0
    for rival in rivals[1:]:
        if p_value > LEVEL:  # it can only rise
            break
        bound = lower_bound(best.scores, rival.scores)
        p_value = max(p_value, bound if bound > LEVEL else difference(best.scores, rival.scores).p_value)
    return Outcome(best.place, p_value, second)


def separated(outcomes: Sequence[Outcome]) -> list[bool]:
    """Which comparisons of a table are significant at 5 % over all of them (Holm)."""
    return holm([o.p_value for o in outcomes], LEVEL)


def detectable(outcome: Outcome, comparisons: int) -> float:
    """The difference between the best two rows that would surely be bold: t times its error; NaN if none would.

    The t is that of the first step of Holm's rule, 5 % over the number of comparisons.
    """
    second = outcome.second
    if second.n < FEWEST or not second.error > 0:
        return math.nan
    return quantile(LEVEL / comparisons, second.n - 1) * second.error
