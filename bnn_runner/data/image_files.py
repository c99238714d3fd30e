"""Images that stay in their files: decoded batch by batch, in advance by threads, never all in memory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from bnn_runner.errors import UserError
from bnn_runner.tasks import LazyInputs

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_BATCHES_AHEAD = 2


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """One pool for all splits: image libraries decode without holding Python's lock."""
    return ThreadPoolExecutor(workers, thread_name_prefix="decode")


class ImageFiles:
    """Images of `paths`, [channels, size, size] bytes each: the shorter side resized to `size`, cropped at the centre.

    `workers` threads decode (0: none, None: one per core). Batches announced by `ahead` are decoded while others are
    used; at most two of them are kept.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        size: int,
        channels: int,
        workers: int | None,
        device: torch.device | None = None,
    ) -> None:
        self.paths, self.size, self.channels = tuple(paths), size, channels
        self.workers = (os.cpu_count() or 1) if workers is None else workers
        self._device = device or torch.device("cpu")
        self._coming: dict[tuple[int, ...], list[Future[Tensor]]] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, indices: Tensor) -> Tensor:
        """Bytes [B, C, H, W] on the device. Raises `UserError` naming a file that could not be decoded."""
        wanted = tuple(indices.tolist())
        if not wanted:
            return torch.empty(0, self.channels, self.size, self.size, dtype=torch.uint8, device=self._device)
        if self.workers == 0:
            images = [self._decode(i) for i in wanted]
        else:
            coming = self._coming.pop(wanted, None) or self._start(wanted)
            images = [future.result() for future in coming]
        return torch.stack(images).to(self._device)

    def ahead(self, indices: Tensor) -> None:
        wanted = tuple(indices.tolist())
        if self.workers == 0 or wanted in self._coming:
            return
        while len(self._coming) >= _BATCHES_AHEAD:  # announced, but not requested
            for future in self._coming.pop(next(iter(self._coming))):
                future.cancel()
        self._coming[wanted] = self._start(wanted)

    def _start(self, wanted: Sequence[int]) -> list[Future[Tensor]]:
        return [_pool(self.workers).submit(self._decode, i) for i in wanted]

    def _decode(self, i: int) -> Tensor:
        return decode(self.paths[i], self.size, self.channels)

    def at(self, indices: Tensor) -> ImageFiles:
        return self._like([self.paths[i] for i in indices.tolist()], self._device)

    def joined(self, others: Sequence[LazyInputs]) -> ImageFiles:
        more = [path for other in others for path in cast(ImageFiles, other).paths]
        return self._like([*self.paths, *more], self._device)

    def to(self, device: torch.device) -> ImageFiles:
        return self._like(self.paths, device)

    def _like(self, paths: Sequence[Path], device: torch.device) -> ImageFiles:
        return ImageFiles(paths, self.size, self.channels, self.workers, device)


def decode(path: Path, size: int, channels: int) -> Tensor:
    """Bytes [C, size, size] of one image file, upright as its camera noted. Raises `UserError` naming it."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
    except FileNotFoundError:
        raise UserError(f"{path} no longer exists. Put it back, or run again without it.") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"Could not read {path} as an image: {error}. Replace or delete it.") from error
    pixels = np.array(ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR))
    values = torch.from_numpy(pixels)
    return values.unsqueeze(0) if channels == 1 else values.permute(2, 0, 1).contiguous()


def digests(paths: Sequence[Path]) -> Tensor:
    """A digest of each file, bytes [N, 16]: about a second per gigabyte that the system has in memory."""
    rows = []
    for path in paths:
        with path.open("rb") as f:
            rows.append(hashlib.file_digest(f, lambda: hashlib.blake2b(digest_size=16)).digest())
    return torch.from_numpy(np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16).copy())
