"""Numbers in tables: rounded to two digits of their error, with the number of seeds where it differs."""

from __future__ import annotations

import math
from typing import Literal

from bnn_runner.report.grouping import ABSENT
from bnn_runner.report.tables import NOT_CONVERGED, Entry

Summary = Literal["mean", "median"]


def number(mean: float, error: float = math.nan) -> str:
    """`-0.532 ± 0.012`: two digits of the standard error, and the mean to the same place; four digits without one."""
    if not math.isfinite(mean):
        return "NaN" if math.isnan(mean) else f"{mean}"
    if not math.isfinite(error):
        return _plain(mean, 4)
    if error <= 1e-12 * abs(mean):  # equal numbers, up to rounding: no error is known
        return _plain(mean, 4)
    if max(abs(mean), error) >= 1e6 or error < 1e-6:
        return f"{mean:.4g} ± {error:.2g}"
    places = max(0, 1 - math.floor(math.log10(error)))
    return f"{mean:.{places}f} ± {error:.{places}f}"


def one_seed(value: float, error: float) -> str:
    """`-0.532 (0.012)`: a single seed's value, and in parentheses its standard error over the test points.

    >>> one_seed(-0.5321, 0.0123)
    '-0.532 (0.012)'
    """
    text, plus_minus, spread = number(value, error).partition(" ± ")
    return f"{text} ({spread})" if plus_minus else text


def quartiles_text(lower: float, median: float, upper: float) -> str:
    """`-0.532 [-0.551, -0.498]`: median and quartiles, with two digits of half their distance."""
    half = (upper - lower) / 2
    if half <= 1e-12 * abs(median) or max(abs(lower), abs(upper)) >= 1e6 or half < 1e-6:
        return f"{median:.4g} [{lower:.4g}, {upper:.4g}]"
    places = max(0, 1 - math.floor(math.log10(half)))
    return f"{median:.{places}f} [{lower:.{places}f}, {upper:.{places}f}]"


def _plain(value: float, digits: int) -> str:
    if value != 0 and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 - (math.floor(math.log10(abs(value))) if value else 0)
    return f"{value:.{min(max(places, 0), 6)}f}"


def entry_text(entry: Entry | None, row_n: int, summary: Summary = "mean") -> str:
    """The text of an entry; n only if it is not that of the row."""
    if entry is None:
        return ABSENT
    seeds = entry.n + entry.not_applicable
    if entry.not_applicable:
        return "n/a" if entry.n == 0 else f"n/a ({entry.not_applicable} of {seeds})"
    if entry.nonfinite:
        return f"{number(entry.mean)} ({entry.nonfinite} of {seeds})"
    if summary == "median" and entry.n > 1:
        text = quartiles_text(*entry.quartiles)
    elif entry.n == 1 and math.isfinite(entry.points_error):
        text = one_seed(entry.mean, entry.points_error)
    else:
        text = number(entry.mean, entry.standard_error)
    text += NOT_CONVERGED if entry.marked else ""
    return text if entry.n == row_n else f"{text} (n={entry.n})"
