"""Curves of a run: training by epoch, and joint scores by block size and number of draws."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bnn_runner.report import style
from bnn_runner.report.columns import AT_DRAWS, BY_DRAWS, CENTRE, EFFECTIVE_DRAWS, EXACT, MINUS_CENTRE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bnn_runner.scoring import Score

History = Sequence[Mapping[str, float]]

_LABELS = {
    "loss": "objective per point [nats]",
    "nll": "negative log-likelihood [nats]",
    "evidence_nats": "log evidence [nats]",
    "lr": "learning rate",
}
_TITLES = {"nll": "data term", "loss": "objective", "lr": "schedule", "evidence_nats": "evidence"}
_LOSSES = ("loss", "nll", "train_nll", "val_nll", "val_loss", "objective")


def training_curves(histories: Sequence[History], title: str, tone: str = style.BLUE) -> Figure | None:
    """One line per trained network for every loss and the learning rate; None if no epoch was recorded."""
    histories = [h for h in histories if len(h)]
    if not histories:
        return None
    present = {key for history in histories for row in history for key, value in row.items() if _finite(value)}
    names = [name for name in (*_LOSSES, "evidence_nats", "lr") if name in present]
    if not names:
        return None
    figure, axes = style.new_panels(len(names), width=3.3, height=2.9)
    tones = style.tints(tone, len(histories))
    for ax, name in zip(axes, names, strict=True):
        for i, history in enumerate(histories):
            points = [(row.get("epoch", j), row[name]) for j, row in enumerate(history) if _finite(row.get(name))]
            label = f"network {i}" if len(histories) > 1 else None
            dot = "o" if len(points) == 1 else None
            ax.plot(*zip(*points, strict=True), color=tones[i], lw=1.1, alpha=0.9, marker=dot, label=label)
        ax.set_xlabel("epoch")
        ax.set_ylabel(_LABELS.get(name, name.replace("_", " ")))
        style.panel_title(ax, _TITLES.get(name, name))
        if name != "lr":
            _scale(ax, [row[name] for h in histories for row in h if _finite(row.get(name))])
    style.title(figure, title)
    shown = axes[0].get_legend_handles_labels()
    style.legend_below(figure, shown[0][:10], shown[1][:10], columns=5)
    return figure


def joint_curves(scores: Sequence[Score], title: str, tone: str = style.BLUE) -> Figure | None:
    """Joint log-likelihood per point against tau (and dyadic against kappa), one line per number of draws.

    The lines of S/4, S/2 and S draws coincide if the score has converged; hollow points are marked as not converged.
    None if the run has no joint scores at two block sizes.
    """
    own = [s for s in scores if not (s.metric.startswith(CENTRE) or s.metric.endswith((EFFECTIVE_DRAWS, MINUS_CENTRE)))]
    usable = [s for s in own if s.tau and _finite(s.value)]
    panels = []
    for is_dyadic in (False, True):
        kind = [s for s in usable if (s.kappa is not None) == is_dyadic]
        if len({(s.tau, s.kappa) for s in kind}) > 1:
            panels.append((is_dyadic, kind))
    if not panels:
        return None
    figure, axes = style.new_figure(columns=len(panels), width=4.8, height=3.9)
    for ax, (is_dyadic, kind) in zip(axes, panels, strict=True):
        lines = _lines(kind)
        tones = style.tints(tone, len(lines))
        several = len({_base(metric) for metric, _ in lines}) > 1
        for i, ((metric, draws), line) in enumerate(lines.items()):
            words = [_base(metric).removesuffix("_loglik").replace("_", " ")] if several else []
            words += [f"S = {draws}"] if draws else []
            is_exact = metric.endswith(EXACT) or any(name == metric + BY_DRAWS for name, _ in lines)
            words += ["exact Gaussian"] if is_exact else []
            _joint_line(ax, line, is_dyadic, i, tones[i], ", ".join(words) or metric)
        ax.set_xlabel("distinct anchors kappa" if is_dyadic else "block size tau")
        ax.set_ylabel("log-likelihood / tau [nats]")
        style.panel_title(ax, "dyadic" if is_dyadic else "joint, blocks without repeats")
        ax.locator_params(axis="x", integer=True)
        ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.17), ncols=2)
    style.title(figure, title)
    return figure


def shift_curves(scores: Sequence[Score], title: str, tone: str = style.BLUE) -> Figure | None:
    """Each score of the metric `shift` against the level, one line per shift; None if there are none."""
    found = [s for s in scores if s.metric.startswith("shift_") and _finite(s.value)]
    names = list(dict.fromkeys(s.metric for s in found))
    if not names:
        return None
    figure, axes = style.new_panels(len(names), width=4.2, height=3.4)
    for ax, metric in zip(axes, names, strict=True):
        lines: dict[str, list[tuple[float, Score]]] = defaultdict(list)
        for s in found:
            if s.metric == metric:
                _, name, level = s.split.split("/")
                lines[name].append((float(level), s))
        clean = lines.pop("clean", [])
        tones = style.tints(tone, len(lines))
        for i, (name, line) in enumerate(lines.items()):
            points = sorted(clean + line, key=lambda point: point[0])
            x, y = [level for level, _ in points], [s.value for _, s in points]
            error = [s.standard_error if _finite(s.standard_error) else 0.0 for _, s in points]
            label = name.replace("_", " ")
            ax.errorbar(x, y, yerr=error, color=tones[i], lw=1.2, marker=style.marker(i), markersize=4, label=label)
        ax.set_xlabel("degrees" if list(lines) == ["rotation"] else "level of shift")
        unit = next((s.unit for s in found if s.metric == metric), "")
        ax.set_ylabel(f"{metric.removeprefix('shift_').replace('_', ' ')} [{unit}]")
        style.panel_title(ax, f"{metric.removeprefix('shift_').replace('_', ' ')} (±1 se over points)")
    style.title(figure, title)
    handles, labels = axes[0].get_legend_handles_labels()
    style.legend_below(figure, handles, labels, columns=6)
    return figure


def _base(metric: str) -> str:
    """The score that an exact value and its estimate from draws share."""
    return metric.removesuffix(EXACT).removesuffix(BY_DRAWS)


def _lines(scores: Sequence[Score]) -> dict[tuple[str, int], list[Score]]:
    """(metric, number of draws) -> its scores; the metric itself first, then the same with fewer draws."""
    main = {(s.metric, s.draws or 0) for s in scores if not s.metric.endswith(AT_DRAWS)}
    lines: dict[tuple[str, int], list[Score]] = defaultdict(list)
    for s in scores:
        key = (s.metric.removesuffix(AT_DRAWS), s.draws or 0)
        if not (s.metric.endswith(AT_DRAWS) and key in main):  # with S draws it repeats the metric
            lines[key].append(s)
    # A score at a single block size (the forced dyadic one) has no curve; its number is in the table.
    curves = {key: line for key, line in lines.items() if len(line) > 1}
    return dict(sorted(curves.items(), key=lambda item: (item[0][0].endswith(EXACT), item[0][0], -item[0][1])))


def _joint_line(ax: Axes, line: Sequence[Score], is_dyadic: bool, i: int, tone: str, label: str) -> None:
    line = sorted(line, key=lambda s: (s.kappa or 0) if is_dyadic else (s.tau or 0))
    x = [(s.kappa if is_dyadic else s.tau) or 0 for s in line]
    y = [s.value / (s.tau or 1) for s in line]
    error = [s.standard_error / (s.tau or 1) if _finite(s.standard_error) else 0.0 for s in line]
    ax.plot(x, y, color=tone, lw=1.2, ls=("-", "--", ":")[i % 3], marker=style.marker(i), markersize=5, label=label)
    if i == 0:
        low, high = [a - b for a, b in zip(y, error, strict=True)], [a + b for a, b in zip(y, error, strict=True)]
        ax.fill_between(x, low, high, color=tone, alpha=0.15, lw=0, label="±1 se over blocks")
    for s, a, b in zip(line, x, y, strict=True):
        if s.status != "ok":
            ax.plot([a], [b], marker=style.marker(i), color=tone, markersize=5, mfc="white")


def _finite(value: float | None) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _scale(ax: Axes, values: Sequence[float]) -> None:
    """Logarithmic if the values are positive and span a factor of 30."""
    if values and min(values) > 0 and max(values) > 30 * min(values):
        ax.set_yscale("log")
