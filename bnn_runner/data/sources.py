"""The files of a published data set, and the state they are in: complete, missing or damaged.

A data set that is read from files has `sources()` (the files it requires) and `partner_sources()` (its
out-of-distribution sets); `bnn_runner.data.downloads` fetches them.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol, runtime_checkable

from bnn_runner.errors import UserError

WHERE_ELSE = "or give the folder that contains them by data_dir=... or the environment variable BNN_DATA_DIR."


@dataclass(frozen=True)
class File:
    """A file as published: its length in bytes if known, and its MD5 (32 digits) or SHA-256 sum (64), or ""."""

    name: str
    length: int | None = None
    checksum: str = ""


@dataclass(frozen=True)
class Archive:
    """An archive to download from the first of `urls` that answers; `checksum` is that of the downloaded bytes.

    .gz, .tar.gz, .tgz and .zip are unpacked; anything else is the file itself.
    """

    urls: tuple[str, ...]
    checksum: str

    @property
    def name(self) -> str:
        return self.urls[0].rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """The files of a data set under one folder of the data folder, and where they come from.

    Without `archives` a person puts them there, as `by_hand` explains. `elsewhere` are system folders that may
    hold all of them (as they are, or as name.gz) and are read in place.
    """

    name: str
    folder: str
    files: tuple[File, ...]
    archives: tuple[Archive, ...] = ()
    by_hand: str = ""
    elsewhere: tuple[Path, ...] = ()

    def only(self, names: Sequence[str]) -> Source:
        """Only the named files, with the archives of these single files, or all archives if there are none."""
        single = tuple(a for a in self.archives if a.name.removesuffix(".gz") in names)
        return replace(self, files=tuple(f for f in self.files if f.name in names), archives=single or self.archives)


@dataclass(frozen=True)
class Found:
    """The state of a source: the folder it is read from, the missing files, and what is wrong with damaged ones."""

    place: Path
    missing: tuple[str, ...]
    damaged: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return not self.missing and not self.damaged


@runtime_checkable
class Published(Protocol):
    """A data set that is read from files."""

    def sources(self) -> Sequence[Source]:
        """The files it requires."""
        ...

    def partner_sources(self) -> Mapping[str, Source]:
        """Its out-of-distribution sets, by name."""
        ...


def look(source: Source, data_dir: Path) -> Found:
    """Compare the files on disk with the published ones, without writing; lists missing and damaged files apart."""
    place = data_dir / source.folder
    here = _compare(source, place)
    if len(here.missing) == len(source.files):
        for other in source.elsewhere:
            there = _compare(source, other, packed=True)
            if not there.missing:
                return there
    return here


def _compare(source: Source, place: Path, packed: bool = False) -> Found:
    missing, damaged = [], []
    for file in source.files:
        path = place / file.name
        if packed and not path.is_file() and path.with_name(f"{file.name}.gz").is_file():
            continue  # gzip has its own checksum, which is compared on reading
        if not path.is_file():
            missing.append(file.name)
        elif problem := difference(path, file):
            damaged.append(problem)
    return Found(place, tuple(missing), tuple(damaged))


def difference(path: Path, file: File) -> str:
    """How the file at `path` differs from the published one, as a sentence; "" if it does not."""
    facts = path.stat()
    if file.length is not None and facts.st_size != file.length:
        return f"{path} is damaged: it must have {file.length:,} bytes; got {facts.st_size:,}."
    if file.checksum and (found := _checksum(path, len(file.checksum), facts.st_size, facts.st_mtime_ns)) != (
        file.checksum
    ):
        return (
            f"{path} is damaged or another version: its {algorithm(file.checksum)} sum must be {file.checksum}; got "
            f"{found} ({facts.st_size:,} bytes)."
        )
    return ""


def algorithm(checksum: str) -> str:
    """The algorithm of a checksum, from its number of hexadecimal digits."""
    return {32: "MD5", 64: "SHA-256"}[len(checksum)]


@lru_cache(maxsize=256)
def _checksum(path: Path, digits: int, length: int, changed: int) -> str:
    """Checksum of a file; computed once per process while its length and time stamp stay the same."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "md5" if digits == 32 else "sha256").hexdigest()


def refuse_damaged(found: Found) -> None:
    """Raise a `UserError` that lists every damaged file; nothing is deleted."""
    if found.damaged:
        raise UserError(
            *(f"{what} Replace it, delete it (it is then downloaded again), {WHERE_ELSE}" for what in found.damaged)
        )


def read(place: Path, name: str) -> bytes:
    """The bytes of a file of a source, from `name` or from `name`.gz. Raises `UserError` if the latter is damaged."""
    path = place / name
    if path.is_file():
        return path.read_bytes()
    packed = place / f"{name}.gz"
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError) as error:
        raise UserError(f"{packed} is damaged ({error}). Replace it, {WHERE_ELSE}") from error
