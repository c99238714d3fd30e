"""Curves of the rows of a table: joint scores by tau and kappa, scores under shift, training by epoch."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bnn_runner.report import style
from bnn_runner.report.columns import EXACT, Column, is_companion
from bnn_runner.report.comparison import blocks_of, labels_of
from bnn_runner.report.looks import Look, identity, looks
from bnn_runner.report.read_cells import ScoreRow
from bnn_runner.report.tables import Row, Table, aggregate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_PANELS = 6  # of one figure, but at least two data sets
_ACROSS, _WIDTH, _HEIGHT = 3, 3.3, 2.5
_HEAD, _FOOT, _GAP = 0.7, 0.85, 0.25
_LEGEND_COLUMNS = 4
BAND, BAND_ALPHA = "±1 standard error over seeds", 0.15
Curve = list[tuple[float, float, float]]
"""(x, mean, standard error over seeds; 0 for a single seed)."""


@dataclass(frozen=True)
class Panel:
    """The curves of one panel, by the index of their row."""

    title: str
    across: str
    up: str
    curves: Mapping[int, Curve]


def sweep_curves(table: Table, path: Path) -> Path | None:
    """One line of panels per data set and model (the first of many), with bands of ± one standard error over seeds.

    None if no row has a curve with two points.
    """
    from matplotlib.figure import Figure

    shown: dict[tuple[str, str], tuple[list[Row], list[Panel]]] = {}
    for block, rows in blocks_of(table).items():
        if len(shown) >= 2 and sum(len(panels) for _, panels in shown.values()) >= _MOST_PANELS:
            break
        if panels := _panels(rows):
            shown[block] = rows, panels
    if not shown:
        return None
    look = looks(table)
    across = min(_ACROSS, max(len(panels) for _, panels in shown.values()))
    width = _WIDTH * across
    entries = [_legend(table, rows, panels, look) for rows, panels in shown.values()]
    columns = [style.legend_columns(list(entry), width, _LEGEND_COLUMNS) for entry in entries]
    legends = [0.1 + 0.2 * math.ceil(len(entry) / most) for entry, most in zip(entries, columns, strict=True)]
    lines = [math.ceil(len(panels) / across) for _, panels in shown.values()]
    heights = [_HEAD + n * (_HEIGHT + _FOOT) + legend for n, legend in zip(lines, legends, strict=True)]
    figure = Figure(figsize=(width, sum(heights)))
    subfigures = figure.subfigures(len(shown), 1, height_ratios=heights, hspace=0, squeeze=False)[:, 0]
    compared: dict[tuple[str, str], list[Axes]] = {}
    for i, (block, (rows, panels)) in enumerate(shown.items()):
        subfigure = subfigures[i]
        subfigure.suptitle(" · ".join(block), fontsize=11, fontweight="bold", y=1 - 0.1 / heights[i], va="top")
        axes = list(subfigure.subplots(lines[i], across, squeeze=False).flat)
        for ax in axes[len(panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(axes, panels, strict=False):
            style.tidy(ax)
            _draw(ax, panel, [look[identity(r)] for r in rows])
            compared.setdefault((block[0], panel.title), []).append(ax)
        style.legend_below(subfigure, list(entries[i].values()), list(entries[i]), columns[i])
        edges = {"left": 0.8, "right": 0.15, "top": _HEAD, "bottom": _FOOT - _GAP + legends[i]}
        style.place(subfigure, (width, heights[i]), lines[i], across, **edges, across=0.8, down=_FOOT)
    for found in compared.values():
        style.share(found, "y")
    return style.save(figure, path)


def _legend(
    table: Table, rows: Sequence[Row], panels: Sequence[Panel], look: Mapping[tuple[str, ...], Look]
) -> dict[str, Any]:
    """Label -> handle of every row that is drawn, and of the bands if there are any."""
    drawn = sorted({i for panel in panels for i in panel.curves})
    labels = [text.replace("\n", " ") for text in labels_of(table, rows)]
    handles = {labels[i]: style.handle(look[identity(rows[i])].colour, look[identity(rows[i])].marker) for i in drawn}
    if any(error for panel in panels for curve in panel.curves.values() for _, _, error in curve):
        handles[BAND] = style.patch(style.GREY, BAND_ALPHA)
    return handles


def _panels(rows: Sequence[Row]) -> list[Panel]:
    joint = _score_curves(rows, lambda c: c.tau if c.tau and c.kappa is None and "dyadic" not in c.metric else None)
    dyadic = _score_curves(rows, lambda c: c.kappa if c.tau and c.kappa else None)
    panels = [
        Panel(_words(name), "block size tau", "log-likelihood / tau [nats]", curves) for name, curves in joint.items()
    ]
    panels += [
        Panel(_words(name), "distinct anchors kappa", "log-likelihood / tau [nats]", curves)
        for name, curves in dyadic.items()
    ]
    panels += _shift_panels(rows)
    learning = {i: curve for i, row in enumerate(rows) if len(curve := _training(row)) > 1}
    if learning:
        panels.append(Panel("training", "epoch", "data term per point [nats]", learning))
    return panels


def _words(metric: str) -> str:
    return metric.removesuffix("_loglik").replace("_", " ")


def _score_curves(rows: Sequence[Row], place: Callable[[Column], int | None]) -> dict[str, dict[int, Curve]]:
    """Metric -> row -> (place, score per point), of those with two places or more."""
    found: dict[str, dict[int, Curve]] = {}
    for i, row in enumerate(rows):
        cells = list(row.group.done.values())
        lines: dict[str, dict[int, list[ScoreRow]]] = defaultdict(lambda: defaultdict(list))
        for cell in cells:
            for column, score in cell.main_scores.items():
                at = place(column)
                if at is not None and column.split == "test" and not _is_beside(column.metric):
                    lines[column.metric][at].append(score._replace(value=score.value / (score.tau or 1)))
        for metric, line in lines.items():
            curve = _curve(line)
            if len(curve) > 1:
                found.setdefault(metric, {})[i] = curve
    return found


def _is_beside(metric: str) -> bool:
    return is_companion(metric) or metric.endswith(EXACT)


def _curve(line: Mapping[int, Sequence[ScoreRow]] | Mapping[float, Sequence[ScoreRow]]) -> Curve:
    entries = [(float(at), aggregate(scores)) for at, scores in sorted(line.items())]
    errors = [e.standard_error if math.isfinite(e.standard_error) else 0.0 for _, e in entries]
    return [(at, e.mean, se) for (at, e), se in zip(entries, errors, strict=True) if e.n and math.isfinite(e.mean)]


def _shift_panels(rows: Sequence[Row]) -> list[Panel]:
    """A panel for each score and kind of shift; level 0 are the clean points of the same kind."""
    lines: dict[tuple[str, str], dict[int, dict[float, list[ScoreRow]]]] = {}
    for i, row in enumerate(rows):
        for cell in row.group.done.values():
            for column, score in cell.main_scores.items():
                if column.metric.startswith("shift_"):
                    _, kind, level = column.split.split("/")
                    places = lines.setdefault((column.metric, kind), {}).setdefault(i, defaultdict(list))
                    places[float(level)].append(score)
    panels = []
    for (metric, kind), by_row in lines.items():
        clean = lines.get((metric, "clean"), {})
        curves = {i: _curve({**clean.get(i, {}), **found}) for i, found in by_row.items()}
        if kind != "clean" and (curves := {i: c for i, c in curves.items() if len(c) > 1}):
            name, kind = metric.removeprefix("shift_").replace("_", " "), kind.replace("_", " ")
            panels.append(Panel(f"{kind}: {name}", "degrees" if kind == "rotation" else "level of shift", name, curves))
    return panels


def _training(row: Row) -> Curve:
    """The data term by epoch of training, over members and seeds; empty if nothing was recorded."""
    found: dict[float, list[float]] = defaultdict(list)
    for cell in row.group.done.values():
        try:
            with (cell.path / "history.csv").open(encoding="utf-8", newline="") as file:
                reader = csv.reader(file)
                names = next(reader)
                places = [names.index(n) if n in names else len(names) for n in ("member", "epoch", "nll", "loss")]
                fields = itemgetter(*places)
                for record in reader:
                    member, epoch, nll, loss = fields([*record, ""])
                    value = float(nll or loss or "nan")
                    if member != "posterior" and math.isfinite(value):  # leave out the posterior's own fit
                        found[float(epoch)].append(value)
        except (OSError, ValueError, IndexError, StopIteration):
            continue
    return [(at, *_mean_and_error(values)) for at, values in sorted(found.items())]


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    n, mean = len(values), math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n) if n > 1 else 0.0


def _draw(ax: Axes, panel: Panel, look: Sequence[Look]) -> None:
    for i, curve in panel.curves.items():
        x, y, error = zip(*curve, strict=True)
        shape = look[i].marker if len(curve) < 20 else ""
        tone = look[i].colour
        ax.plot(x, y, color=tone, lw=1.2, marker=shape, markersize=4)
        if any(error):
            low, high = [a - b for a, b in zip(y, error, strict=True)], [a + b for a, b in zip(y, error, strict=True)]
            ax.fill_between(x, low, high, color=tone, alpha=BAND_ALPHA, lw=0)
    style.panel_title(ax, panel.title)
    ax.set_xlabel(panel.across)
    ax.set_ylabel(panel.up)
    if all(float(at).is_integer() for curve in panel.curves.values() for at, _, _ in curve):
        ax.locator_params(axis="x", integer=True, nbins=7)
