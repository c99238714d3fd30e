"""Being asked to stop: a signal ends the run at its next safe point, a second Ctrl-C at once.

SIGTERM, SIGUSR1 and SIGUSR2 are what schedulers announce a preemption or the end of a job's time by. They come
again and again (to the process and to its group), so that a second one means no more than the first.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bnn_runner.errors import Interrupted

STOPPING = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, n))
"""The signals that ask for a stop (Windows has the first two)."""


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
    """Handlers for the signals of `STOPPING` while the block runs; those found are put back. Main thread only."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if request.reason:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        request.reason = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    found = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield request
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
