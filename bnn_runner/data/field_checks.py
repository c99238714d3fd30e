"""Checks of field values, with the same messages for every data set."""

from __future__ import annotations

import math


def is_integer(value: object) -> bool:
    """Whether a value is a whole number (booleans are not)."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a finite number (booleans are not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def count_problems(least: int, **counts: object) -> list[str]:
    """Problems with numbers of points to generate, each of which must be at least `least`."""
    return [
        f"data.{key} must be a whole number of at least {least} (points to generate); got {count}."
        for key, count in counts.items()
        if not (isinstance(count, int) and is_integer(count) and count >= least)
    ]


def noise_problems(noise: object) -> list[str]:
    """Problems with a standard deviation of noise."""
    if isinstance(noise, (int, float)) and is_number(noise) and noise > 0:
        return []
    return [f"data.noise must be positive (a standard deviation); got {noise}. Use for example data.noise=0.2."]
