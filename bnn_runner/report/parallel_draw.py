"""Figures of a large sweep, drawn in parallel by processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bnn_runner.report.drawing import default_style

Drawing = Callable[[], Path | None]
_DRAWN, _NOTHING_TO_DRAW, _FAILED = 0, 3, 1


def draw_in_parallel(drawings: Sequence[Drawing], here: Callable[[Drawing], Path | None] | None = None) -> list[bool]:
    """Draw every figure; returns whether each wrote its file.

    All but the last run in forked copies of this process, where that is safe (Linux). A drawing that failed in a copy
    is repeated in this process, so that its error is raised here, or handled by `here`, which runs a drawing.
    """
    run = here or (lambda drawing: drawing())
    *others, last = drawings
    if sys.platform != "linux" or (os.cpu_count() or 1) < 2:
        return [run(drawing) is not None for drawing in drawings]
    with default_style():
        import matplotlib.figure  # noqa: F401 - once, not in every copy

    copies = [_copy(drawing) for drawing in others]
    try:
        last_there = run(last) is not None
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in copies]
    there = [
        run(drawing) is not None if code not in (_DRAWN, _NOTHING_TO_DRAW) else code == _DRAWN
        for code, drawing in zip(codes, others, strict=True)
    ]
    return [*there, last_there]


def _copy(drawing: Drawing) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    try:
        with default_style():
            code = _NOTHING_TO_DRAW if drawing() is None else _DRAWN
    except BaseException:
        code = _FAILED
    os._exit(code)
