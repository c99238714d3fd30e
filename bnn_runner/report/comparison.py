"""The comparison figure: methods next to each other for every metric and data set (curves: `sweep_curves`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bnn_runner.report import style
from bnn_runner.report.columns import Column
from bnn_runner.report.tables import Entry, Row, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_PANELS = 11  # of one data set; the tables hold the rest
_MOST_PANELS = 16  # of one figure: with many data sets, each shows its first columns
_ACROSS = 4
_PANEL_WIDTH = 2.6


def comparison_figure(table: Table, path: Path) -> Path | None:
    """One block of panels per data set and model; error bars are ± one standard error over seeds.

    A method has the same colour and marker in every panel. NaN entries are written at their place; hollow markers have
    not converged in the number of draws. Returns None if no score applies.
    """
    from matplotlib.figure import Figure

    blocks = {block: rows for block, rows in blocks_of(table).items() if _shown(table, rows)}
    if not blocks:
        return None
    looks = {name: i for i, name in enumerate(dict.fromkeys(identity(r) for rows in blocks.values() for r in rows))}
    most = min(_MAX_PANELS, max(1, _MOST_PANELS // len(blocks)))
    columns = {block: _shown(table, rows)[:most] for block, rows in blocks.items()}
    panels = {block: len(columns[block]) for block in blocks}
    across = min(_ACROSS, max(panels.values()))
    labels = {block: labels_of(table, rows) for block, rows in blocks.items()}
    lines = [text.split("\n") for texts in labels.values() for text in texts]
    left = 0.25 + 0.068 * max(len(line) for text in lines for line in text)
    step = 0.14 + 0.16 * max(len(text) for text in lines)  # of one row, in inches
    width = left + _PANEL_WIDTH * across
    heights = [
        0.4 + math.ceil(panels[block] / across) * (0.95 + max(0.9, step * len(rows))) for block, rows in blocks.items()
    ]
    abreast = min(len(blocks), max(1, _ACROSS // across))  # blocks of few panels share a line
    tallest = [max(heights[i : i + abreast]) for i in range(0, len(heights), abreast)]
    figure = Figure(figsize=(width * abreast, sum(tallest)))
    grid = figure.subfigures(len(tallest), abreast, height_ratios=tallest, hspace=0, wspace=0, squeeze=False)
    for i, (subfigure, (block, rows)) in enumerate(zip(grid.flat, blocks.items(), strict=False)):
        height = tallest[i // abreast]
        subfigure.suptitle(" · ".join(block), fontsize=11, fontweight="bold")
        axes = list(subfigure.subplots(math.ceil(panels[block] / across), across, squeeze=False).flat)
        for ax in axes[: panels[block]]:
            style.tidy(ax)
        for spare in axes[panels[block] :]:
            spare.set_axis_off()
        look = [looks[identity(r)] for r in rows]
        for i, column in enumerate(columns[block]):
            _dots(axes[i], rows, column, labels[block] if i % across == 0 else None, look)
        edges = {"left": left, "right": 0.2, "top": 0.65, "bottom": 0.6, "across": 0.25, "down": 0.95}
        style.place(subfigure, (width, height), math.ceil(panels[block] / across), across, **edges)
    return style.save(figure, path)


def identity(row: Row) -> tuple[str, ...]:
    """What shares one colour and marker in every panel."""
    return (row.group.key.method, *row.extra.values())


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


def _dots(ax: Axes, rows: Sequence[Row], column: Column, labels: Sequence[str] | None, look: Sequence[int]) -> None:
    entries = [r.entries.get(column) for r in rows]
    bars: list[tuple[float, float, int, str]] = []
    for i, entry in enumerate(entries):
        if entry is None or not entry.n or not math.isfinite(entry.mean):
            ax.text(0.5, i, _word(entry), transform=ax.get_yaxis_transform(), fontsize=8, ha="center", va="center")
            continue
        error = entry.standard_error if math.isfinite(entry.standard_error) else 0.0
        tone, shape = style.colour(look[i]), style.marker(look[i])
        face = "white" if entry.marked else tone
        bars.append((entry.mean - error, entry.mean + error, i, tone))
        ax.plot([entry.mean], [i], shape, color=tone, mfc=face, markersize=6)
    if bars:
        low, high, at, tones = zip(*bars, strict=True)
        ax.hlines(at, low, high, colors=tones)
    ax.set_yticks(range(len(rows)), labels or [""] * len(rows))
    if labels:  # coloured as in the figure of curves
        for text, i in zip(ax.get_yticklabels(), look, strict=True):
            text.set_color(style.colour(i))
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.margins(x=0.15)
    ax.locator_params(axis="x", nbins=4)
    known = [e for e in entries if e is not None]
    unit = next((e.unit for e in known if e.unit), "")
    better = next((e.better for e in known if e.better), "")
    style.panel_title(ax, column.label, size=9)
    hint = {"higher": "higher is better →", "lower": "← lower is better"}.get(better, "")
    ax.set_xlabel("\n".join(filter(None, [unit, hint])), fontsize=8)


def _word(entry: Entry | None) -> str:
    if entry is None:
        return "—"
    return "n/a" if not entry.n else f"NaN ({entry.nonfinite} of {entry.n})"
