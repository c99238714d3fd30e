"""Shifted test images, computed batch by batch: rotation, and corruptions after Hendrycks and Dietterich (2019).

The corruptions are computed here with the authors' settings for 32 x 32 images. They are not the files of CIFAR-10-C,
and scores on them are not comparable with scores on CIFAR-10-C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from bnn_runner.rng import generator
from bnn_runner.tasks import LazyInputs, Split

CLEAN = "clean/0"


def rotate(x: Tensor, degrees: float, noise: Tensor) -> Tensor:
    """Images rotated counter-clockwise about their centre, bilinear, black beyond the edge."""
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    ratio = x.shape[-1] / x.shape[-2]
    matrix = torch.tensor([[c, -s / ratio, 0.0], [s * ratio, c, 0.0]], device=x.device, dtype=x.dtype)
    grid = F.affine_grid(matrix.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def gaussian_noise(x: Tensor, sd: float, noise: Tensor) -> Tensor:
    """Independent normal noise on every pixel and channel."""
    return x + sd * torch.erfinv((2 * noise - 1).clamp(-0.9999999, 0.9999999)) * math.sqrt(2)


def impulse_noise(x: Tensor, share: float, noise: Tensor) -> Tensor:
    """A share of all values set to black or white, half each."""
    return torch.where(noise < share / 2, 0.0, torch.where(noise > 1 - share / 2, 1.0, x))


def gaussian_blur(x: Tensor, sd: float, noise: Tensor) -> Tensor:
    """Convolution with a Gaussian of `sd` pixels, edges repeated."""
    radius = max(1, math.ceil(3 * sd))
    place = torch.arange(-radius, radius + 1, device=x.device, dtype=x.dtype)
    kernel = torch.exp(-0.5 * (place / sd).square())
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, 1, -1)
    padded = F.pad(x, (radius,) * 4, mode="replicate")
    rows = F.conv2d(padded, kernel, groups=x.shape[1])
    return F.conv2d(rows, kernel.mT, groups=x.shape[1])


def contrast(x: Tensor, factor: float, noise: Tensor) -> Tensor:
    """The distance from each channel's mean over the image, multiplied by a factor."""
    mean = x.mean((-2, -1), keepdim=True)
    return (x - mean) * factor + mean


def brightness(x: Tensor, plus: float, noise: Tensor) -> Tensor:
    """The same amount added to every channel."""
    return x + plus


def pixelate(x: Tensor, factor: float, noise: Tensor) -> Tensor:
    """Downsampled by averaging, then upsampled by repeating pixels."""
    height, width = x.shape[-2:]
    small = F.adaptive_avg_pool2d(x, (max(1, int(height * factor)), max(1, int(width * factor))))
    return F.interpolate(small, size=(height, width), mode="nearest")


Change = Callable[[Tensor, float, Tensor], Tensor]
"""(images in [0, 1] [B, C, H, W], strength, uniform random numbers of each image, of their shape) -> images."""

SHIFTS: dict[str, tuple[Change, dict[int, float]]] = {
    "rotation": (rotate, {d: float(d) for d in (15, 30, 45, 60, 75, 90, 120, 150, 180)}),
    "gaussian_noise": (gaussian_noise, dict(enumerate((0.04, 0.06, 0.08, 0.09, 0.10), 1))),
    "impulse_noise": (impulse_noise, dict(enumerate((0.01, 0.02, 0.03, 0.05, 0.07), 1))),
    "gaussian_blur": (gaussian_blur, dict(enumerate((0.4, 0.6, 0.7, 0.8, 1.0), 1))),
    "contrast": (contrast, dict(enumerate((0.75, 0.5, 0.4, 0.3, 0.15), 1))),
    "brightness": (brightness, dict(enumerate((0.05, 0.1, 0.15, 0.2, 0.3), 1))),
    "pixelate": (pixelate, dict(enumerate((0.95, 0.9, 0.85, 0.75, 0.65), 1))),
}
"""Level to strength of each shift; levels of rotation are degrees."""


def shift_problems(names: object) -> list[str]:
    """Problems with `data.shifts`."""
    if not isinstance(names, Sequence) or isinstance(names, str):
        return [f"data.shifts must be a list, as in data.shifts=[rotation], or [] for none; got {names}."]
    return [
        f"data.shifts must list names of {', '.join(SHIFTS)}; got {name!r}." for name in names if name not in SHIFTS
    ]


@dataclass(frozen=True)
class Shifted:
    """Images of bytes, shifted when they are read; values from 0 to 255 as floats.

    The noise of an image depends only on (seed, its id): every draw, batch and level sees the same.
    """

    pixels: Tensor
    ids: Tensor
    change: Change
    strength: float
    seed: int

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    def __len__(self) -> int:
        return len(self.ids)

    def read(self, indices: Tensor) -> Tensor:
        x = self.pixels.index_select(0, indices.to(self.device)).float().div_(255)
        noise = x
        if self.change in (gaussian_noise, impulse_noise):
            ids = self.ids[indices.to(self.ids.device)].tolist()
            each = [torch.rand(x.shape[1:], generator=generator(self.seed, "shift", i)) for i in ids]
            noise = torch.stack(each).to(self.device)
        return self.change(x, self.strength, noise).clamp(0, 1).mul_(255)

    def ahead(self, indices: Tensor) -> None:
        """Nothing to do: the pixels are in memory."""

    def at(self, indices: Tensor) -> Shifted:
        return replace(self, pixels=self.pixels[indices.to(self.device)], ids=self.ids[indices.to(self.ids.device)])

    def joined(self, others: Sequence[LazyInputs]) -> Shifted:
        parts = [self, *(other for other in others if isinstance(other, Shifted))]
        return replace(self, pixels=torch.cat([p.pixels for p in parts]), ids=torch.cat([p.ids for p in parts]))

    def to(self, device: torch.device) -> Shifted:
        return replace(self, pixels=self.pixels.to(device))


def shifted(test: Split, names: Sequence[str], seed: int) -> dict[str, Split]:
    """The test split at every level of the named shifts, and without any under `CLEAN`; empty for no names."""
    if not names:
        return {}
    assert isinstance(test.inputs, Tensor)
    splits = {CLEAN: test}
    for name in names:
        change, levels = SHIFTS[name]
        for level, strength in levels.items():
            splits[f"{name}/{level}"] = replace(test, inputs=Shifted(test.inputs, test.ids, change, strength, seed))
    return splits
