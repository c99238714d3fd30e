"""Rows ranked by log evidence and by test log-likelihood: what the evidence alone would have selected."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bnn_runner.errors import UserError
from bnn_runner.report import style
from bnn_runner.report.columns import Column
from bnn_runner.report.commands import with_words
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.grouping import ABSENT
from bnn_runner.report.looks import Look, identity, looks
from bnn_runner.report.read_cells import ScoreRow
from bnn_runner.report.scatter import error_of
from bnn_runner.report.section import Section
from bnn_runner.report.tables import Entry, Row, Table, aggregate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEST = Column("marginal_loglik")
SHARE = 0.5
"""A row is not ranked where its evidence may be too low by more than this share of the distance to the nearest other
evidence: at w* by the Newton decrement, at v* by what is left to gain.
"""
BELOW_CONSTANT = "the evidence is below that of a constant predictor"
TOO_FAR = (
    "the evidence may be too low by more than half the distance to the nearest other one (Newton decrement at w*, "
    "remaining gap at v*), so that another rank is possible"
)
_LABEL_LETTERS = 26


@dataclass(frozen=True)
class RankedRow:
    """One row with its evidence (nats), test log-likelihood and Newton decrement (nats) over seeds, and both ranks.

    Ranks are NaN where a row is not ranked, and `why_not` says why: the evidence of a seed is below that of a constant
    predictor, or the weights are so far from the optimum that the evidence assumes that another rank is possible.
    """

    row: Row
    evidence: Entry
    test: Entry
    decrement: Entry | None
    mode: str
    ranks: tuple[float, float]
    why_not: str = ""

    @property
    def ranked(self) -> bool:
        return not math.isnan(self.ranks[0])

    @property
    def name(self) -> str:
        """Model, method and the settings that distinguish the row."""
        key = self.row.group.key
        return " ".join([key.model, key.method, *self.row.settings()])

    @property
    def label(self) -> str:
        """The name, on two lines if it is long."""
        key = self.row.group.key
        first, rest = f"{key.model} {key.method}", " ".join(self.row.settings())
        return "\n".join(filter(None, [first, textwrap.fill(rest, _LABEL_LETTERS)]))


@dataclass(frozen=True)
class Ranking:
    """Rows of one training set with an evidence over the same kind of weights, the largest first."""

    data: str
    over: str
    rows: tuple[RankedRow, ...]

    @property
    def correlation(self) -> float:
        """Spearman's: the correlation of the ranks; NaN where all are tied."""
        pairs = [r.ranks for r in self.rows if r.ranked]
        middle = (len(pairs) + 1) / 2
        cross = sum((a - middle) * (b - middle) for a, b in pairs)
        squares = math.prod(sum((pair[i] - middle) ** 2 for pair in pairs) for i in (0, 1))
        return cross / math.sqrt(squares) if squares else math.nan


def rankings(table: Table) -> tuple[Ranking, ...]:
    """Rankings of all rows with an evidence. Raises `UserError` if no two rows have one that can be compared."""
    blocks: dict[tuple[object, ...], list[Row]] = {}
    for row in table.rows:
        cells = row.group.done.values()
        over = {str(c.evidence["evidence_over"]) for c in cells if "evidence_over" in c.evidence}
        if len(over) == 1 and all("evidence_nats" in c.evidence for c in cells):
            blocks.setdefault((row.group.key.data_key, over.pop()), []).append(row)
    found = tuple(_ranking(str(key[1]), rows) for key, rows in blocks.items() if len(rows) > 1)
    if not found:
        raise UserError(
            "--evidence requires at least two rows of one data set with a log evidence over the same kind of weights, "
            "which Laplace methods have. Run for example: bnn-run -m model=mlp,mlp_layernorm"
        )
    return found


def evidence_grids(table: Table) -> tuple[Grid, ...]:
    """One table per ranking."""
    grids = []
    for ranking in rankings(table):
        extra = list(ranking.rows[0].row.extra)
        lines = []
        for r in ranking.rows:
            key = r.row.group.key
            words = (
                *(f"{rank:g}" if r.ranked else ABSENT for rank in r.ranks),
                key.model,
                table.named(r.row, key.method),
                *r.row.extra.values(),
                r.mode,
                str(r.row.n),
            )
            lines.append(Line(words, (r.evidence, r.test, r.decrement), r.row.n))
        ranked = [r for r in ranking.rows if r.ranked]
        note = f"Spearman correlation of the two ranks over {len(ranked)} rows: {ranking.correlation:.2f}."
        for why in (BELOW_CONSTANT, TOO_FAR):
            left = [r for r in ranking.rows if r.why_not == why]
            if left:
                note += f" Not ranked, because {why}: {'; '.join(r.name for r in left)}."
            if left and why == TOO_FAR:
                commands = [with_words(r.row, {"method.mode": "tangent"}) for r in left if "network" in r.mode]
                known = [c for c in dict.fromkeys(commands) if c]
                note += f" The evidence at the optimum: {'; '.join(known)}." if known else ""
                note += " At v*: raise method.tangent_passes." if any("network" not in r.mode for r in left) else ""
        grids.append(
            Grid(
                f"{ranking.data}: ranked by evidence over {ranking.over}",
                ("by evidence", "by test", "model", "method", *extra, "mode", "n"),
                5 + len(extra),
                ("log evidence [nats] ↑", "marginal_loglik [nats per point] ↑", "Newton decrement [nats]"),
                tuple(lines),
                note,
            )
        )
    return tuple(grids)


