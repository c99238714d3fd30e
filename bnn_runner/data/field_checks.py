"""Checks on the values of fields, worded alike for every data set."""

from __future__ import annotations

import math


def is_integer(value: object) -> bool:
    """Whether a field holds a whole number (True and False do not count)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a field holds a finite number (True and False do not count)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def count_problems(least: int, **counts: object) -> list[str]:
    """What is wrong with numbers of points to generate, each of at least `least`."""
    return [
        f"data.{key}={count} cannot be. It is a number of points to generate. Give a whole number of at least {least}."
        for key, count in counts.items()
        if not (isinstance(count, int) and is_integer(count) and count >= least)
    ]


def noise_problems(noise: object) -> list[str]:
    """What is wrong with a standard deviation of noise."""
    if isinstance(noise, (int, float)) and is_number(noise) and noise > 0:
        return []
    return [
        f"data.noise={noise} cannot be. It is the standard deviation of the noise on the data. "
        "Give a number above 0, for example data.noise=0.2."
    ]
