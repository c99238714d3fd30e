"""The look of every figure: colours that colour-blind readers can distinguish, thin frames, legends outside the data.

Only matplotlib's `Figure` is used, never pyplot: no global state, no display, nothing to close.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bnn_runner.runtime.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

# Okabe and Ito's palette without its yellow, which is too pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5A5A5A", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SHAPES = (*MARKERS, "<", ">", "h", "p")
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, BLACK = COLOURS
INK, PALE = "#333333", "#9A9A9A"
"""Of what belongs to no method: training points, truth, other data sets."""
_FURTHEST = 0.45
"""How far the tints of one colour go towards black and white."""
DOTS_PER_INCH = 150
MOST_WIDTH = 10.0
"""Inches. Pages show figures up to this width at their own size; a wider one is shrunk, and its text with it."""
LEAST_TEXT = 7.0
"""Points of the smallest text of a figure."""
_LETTER, _HANDLE = 0.066, 0.6
"""Approximate inches of a letter of a legend, and of its handle with the space between columns."""


def colour(index: int) -> str:
    """The colour of the index-th class, split or kind of shift, which are no methods (those: `looks`)."""
    return COLOURS[index % len(COLOURS)]


def marker(index: int) -> str:
    """The marker of the index-th of these, so that colour is never the only distinction."""
    return MARKERS[(index + index // len(COLOURS)) % len(MARKERS)]


def handle(colour: str, marker: str, line: float = 1.2) -> Any:
    """A handle of a legend: a marker on a line of this width; 0 leaves the line out."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=colour, marker=marker, markersize=5, lw=line)


def patch(colour: str, alpha: float) -> Any:
    """The handle of a band in a legend."""
    from matplotlib.patches import Patch

    return Patch(color=colour, alpha=alpha, lw=0)


def new_figure(rows: int = 1, columns: int = 1, width: float = 4.6, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure of rows × columns panels, each `width` × `height` inches, and its axes row by row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [ax for line in grid for ax in line]
    for ax in axes:
        tidy(ax)
    return figure, axes


def new_panels(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels, each `width` × `height` inches, as many in a row as `MOST_WIDTH` allows."""
    across = max(1, min(count, int(MOST_WIDTH / width)))
    figure, axes = new_figure(-(-count // across), across, width, height)
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def tints(colour: str, count: int) -> list[str]:
    """`count` tints of a colour: the colour itself, then alternately darker and lighter ones."""
    steps, found = max(1, count // 2), [colour]
    parts = [int(colour[k : k + 2], 16) for k in (1, 3, 5)]
    for i in range(1, count):
        share, towards = _FURTHEST * ((i + 1) // 2) / steps, 0 if i % 2 else 255
        found.append("#" + "".join(f"{round(part + share * (towards - part)):02X}" for part in parts))
    return found[:count]


def tidy(ax: Axes) -> None:
    """Two spines, a pale grid under the data, small ticks."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#808080")
    ax.tick_params(labelsize=8, color="#808080")
    ax.grid(True, color="#E6E6E6", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.xaxis.label.set_fontsize(9)
    ax.yaxis.label.set_fontsize(9)


def panel_title(ax: Axes, text: str, size: float = 9.5) -> None:
    """What one panel shows, smaller than the figure's title."""
    ax.set_title(text, fontsize=size, y=1.0)  # with y given, matplotlib does not measure every tick


def title(figure: Figure, text: str) -> None:
    """The title of the figure: data, model and method."""
    figure.suptitle(text, fontsize=10, fontweight="bold")


def share(axes: Sequence[Axes], which: Literal["x", "y", "xy"]) -> None:
    """Give panels that are compared the same limits, the widest of theirs, along these axes."""
    for name in which:
        limits = [getattr(ax, f"get_{name}lim")() for ax in axes]
        low, high = min(min(pair) for pair in limits), max(max(pair) for pair in limits)
        for ax in axes:
            getattr(ax, f"set_{name}lim")(low, high)


def legend_below(figure: FigureBase, handles: list[Any], labels: list[str], columns: int = 4) -> None:
    """One legend below all panels, so that it covers no data, in at most `columns` columns that fit the figure."""
    if handles:
        fitting = legend_columns(labels, _inches(figure), min(columns, len(labels)))
        look: dict[str, Any] = {"ncols": fitting, "fontsize": 8, "frameon": False}
        placed_by_us = figure.get_layout_engine() is None  # type: ignore[attr-defined]
        figure.legend(handles, labels, loc="lower center" if placed_by_us else "outside lower center", **look)


def _inches(figure: FigureBase) -> float:
    return float(figure.bbox.width / figure.dpi)  # type: ignore[attr-defined]


def legend_columns(labels: Sequence[str], width: float, most: int) -> int:
    """The number of columns (1 to `most`) in which a legend of these labels fits `width` inches."""
    longest = max((len(label) for label in labels), default=1)
    return max(1, min(most, int(width / (longest * _LETTER + _HANDLE))))


def place(figure: FigureBase, size: tuple[float, float], rows: int, columns: int, **inches: float) -> None:
    """Place the panels of a figure of `size` by lengths in inches.

    `left`, `right`, `top`, `bottom` are its margins, `across` and `down` the gaps between panels. For figures with many
    panels, for which matplotlib's own layout takes as long as the drawing.
    """
    width, height = size
    edges = {"left": inches["left"] / width, "right": 1 - inches["right"] / width}
    edges |= {"bottom": inches["bottom"] / height, "top": 1 - inches["top"] / height}
    wide = (width - inches["left"] - inches["right"] - (columns - 1) * inches["across"]) / columns
    high = (height - inches["top"] - inches["bottom"] - (rows - 1) * inches["down"]) / rows
    figure.subplots_adjust(**edges, wspace=inches["across"] / wide, hspace=inches["down"] / high)


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG file atomically."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    # Like `savefig`, but without its first drawing, which only computes the layout: the second one does so as well.
    figure.set_dpi(DOTS_PER_INCH)
    figure.set_facecolor("white")
    canvas = FigureCanvasAgg(figure)
    # Little compression: more would take half the time of a large figure and save a third of the bytes.
    write_atomically(path, lambda file: canvas.print_png(file, pil_kwargs={"compress_level": 1}))
    return path
