"""Being asked to stop: the first Ctrl-C or SIGTERM ends the run at its next safe point, the second at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bnn_runner.errors import Interrupted


class StopRequest:
    """Whether somebody asked; call it to ask whether they did."""

    def __init__(self) -> None:
        self.reason = ""

    def __call__(self) -> bool:
        return bool(self.reason)

    def check(self, during: str) -> None:
        """Raise `Interrupted` if a stop was asked for."""
        if self.reason:
            raise Interrupted(f"{during} stopped by {self.reason}")


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Handlers for SIGINT and SIGTERM while the block runs; those found are put back. Main thread only."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.reason:
            raise KeyboardInterrupt
        request.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    found = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
