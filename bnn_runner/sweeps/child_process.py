"""A job of a sweep runs in a process of its own: whatever ends it, and whatever it leaves behind, ends there.

The processes are forked from a server that has imported everything and computed nothing, so that each
begins with fresh random state, flags and memory within hundredths of a second. The server lives as long as we do:
what a child must have as it is now (environment, where output goes) is handed to it.
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

PRELOADED = [
    "bnn_runner.sweeps.fork_server",
    "bnn_runner.runner",
    "bnn_runner.sweeps.job",
    "bnn_runner.sweeps.fork_preload",
]
_LOCK = threading.Lock()
"""Of starting a process and of asking how one ended: starting one asks after all others."""


@dataclass
class Watch:
    """The signals that asked us to stop, and the processes to pass them on to."""

    asked: list[int] = field(default_factory=list)
    children: set[int] = field(default_factory=set)


_watches: list[Watch] = []  # that of the main thread, if it has one


def run_apart(
    work: Callable[..., None], *arguments: Any, environment: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """Run `work` (of a module) in a process of its own: its exit code, and the signal that asked us to stop.

    An exit code below 0 is the signal that killed it; 0 as the signal means that none came. Signals
    that ask for a stop are passed on, and the process is waited for: it saves its state first.
    Several threads may each run one; then the main thread holds `passing_on`. `environment` is added to ours.
    """
    context = multiprocessing.get_context(
        "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
    )
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(PRELOADED)
    now = os.environ | (environment or {}), (_Inherited(1), _Inherited(2))
    child: Any = context.Process(target=_work, args=(work, arguments, *now))
    with passing_on() as watch:
        sys.stdout.flush()
        sys.stderr.flush()
        with _LOCK, _known_start_method(context):
            child.start()
        watch.children.add(child.pid)
        code = None
        while code is None:
            wait([child.sentinel], 2.0)
            with _LOCK:
                code = child.exitcode
            if code is None and watch.asked:  # told again: a process that has only just begun may have missed it
                _signal(child.pid, signal.SIGTERM)
        watch.children.discard(child.pid)
    child.close()
    return code, watch.asked[0] if watch.asked else 0


@contextmanager
def _known_start_method(context: Any) -> Iterator[None]:
    """A child is told the process's default way to start children, and joblib's workers have one of their own."""
    found = multiprocessing.get_start_method(allow_none=True)
    if found is None or found in multiprocessing.get_all_start_methods():
        yield
        return
    multiprocessing.set_start_method(context.get_start_method(), force=True)
    try:
        yield
    finally:
        multiprocessing.set_start_method(found, force=True)


@contextmanager
def passing_on() -> Iterator[Watch]:
    """Signals that ask for a stop are passed on to every process that runs apart meanwhile. For the main thread.

    Within another one it is that one; in a thread without one nothing is passed on.
    """
    if _watches or threading.current_thread() is not threading.main_thread():
        yield _watches[0] if _watches else Watch()
        return
    watch = Watch()

    def handle(number: int, frame: object) -> None:
        # Ctrl-C on a terminal reaches the children by itself; twice it would mean "at once".
        again = number == signal.SIGINT and signal.SIGINT in watch.asked
        watch.asked.append(number)
        for child in list(watch.children):
            _signal(child, signal.SIGINT if again else signal.SIGTERM)

    _watches.append(watch)
    found = {number: signal.signal(number, handle) for number in STOPPING}
    try:
        yield watch
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
        _watches.clear()


def _signal(process: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, number)


class _Inherited:
    """A file descriptor that the child gets as it is when the child is started; there `put` gives it its number."""

    def __init__(self, number: int, copy: Any = None) -> None:
        self.number = number
        self.copy = copy

    def __reduce__(self) -> tuple[type[_Inherited], tuple[int, Any]]:
        return _Inherited, (self.number, DupFd(self.number))

    def put(self) -> None:
        if self.copy is not None:
            os.dup2(copy := self.copy.detach(), self.number)
            os.close(copy)


def _work(
    work: Callable[..., None],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    streams: tuple[_Inherited, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for stream in streams:
        stream.put()
    for number in STOPPING:  # the server ignores them, and one before the run can save anything ends it quietly
        signal.signal(number, lambda number, frame: os._exit(128 + number))
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    work(*arguments)


def _stop_with_parent() -> None:
    """Ask this process to stop once the one that began it is gone: nobody waits for it any more."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
