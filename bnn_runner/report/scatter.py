"""Two quantities of every row against each other: a point with both error bars, one panel per task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bnn_runner.report import style
from bnn_runner.report.looks import Look
from bnn_runner.report.tables import Entry, Row

_ACROSS, _PANEL, _ALONE = 2, (4.9, 3.7), (6.0, 4.0)
_HEAD, _LINE, _LEFT, _FOOT, _GAP = 0.7, 0.17, 0.8, 0.85, 0.3
_LEGEND_COLUMNS = 4


@dataclass(frozen=True)
class Point:
    """A mean with its standard error along each axis, and its look; hollow if not converged in the number of draws."""

    look: Look
    x: tuple[float, float]
    y: tuple[float, float]
    hollow: bool = False


@dataclass(frozen=True)
class Panel:
    """The points of one task by their label; panels with the same `compared` share both axes."""

    title: str
    points: Mapping[str, Point]
    compared: str
    x_label: str
    y_label: str


def scatter(panels: Sequence[Panel], title: str, path: Path, log_x: bool = False) -> Path:
    """Draw the panels, two in a row, with one legend below them."""
    from matplotlib.figure import Figure

    across = min(_ACROSS, len(panels))
    wide, high = _ALONE if across == 1 else _PANEL
    handles = {
        label: style.handle(point.look.colour, point.look.marker, line=0)
        for panel in panels
        for label, point in panel.points.items()
    }
    head = _HEAD + _LINE * title.count("\n")
    width, lines = wide * across, math.ceil(len(panels) / across)
    columns = style.legend_columns(list(handles), width, _LEGEND_COLUMNS)
    legend = 0.1 + 0.2 * math.ceil(len(handles) / columns)
    height = head + lines * high + legend
    figure = Figure(figsize=(width, height))
    axes = list(figure.subplots(lines, across, squeeze=False).flat)
    compared: dict[str, list[int]] = {}
    for i, panel in enumerate(panels):
        ax = axes[i]
        style.tidy(ax)
        for point in panel.points.values():
            (x, dx), (y, dy) = point.x, point.y
            tone, face = point.look.colour, "white" if point.hollow else point.look.colour
            ax.errorbar(
                [x], [y], xerr=[dx], yerr=[dy], fmt=point.look.marker, color=tone, mfc=face, markersize=7, capsize=3
            )
        if log_x:
            ax.set_xscale("log")
        else:
            ax.locator_params(axis="x", nbins=5)
        ax.locator_params(axis="y", nbins=6)
        ax.margins(0.1)
        ax.set_xlabel(panel.x_label)
        ax.set_ylabel(panel.y_label)
        style.panel_title(ax, panel.title)
        compared.setdefault(panel.compared, []).append(i)
    for spare in axes[len(panels) :]:
        spare.set_axis_off()
    for places in compared.values():
        style.share([axes[i] for i in places], "xy")
    if log_x:
        style.share(axes[: len(panels)], "x")
    figure.suptitle(title, fontsize=10, fontweight="bold", y=1 - 0.1 / height, va="top")
    style.legend_below(figure, list(handles.values()), list(handles), columns)
    edges = {"left": _LEFT, "right": 0.2, "top": head, "bottom": _FOOT - _GAP + legend}
    style.place(figure, (width, height), lines, across, **edges, across=_LEFT + 0.1, down=_FOOT)
    return style.save(figure, path)


def row_label(row: Row) -> str:
    """Method and the settings that distinguish the row, on one line."""
    return " ".join([row.group.key.method, *row.settings()])


def error_of(entry: Entry) -> float:
    """The standard error of an entry (of one seed: over its test points); 0, which draws no bar, if none is known."""
    known = (e for e in (entry.standard_error, entry.points_error) if math.isfinite(e))
    return next(known, 0.0)
