"""Augmentation of training images, in batch and on their device. Posteriors are fitted to the clean images.

What happens to an image is drawn before an epoch from a stream of (lane seed, "augment", epoch), so
a resumed training goes on bit for bit and a lane among others sees what it would see alone. N, by
which the prior is weighed, stays the number of clean images.
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
    """A random crop of the padded image, a mirror image at even odds, and a square hole.

    The image is padded by `padding` pixels of zeros (the mean colour, as images are standardised)
    and cut to its size at a place drawn uniformly. `flip` mirrors left and right. `cutout` is the
    side of a square of zeros whose centre is drawn uniformly over the image, so that part of it may
    lie outside (DeVries & Taylor 2017, §3.2).
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
            (
                f"Augmentation requires images; the inputs of data={spec.name} have shape {list(spec.input_shape)}"
                ". Use augment=none, or an image data set."
            )
        ]

    def choose(self, points: int, image: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Row and column where the crop begins, whether it is mirrored, row and column of the hole's centre."""
        _, height, width = image
        limits = (2 * self.padding + 1, 2 * self.padding + 1, 2 if self.flip else 1, height, width)
        return torch.stack([torch.randint(0, limit, (points,), generator=generator) for limit in limits], dim=1)

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        top, left, mirrored, row, column = chosen.unsqueeze(-1).unbind(1)  # each [B, 1]
        rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
        taken_rows = rows + top  # [B, H]
        taken_columns = torch.where(mirrored.bool(), columns.flip(0), columns) + left  # [B, W]
        padded = F.pad(x, (self.padding,) * 4)
        image = torch.arange(len(x), device=x.device)[:, None, None]
        # The channel axis comes last out of the indexing, which is how the network's convolutions want it.
        moved = padded.permute(0, 2, 3, 1)[image, taken_rows[:, :, None], taken_columns[:, None, :]].permute(0, 3, 1, 2)
        if self.cutout == 0:
            return moved
        low = self.cutout // 2
        in_rows = (rows >= row - low) & (rows < row - low + self.cutout)
        in_columns = (columns >= column - low) & (columns < column - low + self.cutout)
        hole = in_rows[:, :, None] & in_columns[:, None, :]
        return moved.masked_fill(hole[:, None], 0.0)
