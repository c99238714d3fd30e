"""bnn_runner: a command-line experiment runner for Bayesian neural networks. Importing it imports nothing heavy.

`bnn_runner.run(overrides)`, `bnn_runner.sweep(overrides)` and `bnn_runner.load(folder)` are its Python side
(`bnn_runner.api`), imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bnn_runner._version import __version__

if TYPE_CHECKING:
    from bnn_runner.api import Run, load, run, sweep

__all__ = ["Run", "__version__", "load", "run", "sweep"]


def __getattr__(name: str) -> Any:
    if name in ("Run", "load", "run", "sweep"):
        from bnn_runner import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
