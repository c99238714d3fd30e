"""Student's t distribution for whole degrees of freedom, by its finite series, and Holm's rule."""

from __future__ import annotations

import math
from collections.abc import Sequence


def two_sided(t: float, freedom: int) -> float:
    """P(|T| > |t|) with `freedom` degrees of freedom (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4).

    >>> round(two_sided(4.302653, 2), 6)
    0.05
    """
    if math.isnan(t):
        return math.nan
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, freedom, 2):  # terms cos^0, cos^2, ... or cos, cos^3, ...
        total += term
        term *= cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, 1 - inside)


def quantile(level: float, freedom: int) -> float:
    """The t with P(|T| > t) = `level`, by bisection.

    >>> round(quantile(0.05, 2), 3), round(quantile(0.05, 9), 3)
    (4.303, 2.262)
    """
    low, high = 0.0, 1.0
    while two_sided(high, freedom) > level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if two_sided(middle, freedom) > level else (low, middle)
    return high


def holm(p_values: Sequence[float], level: float) -> list[bool]:
    """Which hypotheses are rejected at a familywise level (Holm 1979); NaN never is, but counts as a comparison.

    >>> holm([0.04, 0.001, 0.03], 0.05)
    [False, True, False]
    """
    order = sorted(range(len(p_values)), key=lambda i: math.inf if math.isnan(p_values[i]) else p_values[i])
    rejected = [False] * len(p_values)
    for place, i in enumerate(order):
        if not p_values[i] <= level / (len(p_values) - place):
            break
        rejected[i] = True
    return rejected
