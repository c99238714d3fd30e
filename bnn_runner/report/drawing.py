"""Draws figures in matplotlib's default style, whatever a person's own settings are; a figure that fails is a note.

A figure is never worth a run: its scores are complete without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from bnn_runner.errors import Interrupted
from bnn_runner.runtime.files import explain_write_error

Result = TypeVar("Result")
_OF_THE_SESSION = ("backend", "interactive", "toolbar", "webagg", "tk.", "macosx", "figure.hooks", "timezone")
"""Settings of a session and not of a style; they stay."""
_LONGEST_REASON = 160


@contextmanager
def default_style() -> Iterator[None]:
    """Matplotlib's own defaults inside the block; a person's settings (fonts, usetex, colours) are back after it."""
    matplotlib = _imported()
    with matplotlib.rc_context():
        own = matplotlib.rcParamsDefault
        names = [name for name in dict.keys(own) if not name.startswith(_OF_THE_SESSION)]
        current = matplotlib.rcParams
        current.update({name: own[name] for name in names if dict.get(current, name) != dict.get(own, name)})
        yield


def _imported() -> Any:
    """Matplotlib, imported even if a person's settings prevent it: MPLBACKEND of a notebook, a damaged matplotlibrc."""
    try:
        import matplotlib
    except Exception:
        safe = {"MPLBACKEND": "agg", "MATPLOTLIBRC": os.devnull}
        saved = {name: os.environ.get(name) for name in safe}
        _forget_partial_import()
        os.environ.update(safe)
        try:
            import matplotlib
        finally:
            for name, value in saved.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
    return matplotlib


def _forget_partial_import() -> None:
    for module in [name for name in sys.modules if name == "matplotlib" or name.startswith("matplotlib.")]:
        del sys.modules[module]


def attempt(name: str, draw: Callable[[], Result]) -> tuple[Result | None, str]:
    """Draws a figure in the default style.

    Args:
        name: Name of the figure, for the note.
        draw: Draws it and writes its file.

    Returns:
        The result of `draw` and an empty text; or None and a note that says why the figure was not drawn.

    Raises:
        OSError: If the disk is full or not writable, which concerns the other files too.
        Interrupted: If a stop was requested.
    """
    try:
        with default_style():
            return draw(), ""
    except Interrupted:
        raise
    except Exception as error:
        if isinstance(error, OSError) and explain_write_error(error) is not None:
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0][:_LONGEST_REASON]}" if lines else type(error).__name__
        return None, f"the figure {name} was not drawn ({reason}); scores and tables are complete without it"
