"""The state of running chains on disk, from which an interrupted run resumes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bnn_runner.errors import Interrupted
from bnn_runner.runtime.files import write_torch

SAVE_SECONDS = 20.0


class Checkpoint:
    """Keeps a state in one file, saved at intervals and when the run is interrupted.

    `identity` names the chains; a file of other chains, or a damaged one, is ignored.
    """

    def __init__(self, path: Path | None, identity: str) -> None:
        self.path, self.identity = path, identity
        self._saved = time.perf_counter()

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The state to resume from, or None."""
        if self.path is None:
            return None
        try:
            saved: dict[str, Any] = torch.load(self.path, map_location=device, weights_only=True)
        except Exception:  # missing or unreadable
            return None
        return saved if saved.get("identity") == self.identity else None

    def tick(self, state: Callable[[], dict[str, Any]], progress: Callable[[], None]) -> None:
        """Report the progress; save `state()` if that interrupts the run, or if the last save is some time ago."""
        try:
            progress()
        except (Interrupted, KeyboardInterrupt):
            self.save(state())
            raise
        if time.perf_counter() - self._saved > SAVE_SECONDS:
            self.save(state())

    def save(self, state: dict[str, Any]) -> None:
        if self.path is not None:
            write_torch(self.path, {**state, "identity": self.identity})
        self._saved = time.perf_counter()
