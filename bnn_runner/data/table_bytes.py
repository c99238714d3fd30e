"""From a stored file to its content: compression, binary formats, and the encoding of text."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from bnn_runner.errors import UserError

_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz"}
_BINARY = {
    b"PAR1": "parquet",
    b"\xd0\xcf\x11\xe0": "xls",
    b"\x89HDF": "HDF5",
    b"ARROW1": "Feather",
    b"SQLite format 3": "SQLite",
    b"\x93NUMPY": "npy",
    b"\x80\x02": "pickle",
    b"\x80\x03": "pickle",
    b"\x80\x04": "pickle",
    b"\x80\x05": "pickle",
    b"RDX": "RData",
    b"X\n\x00\x00": "RDS",
    b"%PDF": "PDF",
}
_ADVICE = {
    "xls": "Open it in a spreadsheet program and save it as .xlsx or CSV.",
    "npy": "Save named arrays with numpy.savez(file, x=..., y=...) and use data=arrays.",
    "npz": "Use data=arrays.",
    "pickle": "Reading it could run code. Write it with DataFrame.to_csv or to_parquet.",
    "RData": "In R, write it with write.csv(table, file, row.names=FALSE).",
    "RDS": "In R, write it with write.csv(table, file, row.names=FALSE).",
    "PDF": "Save the table as CSV.",
}
_TEXTS = {
    "version https://git-lfs": ("a pointer of Git LFS, not the table itself", "Run: git lfs pull"),
    "<!doctype html": ("a web page", "Download the file itself (on GitHub: the address behind Raw)."),
    "<html": ("a web page", "Download the file itself (on GitHub: the address behind Raw)."),
    "<?xml": ("XML", "Save the table as CSV."),
    "{": ("JSON", "Write the table with pandas.read_json(file).to_csv."),
    "[{": ("JSON", "Write the table with pandas.read_json(file).to_csv."),
    "@relation": ("ARFF", "Write the table as CSV."),
}
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class Content:
    """What a file holds: `kind` is "text", "parquet" or "xlsx"; `packed` names its compression, or is ""."""

    kind: str
    data: bytes
    packed: str = ""


def read_content(path: Path) -> Content:
    """The unpacked bytes of a table. Raises `UserError` for a file that is absent, damaged, or of another kind."""
    try:
        data = path.read_bytes()
    except IsADirectoryError:
        raise UserError(
            f"{path} must be a file; it is a folder. Give the file of the table, or use data=image_folder for images."
        ) from None
    except OSError as error:
        raise UserError(f"Could not read {path}: {error.strerror}. Give the file of a table.") from None
    data, packed = _unpacked(path, data)
    kind = next((name for start, name in _BINARY.items() if data.startswith(start)), "text")
    if data.startswith(b"PK\x03\x04"):
        data, kind = _from_zip(path, data)
        packed = "zip" if kind == "text" else packed
    if kind not in ("text", "parquet", "xlsx"):
        advice = _ADVICE.get(kind, "Write it as CSV, or as Parquet with DataFrame.to_parquet.")
        raise UserError(f"{path} must be a table (CSV, Parquet or .xlsx); it is a file of type {kind}. {advice}")
    return Content(kind, data, packed)


def _unpacked(path: Path, data: bytes) -> tuple[bytes, str]:
    packed = next((name for start, name in _PACKED.items() if data.startswith(start)), "")
    unpack = {"gzip": gzip.decompress, "bzip2": bz2.decompress, "xz": lzma.decompress}
    try:
        return (unpack[packed](data), packed) if packed else (data, "")
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
        raise UserError(f"Could not unpack {path} ({packed}): {error}. Copy or download the file again.") from None


def _from_zip(path: Path, data: bytes) -> tuple[bytes, str]:
    """Content and kind of a zip archive: a spreadsheet, arrays, or a single packed table."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = [n for n in archive.namelist() if not n.endswith("/") and not n.startswith("__MACOSX")]
            if any(name.startswith("xl/") for name in names):
                return data, "xlsx"
            if any(name.endswith(".npy") for name in names):
                return data, "npz"
            if "mimetype" in names:
                return data, "OpenDocument"
            if len(names) != 1:
                shown = ", ".join(names[:8]) or "nothing"
                raise UserError(f"{path} must contain a single table; it contains {shown}. Unpack it, and give a file.")
            return archive.read(names[0]), "text"
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error, EOFError) as error:
        raise UserError(f"Could not unpack {path}: {error}. Copy or download the file again, or unpack it.") from None


