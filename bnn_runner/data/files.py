"""Files of published data: told apart as missing, damaged or right; fetched whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bnn_runner.errors import UserError

DOWNLOAD_SECONDS = 1800
STALL_SECONDS = 20
WHERE_ELSE = "or name the folder that has them with data_dir=... or the environment variable BNN_DATA_DIR."

_log = logging.getLogger(__name__)

# Runs in a process of its own: torchvision has no time limit, and a name look-up that hangs cannot be interrupted.
_DOWNLOAD = """
import socket, sys
socket.setdefaulttimeout(float(sys.argv[3]))
import torchvision.datasets
getattr(torchvision.datasets, sys.argv[1])(sys.argv[2], download=True)
"""


def check_sha256(path: Path, expected: str) -> None:
    """Raise `UserError` unless the file has that SHA-256 sum."""
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise UserError(
            f"{path} is not the published file. Its SHA-256 sum is {found} ({path.stat().st_size:,} bytes), "
            f"expected was {expected}. It is damaged or another version: replace it, {WHERE_ELSE}"
        )


def missing(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of `names` that are no files in `folder`."""
    return [name for name in names if not (folder / name).is_file()]


def ensure_torchvision_files(dataset: str, data_dir: Path, folder: str, names: tuple[str, ...]) -> None:
    """Have `names` in `data_dir/folder`: nothing to do when they are there, else download with torchvision.

    The download goes to a temporary folder beside `folder` and is moved into place file by file when
    it is complete, so that several runs may start at once and none sees half a file. Files that are
    there already are kept. Raises `UserError` naming the files and the folder when this fails.
    """
    target = data_dir / folder
    absent = missing(target, names)
    if not absent:
        return
    reason = _download(dataset, data_dir, folder, names)
    absent = missing(target, names)
    if absent:
        raise UserError(
            f"The data set {dataset} is not complete in {target}: missing {', '.join(absent)}. "
            f"It could not be downloaded ({reason}). Put the files there (unpacked, as torchvision lays them out), "
            f"{WHERE_ELSE}"
        )


def _download(dataset: str, data_dir: Path, folder: str, names: tuple[str, ...]) -> str:
    """Try it; the reason why it failed ("" when it did not)."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{dataset}-", dir=data_dir, ignore_cleanup_errors=True) as temporary:
            _log.info("Downloading %s to %s ...", dataset, data_dir)
            reason = run_download(dataset, Path(temporary))
            if reason:
                return reason
            (data_dir / folder).mkdir(parents=True, exist_ok=True)
            for name in missing(data_dir / folder, names):
                os.replace(Path(temporary) / folder / name, data_dir / folder / name)
    except OSError as error:
        return str(error)
    return ""


def run_download(dataset: str, root: Path) -> str:
    """Download `dataset` with torchvision into `root`, within a time limit; the reason why it failed, or ""."""
    command = [sys.executable, "-c", _DOWNLOAD, dataset, str(root), str(STALL_SECONDS)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"not finished after {DOWNLOAD_SECONDS // 60} minutes"
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return lines[-1].strip() if lines else f"exit code {done.returncode}"
