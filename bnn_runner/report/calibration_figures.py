"""Figures of calibration: reliability and confidence histograms, intervals and PIT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnn_runner.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Array = NDArray[np.floating]

NUM_BINS = 15
_MAX_POINTS = 1000
_OTHERS = (style.PALE, style.INK)


def reliability(
    probs: Array, labels: NDArray[np.integer], ood: Mapping[str, Array], title: str, tone: str = style.BLUE
) -> Figure:
    """Reliability diagram of the test points, and the confidence of the predictive on the test and other sets.

    Args:
        probs: test probabilities [N, K].
        labels: test classes [N].
        ood: probabilities [M, K] of each out-of-distribution set, by name.
        title: data, model, method.
        tone: colour of the method.

    Bins of equal width, right-closed, as in the usual ECE; the area of a marker shows its number of points.
    """
    figure, (left, right) = style.new_figure(columns=2, width=4.7, height=3.9)
    classes = probs.shape[1]
    confidence = probs.max(axis=1)
    correct = (probs.argmax(axis=1) == labels).astype(float)
    edges = np.linspace(0, 1, NUM_BINS + 1)
    place = np.clip(np.ceil(confidence * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
    count = np.bincount(place, minlength=NUM_BINS)
    filled = count > 0
    accuracy = np.bincount(place, correct, minlength=NUM_BINS)[filled] / count[filled]
    stated = np.bincount(place, confidence, minlength=NUM_BINS)[filled] / count[filled]
    # One more success and failure, so that a bin with a single point does not look certain.
    smooth = (accuracy * count[filled] + 1) / (count[filled] + 2)
    error = np.sqrt(smooth * (1 - smooth) / count[filled])
    ece = float(np.sum(count[filled] * np.abs(accuracy - stated)) / count.sum())
    left.plot([0, 1], [0, 1], color=style.GREY, ls="--", lw=1, label="calibrated")
    size = 12 + 130 * count[filled] / count.max()
    left.errorbar(stated, accuracy, yerr=error, fmt="none", color=tone, lw=1, capsize=2)
    left.scatter(
        stated,
        accuracy,
        s=size,
        color=tone,
        edgecolor="white",
        lw=0.6,
        label="test points of a bin, ±1 se (area: number)",
    )
    low = max(0.0, min(1 / classes, float(accuracy.min())) - 0.05)
    left.set_xlim(max(0.0, 1 / classes - 0.05), 1.02)
    left.set_ylim(low, 1.03)
    left.set_xlabel("confidence")
    left.set_ylabel("accuracy")
    style.panel_title(left, f"reliability: accuracy {correct.mean():.3f}, ECE {ece:.3f} ({NUM_BINS} bins)")
    shown = edges[edges >= np.floor(NUM_BINS / classes) / NUM_BINS - 1e-9]
    for i, (name, found) in enumerate({"test": confidence, **{k: v.max(axis=1) for k, v in ood.items()}}.items()):
        weights = np.full(len(found), 1 / max(len(found), 1))
        label = f"{name}, mean {found.mean():.2f}"
        own, dashes = (tone, "-") if i == 0 else (_OTHERS[i % 2], ("--", ":", "-.")[(i - 1) % 3])
        right.hist(found, bins=shown, weights=weights, histtype="stepfilled", color=own, alpha=0.22 if i == 0 else 0.08)
        right.hist(found, bins=shown, weights=weights, histtype="step", color=own, ls=dashes, lw=1.6, label=label)
    right.set_xlabel("confidence")
    right.set_ylabel("fraction of points")
    style.panel_title(right, "confidence in and out of distribution" if ood else "confidence")
    style.title(figure, title)
    handles, names = left.get_legend_handles_labels()
    more, more_names = right.get_legend_handles_labels()
    style.legend_below(figure, handles + more, names + more_names)
    return figure


def predicted_and_pit(mean: Array, sd: Array, target: Array, pit: Array, title: str, tone: str = style.BLUE) -> Figure:
    """Regression with several inputs: predicted against observed, and the PIT histogram.

    Args:
        mean: predictive means [N], original units.
        sd: standard deviations [N] of a new observation.
        target: observed [N].
        pit: predictive distribution function at the observed value [N]; uniform if calibrated.
        title: data, model, method.
        tone: colour of the method.
    """
    figure, (left, right) = style.new_figure(columns=2, width=4.6, height=3.9)
    step = max(1, len(mean) // _MAX_POINTS)
    m, s, t = mean[::step], sd[::step], target[::step]
    span = np.array([min(t.min(), m.min()), max(t.max(), m.max())])
    left.plot(span, span, color=style.GREY, ls="--", lw=1, label="exact")
    left.errorbar(t, m, yerr=2 * s, fmt="none", color=tone, alpha=0.3, lw=0.9, label="±2 sd, new observation")
    left.scatter(t, m, s=10, color=tone, lw=0, alpha=0.8, label="test points", zorder=3)
    left.set_xlabel("observed")
    left.set_ylabel("predicted")
    within = float(np.mean(np.abs(target - mean) <= 2 * sd))
    style.panel_title(left, f"{within:.0%} within ±2 sd (Gaussian: 95%)")
    bins = max(5, min(20, len(pit) // 15))
    expected = 1.0
    band = 2 * np.sqrt(bins * (1 - 1 / bins) / len(pit))  # of a density of n uniform numbers in `bins` bins
    right.axhspan(max(0.0, expected - band), expected + band, color=style.GREY, alpha=0.2, lw=0, label="uniform ±2 se")
    right.hist(pit, bins=bins, range=(0, 1), density=True, color=tone, alpha=0.75, edgecolor="white")
    right.axhline(expected, color=style.BLACK, lw=1, ls="--")
    right.set_xlim(0, 1)
    right.set_xlabel("predictive distribution function at the observed value")
    right.set_ylabel("density")
    style.panel_title(right, "PIT: U = too narrow, ∩ = too wide")
    style.title(figure, title)
    handles, labels = left.get_legend_handles_labels()
    more, names = right.get_legend_handles_labels()
    style.legend_below(figure, handles + more, labels + names)
    return figure