def decode(path: Path, data: bytes, encoding: str | None) -> tuple[str, str, list[str]]:
    """The text, its encoding, and notes on a guess.

    Args:
        path: the file, for errors.
        data: its unpacked bytes.
        encoding: as the user gave it; None: UTF-8, or UTF-16 and UTF-32 by their marks or zero bytes, else cp1252.

    Raises:
        UserError: an unknown encoding, bytes that it does not have, or text that is not a table.
    """
    notes: list[str] = []
    used = encoding or _guess(data)
    try:
        codecs.lookup(used)
    except LookupError:
        raise UserError(
            f"data.encoding must name an encoding of Python, such as utf-8, utf-16, cp1252 or latin-1; got {used}."
        ) from None
    try:
        text = data.decode(used)
    except UnicodeDecodeError as error:
        if encoding is None and used == "utf-8":
            text, used = _western(path, data, error), "cp1252"
            notes.append(_encoding_note(data, text, error))
        else:
            line = data[: error.start].count(b"\n") + 1
            raise UserError(
                f"{path} must be text in {used}; byte {error.start} (line {line}) is not. Give its encoding, as in "
                "data.encoding=cp1252, or save it in UTF-8."
            ) from None
    except (UnicodeError, LookupError) as error:
        raise UserError(f"Could not read {path} as text in {used}: {error}. Save it in UTF-8.") from None
    if encoding is None and used in ("utf-16", "utf-32", "utf-16-le", "utf-16-be"):
        notes.append(f"encoding {used.upper()} (data.encoding=... sets another)")
    start = text[:200].lstrip("\ufeff \r\n\t").lower()
    for prefix, (what, advice) in _TEXTS.items():
        if start.startswith(prefix):
            raise UserError(f"{path} must be a table; it is {what}. {advice}")
    if "\x00" in text:
        line = text[: text.index("\x00")].count("\n") + 1
        raise UserError(f"{path} must be text; line {line} has a zero byte. Save it as CSV in UTF-8.")
    return text.removeprefix("\ufeff"), used, notes


def _guess(data: bytes) -> str:
    for mark, name in _MARKS:
        if data.startswith(mark):
            return name
    start = data[:2000]
    if len(start) >= 4 and b"\x00" in start:
        even, odd = start[0::2].count(0), start[1::2].count(0)
        if odd > len(start) // 4 > even:
            return "utf-16-le"
        if even > len(start) // 4 > odd:
            return "utf-16-be"
    return "utf-8"


def _western(path: Path, data: bytes, error: UnicodeDecodeError) -> str:
    try:
        return data.decode("cp1252")
    except UnicodeDecodeError:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path} must be text in UTF-8; byte {error.start} (line {line}) is not. Give its encoding, as in "
            "data.encoding=latin-1, or save it in UTF-8."
        ) from None


def _encoding_note(data: bytes, text: str, error: UnicodeDecodeError) -> str:
    """Shows the first word outside ASCII, by which a reader sees whether the guess is right."""
    word = data[: error.start].decode("cp1252", "replace")
    begin = max(word.rfind(mark) for mark in ',;\t|\n" ') + 1
    shown = "".join(c for c in text[begin : begin + 40].splitlines()[0])
    shown = shown[: min((shown.find(mark) for mark in ',;\t|"' if mark in shown), default=30)]
    return f"encoding cp1252, as it is not UTF-8: {shown!r} (data.encoding=latin-1, cp1250, ... sets another)"