def evidence_figure(table: Table, path: Path) -> Path:
    """For each ranking: evidence and test log-likelihood of the rows in order, and a scatter plot of both.

    A row has the colour of its method.
    """
    from matplotlib.figure import Figure

    found, look = rankings(table), looks(table)
    heights = [1.4 + max(1.8, 0.36 * len(r.rows)) for r in found]
    figure = Figure(figsize=(style.MOST_WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(found), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, ranking in zip(parts, found, strict=True):
        title = f"{ranking.data} · evidence over {ranking.over} · Spearman {ranking.correlation:.2f}"
        part.suptitle(title, fontsize=10, fontweight="bold")
        left, middle, right = part.subplots(1, 3, width_ratios=(1, 1, 1.2))
        for ax in (left, middle, right):
            style.tidy(ax)
        drawn = _looks(ranking, look)
        _dots(left, ranking, drawn, [r.evidence for r in ranking.rows], "log evidence [nats] →", labelled=True)
        _dots(middle, ranking, drawn, [r.test for r in ranking.rows], "test log-likelihood\n[nats per point] →", False)
        for r, own in zip(ranking.rows, drawn, strict=True):
            right.errorbar(
                [r.evidence.mean], [r.test.mean], xerr=[error_of(r.evidence)], yerr=[error_of(r.test)],
                fmt=own.marker, color=own.colour, markersize=6, capsize=3,
            )  # fmt: skip
        right.set_xlabel("log evidence [nats]\n(error bars: ±1 standard error over seeds)")
        right.set_ylabel("test log-likelihood [nats per point]")
        right.margins(0.12)
        right.locator_params(axis="x", nbins=4)
        right.locator_params(axis="y", nbins=5)
    return style.save(figure, path)


def _looks(ranking: Ranking, look: Mapping[tuple[str, ...], Look]) -> list[Look]:
    """The look of each row; where rows of several networks share one, the same colour with markers of their own."""
    own = [look[identity(r.row)] for r in ranking.rows]
    if len(set(own)) == len(own):
        return own
    return [Look(one.colour, style.SHAPES[i % len(style.SHAPES)]) for i, one in enumerate(own)]


def _dots(
    ax: Axes, ranking: Ranking, looks: Sequence[Look], entries: Sequence[Entry], label: str, labelled: bool
) -> None:
    for i, (entry, own) in enumerate(zip(entries, looks, strict=True)):
        ax.errorbar(
            [entry.mean], [i], xerr=[error_of(entry)], fmt=own.marker, color=own.colour, markersize=6, capsize=3
        )
    ax.set_yticks(range(len(entries)), [r.label for r in ranking.rows] if labelled else [""] * len(entries))
    ax.set_ylim(len(entries) - 0.5, -0.5)
    ax.margins(x=0.12)
    ax.locator_params(axis="x", nbins=3)
    ax.set_xlabel(label)


def _ranking(over: str, rows: Sequence[Row]) -> Ranking:
    evidences = [_facts(row, "evidence_nats", "higher") for row in rows]
    tests = [aggregate([c.main_scores[TEST] for c in row.group.done.values() if TEST in c.main_scores]) for row in rows]
    below = [any(c.evidence.get("evidence_below_constant") for c in row.group.done.values()) for row in rows]
    modes = ["/".join(sorted({str(c.evidence.get("mode", "network")) for c in r.group.done.values()})) for r in rows]
    decrements = [_shared_fact(row, "newton_decrement_nats") for row in rows]
    means = [e.mean for e in evidences]
    reasons = []
    for i in range(len(rows)):
        missing = decrements[i] if "network" in modes[i] else _shared_fact(rows[i], "tangent_gap_nats")
        nearest = min(abs(means[i] - m) for j, m in enumerate(means) if j != i)
        far = missing is not None and missing.mean > SHARE * nearest
        reasons.append(BELOW_CONSTANT if below[i] else TOO_FAR if far else "")
    counted = [not why for why in reasons]
    first, second = _ranks(evidences, counted), _ranks(tests, counted)
    ranked = [
        RankedRow(row, evidences[i], tests[i], decrements[i], modes[i], (first[i], second[i]), reasons[i])
        for i, row in enumerate(rows)
    ]
    ranked.sort(key=lambda r: (not r.ranked, r.ranks[0] if r.ranked else -r.evidence.mean))
    return Ranking(rows[0].group.key.data, over, tuple(ranked))


def _shared_fact(row: Row, name: str) -> Entry | None:
    """A fact in nats over seeds; None unless every seed has it."""
    return _facts(row, name, "") if all(name in c.evidence for c in row.group.done.values()) else None


def _facts(row: Row, name: str, better: str) -> Entry:
    values = [float(c.evidence[name]) for c in row.group.done.values()]
    return aggregate([ScoreRow(name, value, better=better, unit="nats") for value in values])


def _ranks(entries: Sequence[Entry], counted: Sequence[bool]) -> list[float]:
    """1 for the largest mean of those that count; ties share their mean rank, NaN comes last."""
    means = [e.mean if e.n and not math.isnan(e.mean) else -math.inf for e in entries]
    among = [m for m, counts in zip(means, counted, strict=True) if counts]
    return [
        sum(m > mean for m in among) + (among.count(mean) + 1) / 2 if counts else math.nan
        for mean, counts in zip(means, counted, strict=True)
    ]


SECTION = Section(
    "--evidence",
    "also rows ranked by log evidence, with a figure",
    lambda request: evidence_grids(request.table),
    lambda request, path: evidence_figure(request.table, path),
    example=("--evidence", "also ranked by evidence and by test log-likelihood"),
)
