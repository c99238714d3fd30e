"""Atomic file writes (temporary name, flush to disk, rename), and a message for a failed write.

A file written here is complete or absent, even if the process is killed.
"""

from __future__ import annotations

import errno
import io
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def expand_home(path: str | Path) -> Path:
    """Returns a path with its `~` expanded; a user without a home folder (in a container) has a temporary one."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(tempfile.gettempdir(), f"bnn_runner-{os.getuid()}", str(path).partition("/")[2])


def short_path(path: Path) -> str:
    """Returns the path for messages: relative to the current folder if it is inside, else as it is."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Writes a file that appears at `path` complete, or not at all. Creates the folder if needed.

    Args:
        path: The file.
        write: Called with an open binary file.

    Raises:
        OSError: If any step fails; its `filename` is always `path`.
    """
    try:
        _write(path, write)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.writing-")
    try:
        with os.fdopen(handle, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def clear_unfinished(folder: Path, name: str = "*") -> None:
    """Deletes the temporary files that killed writers of `name` left in `folder`.

    Call it only while no other process can write there (see `leases`).

    Args:
        folder: The folder.
        name: Name of the final file; any file by default.
    """
    for leftover in folder.glob(f".{name}.writing-*"):
        leftover.unlink(missing_ok=True)


def write_torch(path: Path, payload: Any) -> None:
    """`torch.save`, atomically. Serialises in memory first, because torch's own writer hides the `OSError`."""
    import torch

    buffer = io.BytesIO()
    torch.save(payload, buffer)
    write_atomically(path, lambda f: f.write(buffer.getbuffer()))


def write_text(path: Path, text: str) -> None:
    """Writes text as UTF-8, atomically."""
    write_atomically(path, lambda f: f.write(text.encode()))


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def explain_write_error(error: OSError) -> str | None:
    """Returns a message for a full disk or missing write permission, with what to do; None for any other error."""
    if "No usable temporary directory" in str(error):
        return "There is no folder for temporary files that is writable. Set TMPDIR to one."
    if error.errno in _FULL:
        why, advice = "the disk is full", "Free some space there"
    elif error.errno in _REFUSED:
        why, advice = str(error.strerror).lower(), "Make the folder writable"
    else:
        return None
    return (
        f"Could not write {error.filename or 'a file'}: {why}. Finished results are kept. {advice}, or "
        "choose another folder with output_dir= (cache_dir= for trained networks), then run the same "
        "command again to resume."
    )


def _umask() -> int:
    # No call only reads the umask, so it is set and restored at once.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
