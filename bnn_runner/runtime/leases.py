"""Leases: at most one owner of a piece of work, across processes and machines.

A lease is a file that is created exclusively and kept alive by a heartbeat. File locks are not used because they fail
on network file systems. A lease is dead if its process no longer exists (same machine), or if its heartbeat has not
changed for a minute of the watcher's own clock (another machine).
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
    """Exclusive right to work on `path`, as a context manager; the lease file is `path` + ".lease".

    Entering waits while a living owner holds the lease.

    Args:
        path: What the lease protects; it need not exist.
        waiting: Called once with a description of the owner if entering has to wait.
        stop: Checked while waiting; if it returns true, entering raises.
        poll_seconds: Time between two tries.

    Raises:
        InterruptedError: On entering, if `stop()` returns true.
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
        reported = False
        last_seen: tuple[str | int | float, str | int | float, float] | None = None  # token, heartbeat, since when
        while not self._create():
            if self._stop_waiting():
                raise InterruptedError
            owner = self._read()
            if owner is None:
                continue
            token, beat = owner["token"], owner["beat"]
            if last_seen is None or last_seen[:2] != (token, beat):
                last_seen = token, beat, time.monotonic()
            if _process_is_gone(owner) or time.monotonic() - last_seen[2] > DEAD_AFTER_SECONDS:
                self._remove_dead(token)
                continue
            if not reported:
                self._waiting(f"process {owner['pid']} on {owner['host']}")
                reported = True
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
            os.link(draft, self.file)  # fails if the file exists, on network file systems too
            return True
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)

    def _read(self) -> dict[str, str | int | float] | None:
        """The owner with `beat`, the time stamp of its heartbeat; None if the file has just disappeared."""
        try:
            owner: dict[str, str | int | float] = json.loads(self.file.read_text())
            return owner | {"beat": self.file.stat().st_mtime_ns}
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, OSError):
            return {"token": "damaged", "pid": -1, "host": "", "started": "", "beat": 0}

    def _remove_dead(self, token: str | int | float) -> None:
        """Renames a dead lease, then deletes it; a live lease that replaced it in between is restored."""
        renamed = self.file.with_name(f".{self.file.name}-dead-{self.token}")
        try:
            os.rename(self.file, renamed)
        except FileNotFoundError:
            return
        try:
            renamed_token = json.loads(renamed.read_text()).get("token", "damaged")
        except (json.JSONDecodeError, OSError):
            renamed_token = "damaged"
        if renamed_token != token:
            with contextlib.suppress(FileExistsError):
                os.link(renamed, self.file)
        renamed.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError):  # if the folder has disappeared, writing the result fails and reports it
                os.utime(self.file)


def _process_start(pid: int) -> str:
    """Start time of a process on this machine, to recognise a reused process id; "" if unknown."""
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
