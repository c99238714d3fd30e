"""Checks of metric settings: every problem at once, naming the key."""

from __future__ import annotations

from collections.abc import Sequence

from bnn_runner.errors import UserError


def positive_integers(metric: str, **settings: int | Sequence[int]) -> None:
    """Raise `UserError` unless every setting is an integer of at least 1, or a non-empty list of such."""
    problems = []
    for key, value in settings.items():
        values = [value] if isinstance(value, int) else list(value)
        if not values or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in values):
            problems.append(
                f"metric.{metric}.{key}={value} cannot be used. It takes whole numbers of at least 1. "
                f"Correct metric.{metric}.{key}."
            )
    if problems:
        raise UserError(*problems)


def fractions(metric: str, **settings: Sequence[float]) -> None:
    """Raise `UserError` unless every setting is a non-empty list of numbers strictly between 0 and 1."""
    problems = [
        f"metric.{metric}.{key}={list(values)} cannot be used. It takes numbers between 0 and 1. "
        f"Correct metric.{metric}.{key}."
        for key, values in settings.items()
        if not values or any(not 0 < v < 1 for v in values)
    ]
    if problems:
        raise UserError(*problems)
