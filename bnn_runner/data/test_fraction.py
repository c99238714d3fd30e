"""A share of the points as test set: its field checked, and how many points it is."""

from __future__ import annotations

from bnn_runner.data.field_checks import is_number


def fraction_problems(fraction: float) -> list[str]:
    """What is wrong with a share of points to test on."""
    if is_number(fraction) and 0 < fraction < 1:
        return []
    return [
        f"data.test_fraction={fraction} cannot be. It is the share of points to test on. "
        "Give a number between 0 and 1, for example data.test_fraction=0.2."
    ]


def halves_of(rows: int, test_fraction: float) -> tuple[int, int]:
    """Points to train (and validate) on, and to test on: at least one of each."""
    test = min(rows - 1, max(1, round(test_fraction * rows)))
    return rows - test, test
