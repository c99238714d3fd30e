"""Files that are whole or absent: written to a temporary name, flushed to disk, renamed; and why one cannot be."""

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


def short_path(path: Path) -> str:
    """The path as people read it: relative to the current folder if it is inside, so that no machine's paths show."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Call `write` with an open binary file; the result appears at `path` at once, or not at all.

    An `OSError` names `path`, whichever step it came from.
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
    """Remove what killed writers of `name` (or of any file) left in `folder`, while nobody else may write it."""
    for left in folder.glob(f".{name}.writing-*"):
        left.unlink(missing_ok=True)


def write_torch(path: Path, payload: Any) -> None:
    """`torch.save`, whole or absent. By way of memory: torch hides why a file cannot be written."""
    import torch

    buffer = io.BytesIO()
    torch.save(payload, buffer)
    write_atomically(path, lambda f: f.write(buffer.getbuffer()))


def write_text(path: Path, text: str) -> None:
    """Text as UTF-8, whole or absent."""
    write_atomically(path, lambda f: f.write(text.encode()))


def write_json(path: Path, value: Any) -> None:
    """JSON, indented, whole or absent."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def unwritable(error: OSError) -> str | None:
    """What to tell of a full disk or a folder that may not be written; None for any other error."""
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
    # There is no call that only reads it; the value is put back at once.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
