"""All images of a folder are opened before training: damaged ones are listed together, and their depth is measured."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnn_runner.data.image_files import DEEP
from bnn_runner.errors import UserError

_SHOWN = 20
_DEPTHS = (8, 10, 12, 14, 16)


@dataclass(frozen=True)
class ImageFacts:
    """One image file.

    Attributes:
        digest: of its bytes, 16 bytes.
        mode: Pillow's name of its channels and depth, as RGB, L or I;16.
        size: width and height.
        frames: pictures in it.
        low: smallest value, of an image with more than 8 bits.
        high: largest value, likewise.
        problem: why it is not readable; "" if it is.
    """

    digest: bytes
    mode: str = ""
    size: tuple[int, int] = (0, 0)
    frames: int = 1
    low: float = 0.0
    high: float = 0.0
    problem: str = ""


def check_images(paths: Sequence[Path], workers: int | None) -> tuple[ImageFacts, ...]:
    """The facts of each image, in order; each is decoded once, by `workers` threads (None: one per core).

    Raises:
        UserError: with all files that are not readable.
    """
    states = tuple((p, s.st_mtime_ns, s.st_size) for p in paths for s in (p.stat(),))
    facts = _facts(states, (os.cpu_count() or 1) if workers is None else workers)
    bad = [f"{path} ({fact.problem})" for path, fact in zip(paths, facts, strict=True) if fact.problem]
    if bad:
        more = f", and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        them = "Replace or delete it." if len(bad) == 1 else "Replace or delete them."
        one = f"Could not read {bad[0]} as an image, one of {len(paths)}"
        listed = (
            one if len(bad) == 1 else f"Could not read {len(bad)} of {len(paths)} images: {', '.join(bad[:_SHOWN])}"
        )
        raise UserError(f"{listed}{more}. {them}")
    return facts


@lru_cache(maxsize=1)
def _facts(states: tuple[tuple[Path, int, int], ...], workers: int) -> tuple[ImageFacts, ...]:
    """Cached: the seeds of one run read the same files."""
    paths = [path for path, _, _ in states]
    if workers < 2:
        return tuple(map(_check, paths))
    with ThreadPoolExecutor(workers, thread_name_prefix="check") as pool:
        return tuple(pool.map(_check, paths))


def _check(path: Path) -> ImageFacts:
    from PIL import Image

    data = path.read_bytes()
    digest = hashlib.blake2b(data, digest_size=16).digest()
    if not data:
        return ImageFacts(digest, problem="the file is empty")
    if data.startswith(b"version https://git-lfs"):
        return ImageFacts(digest, problem="a pointer of Git LFS; run git lfs pull")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as image:
                mode, size, frames = image.mode, image.size, getattr(image, "n_frames", 1)
                image.draft("RGB", (16, 16))  # a JPEG is read to its end, in a smaller size
                image.load()
                low = high = 0.0
                if mode.startswith(DEEP):
                    values = np.asarray(image, dtype=np.float64)
                    low, high = float(values.min()), float(values.max())
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        return ImageFacts(digest, problem=str(error).split(" <_io")[0])
    return ImageFacts(digest, mode, size, frames, low, high)


def white_of(paths: Sequence[Path], facts: Sequence[ImageFacts]) -> tuple[float | None, list[str]]:
    """The value of white in images with more than 8 bits (None without such images), and a note.

    Whole numbers: the largest value of the smallest depth (8, 10, 12, 14, 16 bits) that holds all of them. Fractions:
    1 if no value is larger, else 255 or the depth of whole numbers.

    Raises:
        UserError: negative, not finite, or larger values.
    """
    deep = [(p, f) for p, f in zip(paths, facts, strict=True) if f.mode.startswith(DEEP)]
    if not deep:
        return None, []
    low, high = min(deep, key=lambda d: d[1].low), max(deep, key=lambda d: d[1].high)
    bad = next((d for d in deep if not (np.isfinite(d[1].low) and np.isfinite(d[1].high))), None)
    if bad is not None or low[1].low < 0 or high[1].high >= 2**16:
        path, fact = bad or (low if low[1].low < 0 else high)
        raise UserError(
            f"{path} must have values from 0 to 65535, or from 0 to 1; got {fact.low:g} to {fact.high:g} (mode "
            f"{fact.mode}). Scale the images of this kind, and save them with 8 or 16 bits."
        )
    floats = all(fact.mode == "F" for _, fact in deep)
    largest = high[1].high
    bits = next(b for b in _DEPTHS if largest <= 2**b - 1)
    white = 1.0 if floats and largest <= 1 else float(2**bits - 1)
    what = "fractions" if floats else "more than 8 bits"
    return white, [
        f"{len(deep)} of {len(paths)} images have {what} (mode {deep[0][1].mode}, values up to {largest:g}): 0 is read "
        f"as black and {white:g} as white"
    ]


def copies_between(parts: dict[str, list[int]], paths: Sequence[Path], facts: Sequence[ImageFacts]) -> list[str]:
    """Notes on images of the validation and test part that are copies (the same bytes) of training images."""
    known = {facts[i].digest: i for i in parts["train"]}
    notes = []
    for name in ("validation", "test"):
        same = [(i, known[facts[i].digest]) for i in parts[name] if facts[i].digest in known]
        if same:
            one, other = (paths[i].name for i in same[0])
            notes.append(f"{len(same)} {name} images are copies of training images, such as {one} of {other}")
    return notes


def digests(facts: Sequence[ImageFacts]) -> Tensor:
    """The digest of each file, bytes [N, 16]."""
    return torch.from_numpy(np.frombuffer(b"".join(f.digest for f in facts), np.uint8).reshape(-1, 16).copy())
