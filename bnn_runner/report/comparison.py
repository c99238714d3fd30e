"""The comparison figure: methods next to each other for every metric and data set (curves: `sweep_curves`)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bnn_runner.report import style
from bnn_runner.report.columns import Column
from bnn_runner.report.looks import Look, identity, looks
from bnn_runner.report.scatter import error_of
from bnn_runner.report.tables import Entry, Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_PANELS = 11  # of one data set; the tables hold the rest
_MOST_PANELS = 16  # of one figure: with many data sets, each shows its first columns
_PANEL_WIDTH = 2.05
_RIGHT, _HEAD, _FOOT = 0.25, 0.4, 0.95
_TITLE_LETTERS = 29
"""Letters of a panel's title in one line."""


def comparison_figure(table: Table, path: Path) -> Path | None:
    """One block of panels per data set and model; error bars are ± one standard error over seeds.

    A method has the same colour and marker in every panel, and panels of one score and data set share their axis. NaN
    entries are written at their place; hollow markers have not converged in the number of draws. Returns None if no
    score applies.
    """
    from matplotlib.figure import Figure

    blocks = {block: rows for block, rows in blocks_of(table).items() if _shown(table, rows)}
    if not blocks:
        return None
    look = looks(table)
    most = min(_MAX_PANELS, max(1, _MOST_PANELS // len(blocks)))
    columns = {block: _shown(table, rows)[:most] for block, rows in blocks.items()}
    panels = {block: len(columns[block]) for block in blocks}
    labels = {block: labels_of(table, rows) for block, rows in blocks.items()}
    lines = [text.split("\n") for texts in labels.values() for text in texts]
    left = 0.25 + 0.068 * max(len(line) for text in lines for line in text)
    fitting = max(1, int((style.MOST_WIDTH - left - _RIGHT) / _PANEL_WIDTH))
    across = min(fitting, max(panels.values()))
    step = 0.14 + 0.16 * max(len(text) for text in lines)  # of one row, in inches
    width = left + _RIGHT + _PANEL_WIDTH * across
    heights = [
        _HEAD + math.ceil(panels[block] / across) * (_FOOT + max(0.9, step * len(rows)))
        for block, rows in blocks.items()
    ]
    abreast = max(1, min(len(blocks), int(style.MOST_WIDTH / width)))  # blocks of few panels share a line
    tallest = [max(heights[i : i + abreast]) for i in range(0, len(heights), abreast)]
    figure = Figure(figsize=(width * abreast, sum(tallest)))
    grid = figure.subfigures(len(tallest), abreast, height_ratios=tallest, hspace=0, wspace=0, squeeze=False)
    compared: dict[tuple[str, Column], list[Axes]] = {}
    for i, (subfigure, (block, rows)) in enumerate(zip(grid.flat, blocks.items(), strict=False)):
        height = tallest[i // abreast]
        subfigure.suptitle(" · ".join(block), fontsize=11, fontweight="bold", y=1 - 0.1 / height, va="top")
        axes = list(subfigure.subplots(math.ceil(panels[block] / across), across, squeeze=False).flat)
        for ax in axes[: panels[block]]:
            style.tidy(ax)
        for spare in axes[panels[block] :]:
            spare.set_axis_off()
        for j, column in enumerate(columns[block]):
            own = [look[identity(r)] for r in rows]
            _dots(axes[j], rows, column, labels[block] if j % across == 0 else None, own)
            compared.setdefault((block[0], column), []).append(axes[j])
        edges = {"left": left, "right": _RIGHT, "top": 0.65, "bottom": 0.6, "across": 0.3, "down": 0.95}
        style.place(subfigure, (width, height), math.ceil(panels[block] / across), across, **edges)
    for found in compared.values():
        style.share(found, "x")
    return style.save(figure, path)


def blocks_of(table: Table) -> dict[tuple[str, str], list[Row]]:
    """(data, model) -> its rows with a finished seed."""
    blocks: dict[tuple[str, str], list[Row]] = {}
    for row in table.rows:
        if row.n:
            blocks.setdefault((row.group.key.data, row.group.key.model), []).append(row)
    return blocks


def _shown(table: Table, rows: Sequence[Row]) -> list[Column]:
    """Columns in which some row has a number."""
    return [c for c in table.columns if any(c in r.entries and r.entries[c].n for r in rows)]


def labels_of(table: Table, rows: Sequence[Row]) -> list[str]:
    """The method of each row and, on further lines, the settings that distinguish it."""
    fields = [e for e in table.extra if len({r.extra[e] for r in rows}) > 1]
    return ["\n".join([r.group.key.method, *r.settings(fields)]) for r in rows]


def _dots(ax: Axes, rows: Sequence[Row], column: Column, labels: Sequence[str] | None, look: Sequence[Look]) -> None:
    entries = [r.entries.get(column) for r in rows]
    bars: list[tuple[float, float, int, str]] = []
    for i, entry in enumerate(entries):
        if entry is None or not entry.n or not math.isfinite(entry.mean):
            ax.text(0.5, i, _word(entry), transform=ax.get_yaxis_transform(), fontsize=8, ha="center", va="center")
            continue
        error = error_of(entry)
        tone, shape = look[i].colour, look[i].marker
        face = "white" if entry.marked else tone
        bars.append((entry.mean - error, entry.mean + error, i, tone))
        ax.plot([entry.mean], [i], shape, color=tone, mfc=face, markersize=6)
    if bars:
        low, high, at, tones = zip(*bars, strict=True)
        ax.hlines(at, low, high, colors=tones)
    ax.set_yticks(range(len(rows)), labels or [""] * len(rows))
    if labels:  # coloured as in the figure of curves
        for text, own in zip(ax.get_yticklabels(), look, strict=True):
            text.set_color(own.colour)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.margins(x=0.15)
    ax.locator_params(axis="x", nbins=4)
    known = [e for e in entries if e is not None]
    unit = next((e.unit for e in known if e.unit), "")
    better = next((e.better for e in known if e.better), "")
    style.panel_title(ax, textwrap.fill(column.label, _TITLE_LETTERS), size=9)
    hint = {"higher": "higher is better →", "lower": "← lower is better"}.get(better, "")
    ax.set_xlabel("\n".join(filter(None, [unit, hint])), fontsize=8)


def _word(entry: Entry | None) -> str:
    if entry is None:
        return "—"
    return "n/a" if not entry.n else f"NaN ({entry.nonfinite} of {entry.n})"
