"""Figures as a reader sees them: text that overlaps, is cut off, or is too small at the width at which it is shown."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from bnn_runner.report import style

_PIXELS = 2.0
"""Boxes include the space around letters, so that neighbours may share this much."""


def problems_of(figure: Figure, draw: Callable[[], object] | None = None) -> list[str]:
    """What is wrong with the text of a figure: one sentence for each place. `draw` draws it, by default as a PNG."""
    drawn: dict[Text, None] = {}
    original = Text.draw

    def record(self: Text, renderer: Any, *more: Any, **named: Any) -> None:
        if self.get_visible() and self.get_text().strip():
            drawn[self] = None
        original(self, renderer, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "draw", record)
        (draw or FigureCanvasAgg(figure).draw)()
    canvas: Any = figure.canvas
    renderer = canvas.get_renderer()
    boxes = [(text, text.get_window_extent(renderer)) for text in drawn]
    found = []
    width, height = figure.get_size_inches() * figure.dpi
    shown = min(1.0, style.MOST_WIDTH / figure.get_size_inches()[0])
    for text, box in boxes:
        if box.x0 < -_PIXELS or box.y0 < -_PIXELS or box.x1 > width + _PIXELS or box.y1 > height + _PIXELS:
            found.append(f"{text.get_text()!r} is cut off at the edge")
        if (size := float(text.get_fontsize()) * shown) < style.LEAST_TEXT:
            found.append(f"{text.get_text()!r} is shown at {size:.1f} pt")
    for (one, a), (two, b) in itertools.combinations(boxes, 2):
        across, up = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        if across > _PIXELS and up > _PIXELS:
            found.append(f"{one.get_text()!r} and {two.get_text()!r} overlap")
    return found


@pytest.fixture
def seen_figures(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Figure]]:
    """Collects every figure that is saved, by its file's name, and fails at the end if one has a problem with its text.

    Drawings that run in other processes are done here instead.
    """
    from bnn_runner.cli import report

    figures: dict[str, Figure] = {}
    problems: dict[str, list[str]] = {}
    save = style.save

    def look(figure: Figure, path: Path) -> Path:
        figures[path.name] = figure
        problems[path.name] = problems_of(figure, lambda: save(figure, path))
        return path

    monkeypatch.setattr(style, "save", look)
    monkeypatch.setattr(report, "draw_in_parallel", lambda drawings, here: [here(d) is not None for d in drawings])
    yield figures
    wrong = {name: found for name, found in problems.items() if found}
    assert not wrong, "\n".join(f"{name}: {'; '.join(found)}" for name, found in wrong.items())
