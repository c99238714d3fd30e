"""Runs a job of a sweep in its own process, so that a crash, or any state that a job changes, affects no other job.

The processes are forked from a server that has imported everything and computed nothing. So each starts within
hundredths of a second, with fresh random state, flags and memory. The server lives as long as this process; the current
environment and output streams are passed to each child.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from typing import Any

from bnn_runner.runtime.signals import STOPPING
from bnn_runner.runtime.streams import accept_every_text

PRELOADED = [
    "bnn_runner.sweeps.fork_server",
    "bnn_runner.runner",
    "bnn_runner.sweeps.job",
    "bnn_runner.sweeps.fork_preload",
]
_LOCK = threading.Lock()
"""Held while a process starts and while exit codes are read: starting a process also polls all others."""


@dataclass
class StopSignals:
    """The stop signals received so far, and the processes to which they are forwarded."""

    received: list[int] = field(default_factory=list)
    children: set[int] = field(default_factory=set)


_active: list[StopSignals] = []  # the one of the main thread, while `forward_signals` is active


def run_in_child(
    work: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """Runs a function in its own process and waits for it.

    Stop signals are forwarded to the process, which saves its state before it ends. Several threads may each run a
    process; the main thread must then be inside `forward_signals`.

    Args:
        work: A function of a module (it is pickled by its name).
        *arguments: Its arguments.
        environment: Variables to add to the environment of this process.

    Returns:
        The exit code (negative: the signal that killed the process), and the first stop signal that this process
        received meanwhile (0: none).
    """
    context = multiprocessing.get_context(
        "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
    )
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    inherited = os.environ | (environment or {}), (_InheritedStream(1), _InheritedStream(2))
    child: Any = context.Process(target=_child_main, args=(work, arguments, *inherited))
    with forward_signals() as signals:
        sys.stdout.flush()
        sys.stderr.flush()
        with _LOCK, _valid_start_method(context):
            child.start()
        signals.children.add(child.pid)
        code = None
        while code is None:
            wait([child.sentinel], 2.0)
            with _LOCK:
                code = child.exitcode
            if code is None and signals.received:  # sent again: a process that has just started may have missed it
                _send_signal(child.pid, signal.SIGTERM)
        signals.children.discard(child.pid)
    child.close()
    return code, signals.received[0] if signals.received else 0


@contextmanager
def _valid_start_method(context: Any) -> Iterator[None]:
    """Sets a default start method that the child knows: it inherits the default, and joblib may have set its own."""
    previous = multiprocessing.get_start_method(allow_none=True)
    if previous is None or previous in multiprocessing.get_all_start_methods():
        yield
        return
    multiprocessing.set_start_method(context.get_start_method(), force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(previous, force=True)


@contextmanager
def forward_signals() -> Iterator[StopSignals]:
    """Forwards stop signals to all processes of `run_in_child` inside the block. For the main thread.

    Nested calls, and calls in other threads, yield the signals of the main thread. In a thread without an active block
    in the main thread, nothing is forwarded.
    """
    if _active or threading.current_thread() is not threading.main_thread():
        yield _active[0] if _active else StopSignals()
        return
    signals = StopSignals()

    def handle(number: int, frame: object) -> None:
        # A terminal sends Ctrl-C to the children too, and a second SIGINT stops them at once: forward it as SIGTERM.
        again = number == signal.SIGINT and signal.SIGINT in signals.received
        signals.received.append(number)
        for child in list(signals.children):
            _send_signal(child, signal.SIGINT if again else signal.SIGTERM)

    _active.append(signals)
    previous = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _active.clear()


def _send_signal(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


class _InheritedStream:
    """A file descriptor that is duplicated for the child when the child starts; `restore` gives it its number there."""

    def __init__(self, number: int, copy: Any = None) -> None:
        self.number = number
        self.copy = copy

    def __reduce__(self) -> tuple[type[_InheritedStream], tuple[int, Any]]:
        return _InheritedStream, (self.number, DupFd(self.number))

    def restore(self) -> None:
        if self.copy is not None:
            os.dup2(copy := self.copy.detach(), self.number)
            os.close(copy)


def _child_main(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    streams: tuple[_InheritedStream, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream in streams:
        stream.restore()
    accept_every_text()
    for number in STOPPING:  # the server ignores them; before the run can save anything, a signal just ends the child
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    work(*arguments)


def _stop_with_parent() -> None:
    """Stops this process once its parent no longer exists."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
