"""Whether an order of methods holds: each step judged by its paired error."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bnn_runner.report.differences import FEWEST, Difference, Measured, difference
from bnn_runner.report.grouping import Group, distinguishing_fields
from bnn_runner.report.separation import LEVEL
from bnn_runner.report.student import quantile

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Step:
    """The difference between two neighbours of an order, and half the width of its confidence interval."""

    names: tuple[str, str]
    difference: Difference
    half_width: float

    @property
    def text(self) -> str:
        """`a − b = 0.12 ± 0.02 (n = 3)`; the error is over seeds and test points."""
        one, two = self.names
        d = self.difference
        error = "" if math.isnan(d.error) else f" ± {d.error:.2g}"
        return f"{one} − {two} = {d.mean:.3g}{error} (n = {d.n})"


@dataclass(frozen=True)
class Order:
    """Methods from the larger to the smaller quantity, the steps between them, and the verdict."""

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    verdict: str

    @property
    def weakest(self) -> Step:
        """The step that is farthest from holding."""
        return min(self.steps, key=lambda s: s.difference.mean / s.half_width if 0 < s.half_width < math.inf else 0.0)


def judge(scores: Mapping[str, Mapping[int, Measured]], margin: float = 0.0) -> Order | None:
    """Whether each method's quantity is above the next one's, in the order of `scores`.

    With confidence intervals of the steps at 5 % over all of them together, `holds` means that every interval is above
    −`margin`, `does not hold` that one is below it, and `undecided` the rest: too few seeds, or too small a difference.
    None with fewer than two methods.
    """
    names = tuple(name for name, found in scores.items() if found)
    if len(names) < 2:
        return None
    steps = []
    for one, two in itertools.pairwise(names):
        found = difference(scores[one], scores[two])
        known = found.n >= FEWEST and found.error > 0
        width = quantile(LEVEL / (len(names) - 1), found.n - 1) * found.error if known else math.inf
        steps.append(Step((one, two), found, width))
    if all(s.difference.mean - s.half_width > -margin for s in steps):
        verdict = HOLDS
    elif any(s.difference.mean + s.half_width < -margin for s in steps):
        verdict = FAILS
    else:
        verdict = UNDECIDED
    return Order(names, tuple(steps), verdict)


def alternatives(groups: Mapping[str, Sequence[Group]]) -> list[tuple[str, dict[str, Group]]]:
    """One row for each method, in every way that their settings allow, each with the settings in words.

    A method with one row takes part in all of them. Of several methods with several rows, those with the same settings
    belong together: with two rules for the prior, each Laplace by `grid` is compared with the other one by `grid`.
    """
    own: dict[str, dict[str, Group]] = {}
    for method, rows in groups.items():
        fields = distinguishing_fields(rows)
        texts = (" ".join(f"{name}={texts[i]}" for name, texts in fields.items()) for i in range(len(rows)))
        own[method] = dict(zip(texts, rows, strict=True))
    single = {m: next(iter(rows.values())) for m, rows in own.items() if len(rows) == 1}
    settings = dict.fromkeys(text for rows in own.values() if len(rows) > 1 for text in rows)
    if not settings:
        return [("", single)]
    return [(text, single | {m: rows[text] for m, rows in own.items() if text in rows}) for text in settings]
