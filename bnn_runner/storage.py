"""Files that are whole or absent: written to a temporary name, flushed to disk, renamed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Call `write` with an open binary file; the result appears at `path` at once, or not at all."""
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


def write_text(path: Path, text: str) -> None:
    """Text as UTF-8, whole or absent."""
    write_atomically(path, lambda f: f.write(text.encode()))


def write_json(path: Path, value: Any) -> None:
    """JSON, indented, whole or absent."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")


def _umask() -> int:
    # There is no call that only reads it; the value is put back at once.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
