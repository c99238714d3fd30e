"""What a published data set consists of on disk, and what of it is there: whole, missing or damaged.

A data set that lies in files says so by `sources()` (what it cannot do without) and
`partner_sources()` (its out-of-distribution sets); `bnn_runner.data.downloads` fetches them.
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

WHERE_ELSE = "or name the folder that has them with data_dir=... or the environment variable BNN_DATA_DIR."


@dataclass(frozen=True)
class File:
    """A file as published: length in bytes where it is known, and MD5 (32 digits) or SHA-256 sum (64), or ""."""

    name: str
    length: int | None = None
    checksum: str = ""


@dataclass(frozen=True)
class Archive:
    """What is downloaded for it: the first of `urls` that answers, with the checksum of the bytes that come.

    .gz, .tar.gz, .tgz and .zip are unpacked, anything else is the file itself.
    """

    urls: tuple[str, ...]
    checksum: str

    @property
    def name(self) -> str:
        return self.urls[0].rpartition("/")[2]


@dataclass(frozen=True)
class Source:
    """The files of a data set under one folder of the data folder, and where they come from.

    Without `archives` they are put there by hand, as `by_hand` says. `elsewhere` are folders of the
    system that may have all of them (as they are, or as name.gz) and are read in place.
    """

    name: str
    folder: str
    files: tuple[File, ...]
    archives: tuple[Archive, ...] = ()
    by_hand: str = ""
    elsewhere: tuple[Path, ...] = ()

    def only(self, names: Sequence[str]) -> Source:
        """Some of the files, and of the archives those that hold one file each of them, or else all."""
        single = tuple(a for a in self.archives if a.name.removesuffix(".gz") in names)
        return replace(self, files=tuple(f for f in self.files if f.name in names), archives=single or self.archives)


@dataclass(frozen=True)
class Found:
    """What of a source is there: the folder it is read from, names that are missing, what is wrong with others."""

    place: Path
    missing: tuple[str, ...]
    damaged: tuple[str, ...]

    @property
    def whole(self) -> bool:
        return not self.missing and not self.damaged


@runtime_checkable
class Published(Protocol):
    """A data set that lies in files."""

    def sources(self) -> Sequence[Source]:
        """What it cannot do without."""
        ...

    def partner_sources(self) -> Mapping[str, Source]:
        """Its out-of-distribution sets, by name."""
        ...


def look(source: Source, data_dir: Path) -> Found:
    """Compare what is there with what was published. Reads only; damage is told apart from absence."""
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
            continue  # gzip carries a checksum of its own, which reading compares
        if not path.is_file():
            missing.append(file.name)
        elif problem := difference(path, file):
            damaged.append(problem)
    return Found(place, tuple(missing), tuple(damaged))


def difference(path: Path, file: File) -> str:
    """How the file at `path` differs from the published one; "" if it does not."""
    facts = path.stat()
    if file.length is not None and facts.st_size != file.length:
        return f"{path} is damaged. It has {facts.st_size:,} bytes, expected were {file.length:,}."
    if file.checksum and (found := _checksum(path, len(file.checksum), facts.st_size, facts.st_mtime_ns)) != (
        file.checksum
    ):
        return (
            f"{path} is not the published file. Its {algorithm(file.checksum)} sum is {found} "
            f"({facts.st_size:,} bytes), expected was {file.checksum}. It is damaged or another version."
        )
    return ""


def algorithm(checksum: str) -> str:
    """The algorithm that a sum of so many hexadecimal digits is of."""
    return {32: "MD5", 64: "SHA-256"}[len(checksum)]


@lru_cache(maxsize=256)
def _checksum(path: Path, digits: int, length: int, changed: int) -> str:
    """Sum of a file, once in a process as long as its length and time stamp stay."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "md5" if digits == 32 else "sha256").hexdigest()


def refuse_damaged(found: Found) -> None:
    """Raise `UserError` for every damaged file; nothing is deleted."""
    if found.damaged:
        raise UserError(
            *(f"{what} Replace it, take it away (then it is fetched anew), {WHERE_ELSE}" for what in found.damaged)
        )


def read(place: Path, name: str) -> bytes:
    """The bytes of a file of a source, from `name` or from `name`.gz. Raises `UserError` where the latter is cut."""
    path = place / name
    if path.is_file():
        return path.read_bytes()
    packed = place / f"{name}.gz"
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError) as error:
        raise UserError(f"{packed} is damaged ({error}). Replace it, {WHERE_ELSE}") from error
