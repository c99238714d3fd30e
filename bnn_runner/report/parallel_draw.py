"""Figures of a large sweep, drawn in parallel by processes of their own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Drawing = Callable[[], Path | None]
_DRAWN, _NOTHING_TO_DRAW, _FAILED = 0, 3, 1


def draw_in_parallel(drawings: Sequence[Drawing]) -> list[bool]:
    """Draw every figure; returns whether each wrote its file.

    All but the last run in forked copies of this process, where that is safe (Linux). A drawing that failed in a copy
    is repeated here, so that its error is raised here.
    """
    *others, last = drawings
    if sys.platform != "linux" or (os.cpu_count() or 1) < 2:
        return [drawing() is not None for drawing in drawings]
    import matplotlib.figure  # noqa: F401 - once, not in every copy

    copies = [_copy(drawing) for drawing in others]
    try:
        here = last() is not None
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in copies]
    there = [
        drawing() is not None if code not in (_DRAWN, _NOTHING_TO_DRAW) else code == _DRAWN
        for code, drawing in zip(codes, others, strict=True)
    ]
    return [*there, here]


def _copy(drawing: Drawing) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    try:
        code = _NOTHING_TO_DRAW if drawing() is None else _DRAWN
    except BaseException:
        code = _FAILED
    os._exit(code)
