"""What an earlier sweep learnt about its jobs, so that a finished one is seen to be finished without importing torch.

An entry belongs to a job's overrides, to the text of every configuration file and to the version of
the program; it names the job's cells and the state of its data files. It is a short cut only: what it
does not vouch for is looked at in full.
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
    """A job's cells, the digest of its metrics, whether its posterior is kept, and {data file: [bytes, changed]}."""

    cells: list[str]
    metrics: str
    save_posterior: bool
    files: dict[str, list[int]]

    def holds(self) -> bool:
        """Whether every cell is finished as the job wants it, and the data files are as they were."""
        if self.files != state_of(self.files):
            return False
        return all(self._finished(Path(folder)) for folder in self.cells)

    def _finished(self, folder: Path) -> bool:
        if status_of(folder) != "done":
            return False
        facts = facts_of(folder)
        kept = not self.save_posterior or "posterior_saved" in facts
        return kept and facts.get("results_version") == RESULTS_VERSION and facts.get("metrics_digest") == self.metrics


@dataclass(frozen=True)
class Memory:
    """Entries in a folder; `stamp` is what all of them depend on (None: nothing is remembered)."""

    folder: Path
    stamp: str | None

    def recall(self, overrides: Sequence[str]) -> Entry | None:
        """The entry of a job, if there is one that holds."""
        if self.stamp is None:
            return None
        try:
            entry = Entry(**json.loads(self._path(overrides).read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError, TypeError):
            return None
        return entry if entry.holds() else None

    def keep(self, overrides: Sequence[str], entry: Entry) -> None:
        """Remember a job; a folder that cannot be written costs the short cut only."""
        if self.stamp is None:
            return
        try:
            write_json(self._path(overrides), asdict(entry))
        except OSError:
            return

    def _path(self, overrides: Sequence[str]) -> Path:
        return self.folder / f"job-{digest([self.stamp, list(overrides)])}.json"


def stamp(config_dirs: Iterable[Path], start: Path) -> str | None:
    """Everything beside its overrides that a job's configuration follows from; None where files read the environment.

    `start` anchors relative paths; BNN_DATA_DIR may place the data.
    """
    total = hashlib.blake2b(digest_size=16)
    for folder in config_dirs:
        for path in sorted(folder.rglob("*.yaml")):
            text = path.read_bytes()
            if b"oc.env" in text:
                return None
            total.update(f"{path.relative_to(folder)}\n{len(text)}\n".encode() + text)
    return digest([total.hexdigest(), __version__, RESULTS_VERSION, str(start), os.environ.get("BNN_DATA_DIR")])


def state_of(files: Iterable[str]) -> dict[str, list[int]]:
    """Length and time of the last change of each file; for a folder those of all files in it; [] of what is absent."""
    found: dict[str, list[int]] = {}
    for name in files:
        path = Path(name)
        facts = [p.stat() for p in ([path] if path.is_file() else path.rglob("*")) if p.is_file()]
        found[name] = [sum(f.st_size for f in facts), max(f.st_mtime_ns for f in facts)] if facts else []
    return found
