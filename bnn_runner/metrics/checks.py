"""Checks of metric settings; all problems are reported at once."""

from __future__ import annotations

from collections.abc import Sequence

from bnn_runner.errors import UserError


def positive_integers(metric: str, **settings: int | Sequence[int]) -> None:
    """Raise `UserError` unless every setting is an integer of at least 1, or a non-empty list of such integers."""
    problems = []
    for key, value in settings.items():
        values = [value] if isinstance(value, int) else list(value)
        if not values or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in values):
            wanted = "a whole number" if isinstance(value, int) else "a list of whole numbers"
            problems.append(f"metric.{metric}.{key} must be {wanted} of at least 1; got {value}.")
    if problems:
        raise UserError(*problems)


def fractions(metric: str, **settings: Sequence[float]) -> None:
    """Raise `UserError` unless every setting is a non-empty list of numbers strictly between 0 and 1."""
    problems = [
        f"metric.{metric}.{key} must be a list of numbers between 0 and 1; got {list(values)}."
        for key, values in settings.items()
        if not values or any(not 0 < v < 1 for v in values)
    ]
    if problems:
        raise UserError(*problems)
