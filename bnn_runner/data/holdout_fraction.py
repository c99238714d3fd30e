"""A share of the points as the test set: the check of its field, and the number of points."""

from __future__ import annotations

from bnn_runner.data.field_checks import is_number


def fraction_problems(fraction: float) -> list[str]:
    """Problems with the share of points to test on."""
    if is_number(fraction) and 0 < fraction < 1:
        return []
    return [
        f"data.test_fraction must be between 0 and 1 (the share of points to test on); got {fraction}. "
        "Use for example data.test_fraction=0.2."
    ]


def halves_of(rows: int, test_fraction: float) -> tuple[int, int]:
    """Numbers of points to train (and validate) on and to test on, at least one of each."""
    test = min(rows - 1, max(1, round(test_fraction * rows)))
    return rows - test, test
