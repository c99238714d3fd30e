"""The predictive over input space: bands in one dimension, decision maps in two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bnn_runner.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.floating]

_WIDTH = 4.9  # two figures of runs fit in a row
NUM_DRAWN = 6  # sample functions drawn over the bands: enough to see how they vary
_MAX_POINTS = 1500  # more scatter points would only make a blot


def bands_1d(
    x: Array,
    mean: Array,
    epistemic_sd: Array | None,
    total_sd: Array,
    train: tuple[Array, Array],
    test: tuple[Array, Array] | None,
    truth: Array | None,
    draws: Array | None,
    title: str,
    noise_sd: Array | None = None,
    true_noise_sd: Array | None = None,
    tone: str = style.BLUE,
) -> Figure:
    """1-D regression in original units; below it the two parts of the uncertainty if the noise varies.

    Args:
        x: grid [M], ascending.
        mean: predictive mean [M].
        epistemic_sd: standard deviation [M] of the mean over draws; None if unknown.
        total_sd: standard deviation [M] of a new observation.
        train: inputs and targets, [N] each.
        test: likewise, or None.
        truth: noise-free function on the grid [M], if it is known.
        draws: mean functions of single draws [S, M]; the first few are shown.
        title: data, model, method.
        noise_sd: standard deviation [M] of the noise (aleatoric), if it depends on the input.
        true_noise_sd: that of generated data [M].
        tone: colour of the method.
    """
    if noise_sd is None:
        figure, (ax,) = style.new_figure(width=_WIDTH, height=3.5)
    else:
        figure, (ax, below) = style.new_figure(rows=2, width=_WIDTH, height=2.9)
        _parts_of_uncertainty(below, x, noise_sd, epistemic_sd, true_noise_sd, tone)
    ax.fill_between(
        x, mean - 2 * total_sd, mean + 2 * total_sd, color=tone, alpha=0.16, lw=0, label="±2 sd, new observation"
    )
    if epistemic_sd is not None and np.any(epistemic_sd > 0):
        low, high = mean - 2 * epistemic_sd, mean + 2 * epistemic_sd
        ax.fill_between(x, low, high, color=tone, alpha=0.30, lw=0, label="±2 sd, function (epistemic)")
    if draws is not None and len(draws) > 1:
        for i, draw in enumerate(draws[:NUM_DRAWN]):
            label = "draws" if i == 0 else None
            ax.plot(x, draw, color=tone, lw=0.6, alpha=0.7, label=label)
    if truth is not None:
        ax.plot(x, truth, color=style.INK, lw=1.2, ls="--", label="truth")
    ax.plot(x, mean, color=tone, lw=1.8, label="mean")
    if test is not None and len(test[0]):
        ax.scatter(*_thinned(*test), s=7, color=style.PALE, alpha=0.5, lw=0, label="test points")
    ax.scatter(*_thinned(*train), s=13, color=style.INK, edgecolor="white", lw=0.4, zorder=5, label="training points")
    # The data and the mean set the limits, so that one extreme draw does not flatten the rest.
    seen = np.concatenate([train[1], mean - 2 * total_sd, mean + 2 * total_sd, *([] if truth is None else [truth])])
    seen = seen[np.isfinite(seen)]
    middle = np.median(train[1])
    reach = 4 * max(float(np.ptp(train[1])), 1e-12)
    ax.set_ylim(max(seen.min(), middle - reach) - 0.03 * reach, min(seen.max(), middle + reach) + 0.03 * reach)
    ax.set_xlim(float(x[0]), float(x[-1]))
    ax.set_xlabel("input")
    ax.set_ylabel("target")
    style.title(figure, title)
    style.legend_below(figure, *ax.get_legend_handles_labels())
    return figure


def _parts_of_uncertainty(
    ax: Axes, x: Array, noise_sd: Array, epistemic_sd: Array | None, true_noise_sd: Array | None, tone: str
) -> None:
    """Aleatoric and epistemic standard deviation against the input, in original units."""
    ax.plot(x, noise_sd, color=style.PALE, lw=1.8, label="aleatoric (noise)")
    if epistemic_sd is not None:
        ax.plot(x, epistemic_sd, color=tone, lw=1.8, label="epistemic (function)")
    if true_noise_sd is not None:
        ax.plot(x, true_noise_sd, color=style.INK, lw=1.2, ls="--", label="true noise")
    top = float(np.nanmax(noise_sd if true_noise_sd is None else np.maximum(noise_sd, true_noise_sd)))
    reach = float(np.nanmedian(noise_sd)) * 8 + 1e-12
    ax.set_ylim(0, 1.1 * min(top, reach))
    ax.set_xlim(float(x[0]), float(x[-1]))
    ax.set_xlabel("input")
    ax.set_ylabel("standard deviation")
    ax.legend(fontsize=8, frameon=False, loc="upper left")


def decision_map_2d(
    x0: Array,
    x1: Array,
    probs: Array,
    mutual_information: Array | None,
    entropy: Array,
    points: Array,
    labels: NDArray[np.integer],
    class_names: tuple[str, ...],
    title: str,
) -> Figure:
    """2-D classification on a grid, in original units.

    Args:
        x0: grid along the first input [A].
        x1: grid along the second input [B].
        probs: predictive probabilities [B, A, K].
        mutual_information: [B, A] in nats; None if the predictive does not separate it.
        entropy: of the mean probabilities [B, A] in nats, shown if there is no mutual information.
        points: training inputs [N, 2].
        labels: training classes [N].
        class_names: names, or empty.
        title: data, model, method.
    """
    from matplotlib.colors import to_rgb

    figure, (left, right) = style.new_figure(columns=2, width=4.9, height=4.2)
    classes = probs.shape[-1]
    extent = (float(x0[0]), float(x0[-1]), float(x1[0]), float(x1[-1]))
    if classes == 2:
        image = left.imshow(
            probs[..., 1], extent=extent, origin="lower", aspect="auto", cmap="RdBu_r", vmin=0, vmax=1, alpha=0.85
        )
        figure.colorbar(image, ax=left, shrink=0.85).set_label(f"p({_class_name(class_names, 1)})", fontsize=9)
        left.contour(x0, x1, probs[..., 1], levels=[0.5], colors="black", linewidths=1.0)
        tones: tuple[str, ...] = ("#2166AC", "#B2182B")
    else:
        tones = tuple(style.colour(k) for k in range(classes))
        palette = np.array([to_rgb(tone) for tone in tones])
        # Colours are mixed by the probabilities, and fade to white with uncertainty.
        left.imshow(1 - (1 - probs @ palette) * 0.55, extent=extent, origin="lower", aspect="auto")
    shade, label = (
        (entropy, "predictive entropy") if mutual_information is None else (mutual_information, "mutual information")
    )
    reach = max(float(np.nanmax(shade)), 0.01)  # do not show rounding as uncertainty
    image = right.imshow(shade, extent=extent, origin="lower", aspect="auto", cmap="viridis", vmin=0, vmax=reach)
    figure.colorbar(image, ax=right, shrink=0.85).set_label(f"{label} [nats]", fontsize=9)
    style.panel_title(left, "class probabilities")
    style.panel_title(right, "epistemic uncertainty" if mutual_information is not None else "total uncertainty")
    for ax in (left, right):
        ax.grid(False)
        for k in range(classes):
            here = points[labels == k][:_MAX_POINTS]
            ax.scatter(
                here[:, 0], here[:, 1], s=14, color=tones[k % len(tones)], marker=style.marker(k), edgecolor="white",
                lw=0.5, label=_class_name(class_names, k),
            )  # fmt: skip
        ax.set_xlim(extent[0], extent[1])
        ax.set_ylim(extent[2], extent[3])
        ax.set_xlabel("input 1")
    left.set_ylabel("input 2")
    style.title(figure, title)
    style.legend_below(figure, *left.get_legend_handles_labels(), columns=8)
    return figure


def _class_name(names: tuple[str, ...], k: int) -> str:
    return names[k] if k < len(names) else f"class {k}"


def _thinned(x: Array, y: Array) -> tuple[Array, Array]:
    step = max(1, len(x) // _MAX_POINTS)
    return x[::step], y[::step]
