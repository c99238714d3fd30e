"""Images that stay in their files: decoded batch by batch, in advance by threads, never all in memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from bnn_runner.errors import UserError
from bnn_runner.tasks import LazyInputs

if TYPE_CHECKING:
    from PIL import Image as ImageModule

SUFFIXES = (".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pnm")
DEEP = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits: I;16, I and F."""
_BATCHES_AHEAD = 2


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """One pool for all splits: image libraries decode without holding Python's lock."""
    return ThreadPoolExecutor(workers, thread_name_prefix="decode")


class ImageFiles:
    """Images of `paths`, [channels, size, size] bytes each: the shorter side resized to `size`, cropped at the centre.

    `workers` threads decode (0: none, None: one per core). Batches announced by `ahead` are decoded while others are
    used; at most two of them are kept. `white` is the value of white in images with more than 8 bits.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        size: int,
        channels: int,
        workers: int | None,
        device: torch.device | None = None,
        white: float | None = None,
    ) -> None:
        self.paths, self.size, self.channels, self.white = tuple(paths), size, channels, white
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
        return decode(self.paths[i], self.size, self.channels, self.white)

    def at(self, indices: Tensor) -> ImageFiles:
        return self._like([self.paths[i] for i in indices.tolist()], self._device)

    def joined(self, others: Sequence[LazyInputs]) -> ImageFiles:
        more = [path for other in others for path in cast(ImageFiles, other).paths]
        return self._like([*self.paths, *more], self._device)

    def to(self, device: torch.device) -> ImageFiles:
        return self._like(self.paths, device)

    def _like(self, paths: Sequence[Path], device: torch.device) -> ImageFiles:
        return ImageFiles(paths, self.size, self.channels, self.workers, device, self.white)


@dataclass(frozen=True)
class ReadImage:
    """Reads one image file as the images of a folder are read."""

    size: int
    channels: int
    white: float | None = None

    def __call__(self, path: Path) -> Tensor:
        return decode(path, self.size, self.channels, self.white)


def open_image(path: Path, channels: int, white: float | None = None) -> ImageModule.Image:
    """One image of bytes, grey or in colour, upright as its camera noted.

    Args:
        path: its file.
        channels: 1 for grey, 3 for colour.
        white: the value that becomes 255 in images with more than 8 bits; None refuses these.

    Raises:
        UserError: the file is missing, damaged, or has more than 8 bits without `white`.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            image.load()
    except FileNotFoundError:
        raise UserError(f"{path} no longer exists. Put it back, or run again without it.") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"Could not read {path} as an image: {error}. Replace or delete it.") from error
    if image.mode.startswith(DEEP):
        if white is None:
            raise UserError(f"{path} must have 8 bits per channel, as the run's own images; got mode {image.mode}.")
        values = np.asarray(image, dtype=np.float64) * (255 / white)
        image = Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))
    return image.convert("L" if channels == 1 else "RGB")


def decode(path: Path, size: int, channels: int, white: float | None = None) -> Tensor:
    """Bytes [C, size, size] of one image file (see `open_image`). Raises `UserError` naming it."""
    from PIL import Image, ImageOps

    image = open_image(path, channels, white)
    pixels = np.array(ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR))
    values = torch.from_numpy(pixels)
    return values.unsqueeze(0) if channels == 1 else values.permute(2, 0, 1).contiguous()
