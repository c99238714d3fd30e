"""Leases: one owner of a piece of work at a time, over processes and machines.

A lease is a file made exclusively, kept alive by a heartbeat. File locks are not used: they fail
on network file systems. A lease is dead when its process is gone (on the same machine) or when its
heartbeat has stood still for a minute of the watcher's own clock (on another one).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

HEARTBEAT_SECONDS = 10.0
DEAD_AFTER_SECONDS = 60.0


class Lease:
    """The right to work on `path`; the file is `path` + ".lease". Use as a context manager.

    Entering waits while a living owner holds it, calling `waiting(owner)` once, and returns the
    lease; `stop()` true while waiting raises `InterruptedError`.
    """

    def __init__(
        self,
        path: Path,
        waiting: Callable[[str], None] = lambda owner: None,
        stop: Callable[[], bool] = lambda: False,
        poll_seconds: float = 0.5,
    ) -> None:
        self.file = path.with_name(path.name + ".lease")
        self.token = uuid.uuid4().hex
        self._waiting, self._stop_waiting, self._poll = waiting, stop, poll_seconds
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Lease:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        told = False
        seen: tuple[str | int | float, str | int | float, float] | None = (
            None  # token, heartbeat, when it was first seen like that
        )
        while not self._create():
            if self._stop_waiting():
                raise InterruptedError
            owner = self._read()
            if owner is None:
                continue
            token, beat = owner["token"], owner["beat"]
            if seen is None or seen[:2] != (token, beat):
                seen = token, beat, time.monotonic()
            if _process_is_gone(owner) or time.monotonic() - seen[2] > DEAD_AFTER_SECONDS:
                self._bury(token)
                continue
            if not told:
                self._waiting(f"process {owner['pid']} on {owner['host']}")
                told = True
            time.sleep(self._poll)
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lease-heartbeat")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        owner = self._read()
        if owner is not None and owner["token"] == self.token:
            self.file.unlink(missing_ok=True)

    def _create(self) -> bool:
        body = {
            "token": self.token,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": _process_start(os.getpid()),
        }
        draft = self.file.with_name(f".{self.file.name}-{self.token}")
        draft.write_text(json.dumps(body))
        try:
            os.link(draft, self.file)  # fails if it is there, also on network file systems
            return True
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)

    def _read(self) -> dict[str, str | int | float] | None:
        """The owner, with `beat` the heartbeat's time stamp; None when the file has just gone."""
        try:
            owner: dict[str, str | int | float] = json.loads(self.file.read_text())
            return owner | {"beat": self.file.stat().st_mtime_ns}
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, OSError):
            return {"token": "damaged", "pid": -1, "host": "", "started": "", "beat": 0}

    def _bury(self, token: str | int | float) -> None:
        """Move a dead lease away; a live one that took its place in between is put back."""
        grave = self.file.with_name(f".{self.file.name}-dead-{self.token}")
        try:
            os.rename(self.file, grave)
        except FileNotFoundError:
            return
        try:
            moved = json.loads(grave.read_text()).get("token", "damaged")
        except (json.JSONDecodeError, OSError):
            moved = "damaged"
        if moved != token:
            with contextlib.suppress(FileExistsError):
                os.link(grave, self.file)
        grave.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # a vanished folder is noticed by whoever writes the result
                os.utime(self.file)


def _process_start(pid: int) -> str:
    """When a process of this machine began, so that a re-used process id is not taken for it; "" if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _process_is_gone(owner: dict[str, str | int | float]) -> bool:
    if owner["host"] != socket.gethostname():
        return owner["token"] == "damaged"
    pid = int(owner["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    started = str(owner.get("started", ""))
    return bool(started) and _process_start(pid) != started
