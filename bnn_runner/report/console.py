"""The table that a single run prints at its end: plain text, as wide as the terminal and no wider."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from bnn_runner.report.columns import (
    AT_DRAWS,
    BY_DRAWS,
    CENTRE,
    EFFECTIVE_DRAWS,
    EXACT,
    GROUP_ORDER,
    MINUS_CENTRE,
    Column,
    group_of,
    is_companion,
)
from bnn_runner.report.numbers import number
from bnn_runner.report.read_cells import ScoreRow

if TYPE_CHECKING:
    from bnn_runner.scoring import Score

_TITLES = {
    "fit": "fit",
    "joint": "joint log-likelihood",
    "calibration": "calibration and uncertainty",
    "ood": "out of distribution",
}
_SMALLEST_NOTE = 12
_FEW_SIZES = 4
_WITH_CENTRE = ("marginal_loglik", "accuracy")
"""Scores that are compared with those of the centre."""

AnyScore: TypeAlias = "Score | ScoreRow"


def score_table(scores: Sequence[AnyScore], width: int | None = None) -> str:
    """Scores as aligned text, by topic: metric, value ± standard error over points or blocks, n, remarks.

    `width` is in characters; None uses that of the terminal. Of many block sizes three are shown; the remark of a joint
    score that has not converged shows how it changes with the number of draws. metrics.csv has everything. Long remarks
    are wrapped.
    """
    width = width or shutil.get_terminal_size((100, 24)).columns
    rows = _lines(_shown(scores), scores)
    if not rows:
        return "no scores"
    table = [line for lines in rows.values() for line in lines]
    widths = [max(len(line[i]) for line in [*table, _HEAD]) for i in range(4)]
    room = max(_SMALLEST_NOTE, width - sum(widths) - 2 * 4 - 2)
    out = [_joined(_HEAD, widths, room)]
    for group in GROUP_ORDER:
        if group in rows:
            out.append(_TITLES[group])
            out += ["  " + _joined(line, widths, room) for line in rows[group]]
    out[0] = "  " + out[0]
    return "\n".join(line.rstrip() for text in out for line in text.split("\n"))


def centre_line(scores: Sequence[AnyScore]) -> str:
    """The centre's scores on the test set and the paired differences of the posterior from them; "" without a centre.

    A difference within a hundredth of the score's own standard error counts as no difference.
    """
    parts = []
    of = {s.metric: s for s in scores if s.split == "test" and s.tau is None and s.status == "ok"}
    for metric in _WITH_CENTRE:
        if not {metric, CENTRE + metric, metric + MINUS_CENTRE} <= of.keys():
            continue
        own, apart = of[metric].standard_error or 0.0, of[metric + MINUS_CENTRE]
        none = max(abs(apart.value), apart.standard_error or 0.0) <= own / 100
        sign = "" if apart.value < 0 else "+"
        gap = "the same" if none else f"posterior {sign}{number(apart.value, apart.standard_error)}"
        parts.append(f"{metric} {number(of[CENTRE + metric].value)} ({gap})")
    return f"centre alone: {', '.join(parts)}" if parts else ""


_HEAD = ("metric", "value", "unit", "n", "")


def _shown(scores: Sequence[AnyScore]) -> list[AnyScore]:
    """One score per column; of many block sizes the smallest above one point, the middle and the largest."""
    kept: dict[Column, AnyScore] = {}
    for s in scores:
        column = _column(s)
        if not is_companion(s.metric) and (column not in kept or (s.draws or 0) > (kept[column].draws or 0)):
            kept[column] = s
    for column, score in list(kept.items()):  # the exact value is a remark of the value from draws
        if score.status != "n/a":
            kept.pop(replace(column, metric=column.metric + EXACT), None)
    sizes: dict[tuple[str, str], list[Column]] = {}
    for column in kept:
        if column.tau is not None and column.tau > 1:
            sizes.setdefault((column.metric, column.split), []).append(column)
    for columns in sizes.values():
        columns.sort(key=lambda c: (c.kappa or 0, c.tau or 0))
    for column in list(kept):  # a standard deviation replaces its variance: it is in the units of the target
        if replace(column, metric=column.metric.replace("_std", "_variance")) != column:
            kept.pop(replace(column, metric=column.metric.replace("_std", "_variance")), None)
    strongest: dict[str, float] = {}  # the table shows the strongest level of each shift, the figure all of them
    for s in kept.values():
        name, _, level = s.split.rpartition("/")
        strongest[name] = max(strongest.get(name, 0.0), float(level)) if name.startswith("shift/") else 0.0
    for column, s in list(kept.items()):
        name, _, level = s.split.rpartition("/")
        if name.startswith("shift/") and float(level) < strongest[name]:
            kept.pop(column)
    return [s for column, s in kept.items() if _is_shown(column, sizes.get((column.metric, column.split), []))]


def _is_shown(column: Column, sizes: Sequence[Column]) -> bool:
    if column.tau is None:
        return True
    if len(sizes) <= _FEW_SIZES:
        return column.tau > 1 or not sizes
    return column in (sizes[0], sizes[len(sizes) // 2], sizes[-1])


def _lines(scores: Sequence[AnyScore], companions: Sequence[AnyScore]) -> dict[str, list[tuple[str, ...]]]:
    groups: dict[str, list[tuple[str, ...]]] = {}
    for s in sorted(scores, key=lambda s: not s.metric.startswith("joint")):
        arrow = {"higher": " ↑", "lower": " ↓"}.get(s.better, "")
        value = "n/a" if s.status == "n/a" else number(s.value, s.standard_error)
        n = str(s.n) if s.n else ""
        line = (_column(s).label + arrow, value, s.unit, n, _remark(s, companions))
        groups.setdefault(group_of(s.metric, s.split), []).append(line)
    return groups


def _remark(score: AnyScore, companions: Sequence[AnyScore]) -> str:
    """Status and note; for a joint score, its convergence in draws instead of its blocks."""
    words = [] if score.status in ("ok", "n/a") else [score.status]
    own = [s for s in companions if (s.split, s.tau, s.kappa) == (score.split, score.tau, score.kappa)]
    fewer = [s for s in own if s.metric == score.metric + AT_DRAWS and s.draws != score.draws]
    effective = [s for s in own if s.metric == score.metric + EFFECTIVE_DRAWS]
    if fewer and score.status != "ok":  # what has converged needs no remark
        fewer.sort(key=lambda s: s.draws or 0)
        steps = zip(("S/4", "S/2"), fewer, strict=False) if len(fewer) == 2 else [(f"S={s.draws}", s) for s in fewer]
        words.append(", ".join(f"{label} {s.value:.4g}" for label, s in steps))
        words += [f"{s.value:.3g} effective draws" for s in effective]
        words += [score.note] if score.status == "not finite" else []
    elif score.status == "ok" and not math.isfinite(score.value):
        words += [score.note or "not finite"]
    elif score.status != "ok" and score.note:  # how an ordinary number was made is in metrics.csv
        words.append(score.note)
    exact = [s for s in own if s.metric == score.metric + EXACT and s.status == "ok"]
    words += [f"exact {s.value:.4g}" for s in exact]
    by_draws = [s for s in own if s.metric == score.metric + BY_DRAWS]
    words += [f"exact; {s.value:.4g} from draws, {s.status}" if s.status != "ok" else "exact" for s in by_draws]
    return "; ".join(words)


def _column(score: AnyScore) -> Column:
    return Column(score.metric, score.split, score.tau, score.kappa)


def _joined(line: Sequence[str], widths: Sequence[int], room: int) -> str:
    import textwrap

    texts = [line[0].ljust(widths[0]), line[1].rjust(widths[1]), line[2].ljust(widths[2]), line[3].rjust(widths[3])]
    start = "  ".join(texts)
    remarks = textwrap.wrap(line[4], room, break_long_words=False, break_on_hyphens=False) or [""]
    indent = " " * (len(start) + 4)
    return "\n".join([f"{start}  {remarks[0]}", *(indent + r for r in remarks[1:])])
