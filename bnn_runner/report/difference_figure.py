"""One figure for many data sets: each method's difference from the baseline on every data set."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from bnn_runner.report import style
from bnn_runner.report.grid import Grid, Line
from bnn_runner.report.looks import look
from bnn_runner.report.scatter import error_of
from bnn_runner.report.tables import Entry

_FEWEST_SETS, _ROW, _WIDTH = 2, 0.17, 4.4
"""Fewer data sets need no figure; inches of one point's row, and of a panel."""


def difference_figure(grid: Grid, path: Path) -> Path | None:
    """Points are differences of the first score with ± one standard error; data sets are rows.

    Panels are the networks and the settings of the data (data.splits); what else distinguishes rows is part of a
    point's label. The axis is linear up to the median difference and logarithmic beyond. None for fewer than two data
    sets, or without finite differences.
    """
    found: dict[str, dict[str, dict[str, Entry]]] = {}  # panel -> label -> data set -> difference
    methods: dict[str, str] = {}
    for line in grid.lines:
        entry = line.entries[0]
        if entry is None or not entry.n or not math.isfinite(entry.mean):
            continue
        data, method, panel, label = _names(grid, line)
        methods[label] = method
        found.setdefault(panel, {}).setdefault(label, {})[data] = entry
    sets = list(dict.fromkeys(d for points in found.values() for of in points.values() for d in of))
    if len(sets) < _FEWEST_SETS:
        return None
    labels = list(methods)
    tall = _ROW * len(sets) * (len(labels) + 1)
    figure, axes = style.new_panels(len(found), width=_WIDTH, height=tall + 1.6)
    linear = _linear_part([e for points in found.values() for of in points.values() for e in of.values()])
    for ax, (panel, points) in zip(axes, found.items(), strict=True):
        for j, label in enumerate(labels):
            of, shape = points.get(label, {}), look(methods[label])
            places = [i * (len(labels) + 1) + j for i, d in enumerate(sets) if d in of]
            entries = [of[d] for d in sets if d in of]
            ax.errorbar(
                [e.mean for e in entries], places, xerr=[error_of(e) for e in entries], fmt=shape.marker,
                color=shape.colour, markersize=5, capsize=2, lw=0, elinewidth=1, label=label,
            )  # fmt: skip
        ax.axvline(0, color="#808080", lw=0.8)
        ax.set_xscale("symlog", linthresh=linear)
        middle = (len(labels) - 1) / 2
        ax.set_yticks([i * (len(labels) + 1) + middle for i in range(len(sets))], sets)
        ax.set_ylim(len(sets) * (len(labels) + 1) - 1, -1)
        ax.set_xlabel(grid.heads[0].removesuffix(" ↑").removesuffix(" ↓"), fontsize=8)
        style.panel_title(ax, panel)
    style.share(axes, "x")
    for ax in axes:
        ax.set_xticks(_ticks(linear, ax.get_xlim()))
    style.title(figure, f"{grid.title} (±1 standard error)")
    style.legend_below(figure, *axes[0].get_legend_handles_labels())
    return style.save(figure, path)


def _names(grid: Grid, line: Line) -> tuple[str, str, str, str]:
    """Data set, method, panel and label of a line."""
    words = dict(zip(grid.words, line.words, strict=True))
    data, model, method = words.pop("data"), words.pop("model"), words.pop("method")
    words.pop("n", None)
    of_data = [f"{k.removeprefix('data.')}={v}" for k, v in words.items() if k.startswith("data.")]
    others = [f"{k.split('.')[-1]}={v}" for k, v in words.items() if not k.startswith("data.") and v != "—"]
    return data, method, " · ".join([model, *of_data]), " ".join([method, *others])


def _linear_part(entries: Sequence[Entry]) -> float:
    sizes = [abs(e.mean) for e in entries if e.mean]
    return statistics.median(sizes) if sizes else 1.0


def _ticks(linear: float, limits: tuple[float, float]) -> list[float]:
    """0 and the powers of ten outside the linear part: within it they would overlap."""
    powers = [
        10.0**k for k in range(math.ceil(math.log10(2 * linear)), 1 + math.ceil(math.log10(max(map(abs, limits)))))
    ]
    return [x for x in (*(-p for p in reversed(powers)), 0.0, *powers) if limits[0] <= x <= limits[1]]
