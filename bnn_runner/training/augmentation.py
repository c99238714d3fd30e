"""Augmentation of training images, in batches and on their device. Posteriors are fitted to the clean images.

The changes to all images are drawn before an epoch, from the stream (lane seed, "augment", epoch). So a resumed
training gives the same bits, and a lane sees the same images with or without other lanes. The prior is weighted with N,
the number of clean images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from bnn_runner.errors import raise_all
from bnn_runner.tasks import TaskSpec


@dataclass(frozen=True)
class Unchanged:
    """No augmentation."""

    def problems(self, spec: TaskSpec) -> list[str]:
        return []

    def choose(self, points: int, image: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.empty(points, 0, dtype=torch.int64)

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class CropFlip:
    """Random crop of the padded image, horizontal flip with probability 1/2, and a square hole.

    Attributes:
        padding: Pixels of zeros on each side (the mean colour, as images are standardised). The crop of the original
            size starts at a uniformly drawn pixel.
        flip: Whether to flip left and right.
        cutout: Side in pixels of a square of zeros; 0 for none. Its centre is drawn uniformly over the image, so part
            of it may be outside (DeVries & Taylor 2017, §3.2).
    """

    padding: int = 4
    flip: bool = True
    cutout: int = 0

    cites: ClassVar[tuple[str, ...]] = ("devries2017",)

    def __post_init__(self) -> None:
        raise_all(
            [
                f"augment.{name} must be 0 or more pixels; got {value}."
                for name, value in (("padding", self.padding), ("cutout", self.cutout))
                if value < 0
            ]
        )

    def problems(self, spec: TaskSpec) -> list[str]:
        if len(spec.input_shape) == 3:
            return []
        return [
            f"Augmentation requires images; the inputs of data={spec.name} have shape {list(spec.input_shape)}. "
            "Use augment=none, or an image data set."
        ]

    def choose(self, points: int, image: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws for each image: row and column of the crop, whether it is flipped, row and column of the hole."""
        _, height, width = image
        limits = (2 * self.padding + 1, 2 * self.padding + 1, 2 if self.flip else 1, height, width)
        return torch.stack([torch.randint(0, limit, (points,), generator=generator) for limit in limits], dim=1)

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        top, left, flipped, row, column = chosen.unsqueeze(-1).unbind(1)  # each [B, 1]
        rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        source_rows = rows + top  # [B, H]
        source_columns = torch.where(flipped.bool(), columns.flip(0), columns) + left  # [B, W]
        padded = F.pad(x, (self.padding,) * 4)
        image = torch.arange(len(x), device=x.device)[:, None, None]
        # Indexed with the channels last, which gives the memory layout in which convolutions are fastest.
        channels_last = padded.permute(0, 2, 3, 1)[image, source_rows[:, :, None], source_columns[:, None, :]]
        cropped = channels_last.permute(0, 3, 1, 2)
        if self.cutout == 0:
            return cropped
        low = self.cutout // 2
        in_rows = (rows >= row - low) & (rows < row - low + self.cutout)
        in_columns = (columns >= column - low) & (columns < column - low + self.cutout)
        hole = in_rows[:, :, None] & in_columns[:, None, :]
        return cropped.masked_fill(hole[:, None], 0.0)
