"""A cache of finished jobs, so that a sweep recognises them without importing torch.

The key of an entry is a job's overrides, the text of all configuration files and the version of the program. The entry
lists the job's cells and the state of its data files. A job without a valid entry is inspected in full.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bnn_runner._version import __version__
from bnn_runner.config.keys import RESULTS_VERSION, digest
from bnn_runner.runs.status import facts_of, status_of
from bnn_runner.runtime.files import write_json


@dataclass(frozen=True)
class Entry:
    """What is known about a job.

    Attributes:
        cells: Folders of its cells.
        metrics: Digest of its metrics.
        save_posterior: Whether it saves its posterior.
        files: {data file: [bytes, time of the last change]}.
    """

    cells: list[str]
    metrics: str
    save_posterior: bool
    files: dict[str, list[int]]

    def is_valid(self) -> bool:
        """Whether every cell is finished as the job requires, and the data files have not changed."""
        if self.files != file_states(self.files):
            return False
        return all(self._finished(Path(folder)) for folder in self.cells)

    def _finished(self, folder: Path) -> bool:
        if status_of(folder) != "done":
            return False
        facts = facts_of(folder)
        saved = not self.save_posterior or "posterior_saved" in facts
        return saved and facts.get("results_version") == RESULTS_VERSION and facts.get("metrics_digest") == self.metrics


@dataclass(frozen=True)
class PlanCache:
    """The entries in a folder.

    Attributes:
        folder: The folder.
        version: Digest of everything on which all entries depend (see `cache_version`); None turns the cache off.
    """

    folder: Path
    version: str | None

    def get(self, overrides: Sequence[str]) -> Entry | None:
        """Returns the entry of a job if it exists and is valid."""
        if self.version is None:
            return None
        try:
            entry = Entry(**json.loads(self._path(overrides).read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError, TypeError):
            return None
        return entry if entry.is_valid() else None

    def put(self, overrides: Sequence[str], entry: Entry) -> None:
        """Stores the entry of a job. Does nothing if the folder is not writable: the cache only saves time."""
        if self.version is None:
            return
        try:
            write_json(self._path(overrides), asdict(entry))
        except OSError:
            return

    def _path(self, overrides: Sequence[str]) -> Path:
        return self.folder / f"job-{digest([self.version, list(overrides)])}.json"


def cache_version(config_dirs: Iterable[Path], start: Path) -> str | None:
    """Returns a digest of everything except its overrides that determines a job's configuration.

    None if a configuration file reads environment variables, because then the files do not determine it.

    Args:
        config_dirs: Folders of the configuration files.
        start: The folder to which relative paths refer.
    """
    files_hash = hashlib.blake2b(digest_size=16)
    for folder in config_dirs:
        for path in sorted(folder.rglob("*.yaml")):
            text = path.read_bytes()
            if b"oc.env" in text:
                return None
            files_hash.update(f"{path.relative_to(folder)}\n{len(text)}\n".encode() + text)
    return digest([files_hash.hexdigest(), __version__, RESULTS_VERSION, str(start), os.environ.get("BNN_DATA_DIR")])


def file_states(paths: Iterable[str]) -> dict[str, list[int]]:
    """Returns [bytes, time of the last change] of each file; of all files in it for a folder; [] if it is missing."""
    states: dict[str, list[int]] = {}
    for name in paths:
        path = Path(name)
        stats = [p.stat() for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file()]
        states[name] = [sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)] if stats else []
    return states
