"""Stop requests: a signal ends the run at its next safe point; a second Ctrl-C ends it at once.

Schedulers send SIGTERM, SIGUSR1 or SIGUSR2 before a preemption or at the end of a job's time. They often send it
several times (to the process and to its group), so a second one means no more than the first.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bnn_runner.errors import Interrupted

STOPPING = tuple(getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, n))
"""The signals that request a stop (Windows has only the first two)."""


class StopRequest:
    """Whether a stop was requested: call it for a bool; `reason` is the signal's name, or "" if there was none."""

    def __init__(self) -> None:
        self.reason = ""

    def __call__(self) -> bool:
        return bool(self.reason)

    def check(self, during: str) -> None:
        """Raises `Interrupted` if a stop was requested.

        Args:
            during: What the request stopped; starts the message ('Training').
        """
        if self.reason:
            raise Interrupted(f"{during} stopped by {self.reason}")


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the signals of `STOPPING` into a stop request inside the block; restores the handlers afterwards.

    Outside the main thread, where Python allows no signal handlers, the request is never made.
    """
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

    previous = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
