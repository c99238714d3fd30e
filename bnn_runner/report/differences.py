"""The difference of two rows in one score, with an error that holds over seeds and over test points.

Over seeds: the standard error of the mean of the n differences seed by seed, with n − 1 degrees of freedom. It does not
see that all seeds may share one test set, which another test set would change. Over points: the standard error of the
mean over test points (or blocks) of the differences point by point. What both rows share, point by point and seed by
seed, cancels in both.

Where the seeds share their test points, the two errors are of different things and add in quadrature. Where each seed
has its own test points (random splits), the spread over seeds contains the points' error, and the larger of the two
counts: three seeds may agree by chance. With n − 1 degrees of freedom the limits hold at least at their level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bnn_runner.report.point_scores import PointScores
from bnn_runner.report.student import two_sided

if TYPE_CHECKING:
    import numpy as np

FEWEST = 3
"""Seeds of a comparison: with two, a true null exceeds every limit that is of use too often, or no limit is of use."""
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Measured:
    """One score of one seed: its value, its standard error over test points, and how to read its points."""

    value: float
    standard_error: float
    points: Callable[[], PointScores | None]


@dataclass(frozen=True)
class Difference:
    """Mean over `n` seeds, its errors over seeds and over points, and whether all seeds share their test points.

    An error is NaN where nothing is known of it.
    """

    mean: float
    n: int
    over_seeds: float
    over_points: float
    shared: bool

    @property
    def error(self) -> float:
        """Both errors together; NaN if one is unknown."""
        if self.shared or math.isnan(self.over_seeds) or math.isnan(self.over_points):
            return math.hypot(self.over_seeds, self.over_points)
        return max(self.over_seeds, self.over_points)

    @property
    def p_value(self) -> float:
        """Two-sided p-value of no difference by Student's t; 1 where nothing can be said.

        That is so with fewer than three seeds, without a known error, and where the error is zero: equal numbers are a
        tie, or values that have nothing random.
        """
        if self.n < FEWEST or not math.isfinite(self.mean) or not self.error > _ROUNDING * abs(self.mean):
            return 1.0
        return two_sided(self.mean / self.error, self.n - 1)


def difference(one: Mapping[int, Measured], two: Mapping[int, Measured]) -> Difference:
    """`one` − `two`, over the seeds that both have; over all, unpaired, if both have three seeds but share fewer."""
    seeds = [s for s in one if s in two]
    if len(seeds) < FEWEST <= min(len(one), len(two)):
        return _unpaired(list(one.values()), list(two.values()))
    if not seeds:
        return Difference(math.nan, 0, math.nan, math.nan, True)
    gaps = [one[s].value - two[s].value for s in seeds]
    mean = math.fsum(gaps) / len(gaps)
    over_points, shared = _over_points([(one[s], two[s]) for s in seeds])
    return Difference(mean, len(seeds), _over_seeds(gaps), over_points, shared)


def lower_bound(one: Mapping[int, Measured], two: Mapping[int, Measured]) -> float:
    """A p-value that `difference(...).p_value` cannot be below, without reading any points."""
    seeds = [s for s in one if s in two]
    if len(seeds) < FEWEST:
        return 1.0 if min(len(one), len(two)) < FEWEST else 0.0
    gaps = [one[s].value - two[s].value for s in seeds]
    error, mean = _over_seeds(gaps), math.fsum(gaps) / len(gaps)
    return two_sided(mean / error, len(gaps) - 1) if error > 0 else 0.0


def _over_seeds(values: Sequence[float]) -> float:
    n = len(values)
    if n < 2:
        return math.nan
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def _over_points(pairs: Sequence[tuple[Measured, Measured]]) -> tuple[float, bool]:
    """The error over points of the mean of the pairs' differences, and whether all pairs share their test points."""
    found = [(a.points(), b.points()) for a, b in pairs]
    gaps, units, sets = [], set(), set()
    for one, two in found:
        if one is None or two is None or one.units != two.units or len(one.values) != len(two.values):
            # Not the same points, or none kept: the two errors as if they were independent, which is too careful.
            errors = [math.hypot(a.standard_error, b.standard_error) for a, b in pairs]
            return _together(errors, shared=True), True
        gaps.append(one.values - two.values)
        units.add(one.units)
        sets.add(one.test_set)
    if len(units) == 1:  # the same points for every seed: first the mean over seeds, then the spread over points
        return _standard_error(sum(gaps[1:], gaps[0]) / len(gaps)), True
    errors = [_standard_error(g) for g in gaps]
    return _together(errors, shared=len(sets) == 1), len(sets) == 1


def _together(errors: Sequence[float], shared: bool) -> float:
    """Of the mean over seeds: errors of the same test points stay, those of different points average out."""
    mean_square = math.fsum(e**2 for e in errors) / len(errors)
    return math.sqrt(mean_square if shared else mean_square / len(errors))


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _unpaired(one: Sequence[Measured], two: Sequence[Measured]) -> Difference:
    """Two rows with seeds of their own: both spreads, and the degrees of freedom of the smaller."""
    values = [[m.value for m in side] for side in (one, two)]
    means = [math.fsum(v) / len(v) for v in values]
    over_seeds = math.hypot(*(_over_seeds(v) for v in values))
    over_points = math.hypot(*(_together([m.standard_error for m in side], shared=True) for side in (one, two)))
    return Difference(means[0] - means[1], min(len(one), len(two)), over_seeds, over_points, True)
