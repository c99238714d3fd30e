"""Downloads of published files: once for all processes, with checksums, and only complete files are kept.

The first process takes a lease on the data set; the others wait for it. The lease of a dead process is taken over
and its partial files are removed. Files are unpacked to a temporary folder next to their own, compared with the
published checksums, and renamed. Existing files are kept.

`BNN_DATA_URL` names another server (the mirror of a cluster, or a folder as file:///...) that has each archive as
<url>/<data set>/<archive>; no other server is then contacted.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from bnn_runner.data.sources import WHERE_ELSE, Archive, Found, Source, algorithm, difference, look, refuse_damaged
from bnn_runner.errors import Interrupted, UserError
from bnn_runner.runtime.leases import Lease

STALL_SECONDS = 20.0
"""A download is abandoned if the server sends nothing for this long."""
SERVER = "BNN_DATA_URL"
_BLOCK = 1 << 18


class _Failed(Exception):
    """Why an archive could not be downloaded."""


def ensure(
    source: Source,
    data_dir: Path,
    say: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Make sure that all files of `source` exist; returns the folder to read them from.

    Nothing is written if they exist already.

    Args:
        source: the files and their archives.
        data_dir: the data folder.
        say: called with a line for the person who waits.
        stop: true when the run is to stop.

    Raises:
        UserError: for damaged files, and for missing ones that could not be downloaded, naming file and folder.
        Interrupted: when `stop()` is true.
    """
    found = look(source, data_dir)
    refuse_damaged(found)
    if found.complete:
        return found.place
    if not source.archives:
        raise UserError(f"{_absent(source, found)} {source.by_hand} Put them there, {WHERE_ELSE}")
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with Lease(
            data_dir / f".{source.name}",
            lambda owner: say(f"waiting for {source.name}, which {owner} downloads"),
            stop,
        ):
            found = look(source, data_dir)
            refuse_damaged(found)
            if not found.complete:
                _fetch(source, found, data_dir, say, stop)
    except InterruptedError:
        raise Interrupted(f"the download of {source.name} was interrupted") from None
    except (_Failed, OSError) as error:
        raise UserError(
            f"{_absent(source, found)} The download failed ({error}). Put the unpacked files there, set the "
            f"environment variable {SERVER} to a server that has them, {WHERE_ELSE}"
        ) from error
    return data_dir / source.folder


def _absent(source: Source, found: Found) -> str:
    return f"The data set {source.name} is incomplete in {found.place}: missing {', '.join(found.missing)}."


def _fetch(source: Source, found: Found, data_dir: Path, say: Callable[[str], None], stop: Callable[[], bool]) -> None:
    """Download, unpack, compare, and move the missing files into their folder. The lease is held."""
    unfinished = f".{source.name}-unfinished-"
    for leftover in data_dir.glob(f"{unfinished}*"):  # of a process that died
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=unfinished, dir=data_dir, ignore_cleanup_errors=True) as temporary:
        unpacked = Path(temporary) / "unpacked"
        unpacked.mkdir()
        for archive in source.archives:
            alone = archive.name.removesuffix(".gz")
            if alone in {file.name for file in source.files} and alone not in found.missing:
                continue  # the archive of a single file, which exists
            say(f"downloading {source.name}: {archive.name}")
            packed = Path(temporary) / archive.name
            _download(source, archive, packed, stop)
            _unpack(packed, unpacked)
            packed.unlink(missing_ok=True)
        have = {path.name: path for path in unpacked.rglob("*") if path.is_file()}
        for file in source.files:
            if file.name not in found.missing:
                continue
            if file.name not in have:
                raise _Failed(f"{file.name} is not in the downloaded archives")
            if problem := difference(have[file.name], file):
                raise _Failed(problem)
        found.place.mkdir(parents=True, exist_ok=True)
        for name in found.missing:
            with have[name].open("rb") as f:
                os.fsync(f.fileno())
            os.replace(have[name], found.place / name)


def _download(source: Source, archive: Archive, target: Path, stop: Callable[[], bool]) -> None:
    """Download the archive to `target`, from the first server that has it with the right checksum."""
    server = os.environ.get(SERVER)
    urls = archive.urls if not server else (f"{server.rstrip('/')}/{source.name}/{archive.name}",)
    reasons = []
    for url in urls:
        try:
            _copy(url, archive, target, stop)
            return
        except InterruptedError:
            raise
        except (OSError, HTTPException, ValueError, _Failed) as error:  # time-outs are OSErrors; ValueError: no URL
            # A subclass of URLError has a status and a text of its own.
            reasons.append(f"{url}: {error.reason if type(error) is urllib.error.URLError else error}")
    raise _Failed("; ".join(reasons))


def _copy(url: str, archive: Archive, target: Path, stop: Callable[[], bool]) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "bnn_runner"})
    digest = hashlib.new("md5" if len(archive.checksum) == 32 else "sha256", usedforsecurity=False)
    with urllib.request.urlopen(request, timeout=STALL_SECONDS) as response, target.open("wb") as f:
        while block := response.read(_BLOCK):
            if stop():
                raise InterruptedError
            digest.update(block)
            f.write(block)
    if digest.hexdigest() != archive.checksum:
        raise _Failed(
            f"the {algorithm(archive.checksum)} sum must be {archive.checksum}; got {digest.hexdigest()} "
            f"({target.stat().st_size:,} bytes)"
        )


def _extract(tar: tarfile.TarFile, folder: Path) -> None:
    """Extract only files and folders below `folder`: Python's own filter from 3.11.4 on, the same rule before."""
    if hasattr(tarfile, "data_filter"):
        tar.extractall(folder, filter="data")
        return
    for member in tar.getmembers():
        inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
        if not (inside and (member.isfile() or member.isdir())):
            raise _Failed(f"it contains {member.name}, which is not a file below its own folder")
    tar.extractall(folder)


def _unpack(packed: Path, folder: Path) -> None:
    name = packed.name
    try:
        if name.endswith((".tar.gz", ".tgz")):
            with tarfile.open(packed) as tar:
                _extract(tar, folder)
        elif name.endswith(".zip"):
            with zipfile.ZipFile(packed) as archive:
                archive.extractall(folder)
        elif name.endswith(".gz"):
            with gzip.open(packed) as f, (folder / name.removesuffix(".gz")).open("wb") as out:
                shutil.copyfileobj(f, out)
        else:
            os.replace(packed, folder / name)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
        raise _Failed(f"could not unpack {name}: {error}") from error
