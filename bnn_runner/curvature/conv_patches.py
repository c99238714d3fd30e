"""The inputs of a convolution: its image, unfolded into patches only where the patches themselves are needed.

Letters: B points, c channels, k1 × k2 the kernel, d = c·k1·k2 numbers per patch, H × W the padded image,
T = T1·T2 positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bnn_runner.curvature.psd import wide

Pair = tuple[int, int]


@dataclass(frozen=True)
class Patches:
    """The patches [B, d, T] of padded images [B, c, H, W], in the order of `torch.nn.functional.unfold`."""

    images: Tensor
    kernel: Pair
    dilation: Pair
    stride: Pair

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, d and T."""
        b, c = self.images.shape[:2]
        t1, t2 = self._counts()
        return b, c * self.kernel[0] * self.kernel[1], t1 * t2

    def _counts(self) -> Pair:
        """T1 and T2."""
        spare = [
            size - (k - 1) * dilation - 1
            for size, k, dilation in zip(self.images.shape[2:], self.kernel, self.dilation, strict=True)
        ]
        return spare[0] // self.stride[0] + 1, spare[1] // self.stride[1] + 1

    def unfolded(self) -> Tensor:
        """The patches themselves, in one copy."""
        t1, t2 = self._counts()
        windows = _windows(self.images, 2, self.kernel[0], self.dilation[0], self.stride[0], t1)  # [B, c, k1, T1, W]
        windows = _windows(windows, 4, self.kernel[1], self.dilation[1], self.stride[1], t2)  # [B, c, k1, T1, k2, T2]
        return windows.transpose(3, 4).reshape(self.shape)

    def gram(self) -> Tensor:
        """Σ_b Σ_t a aᵀ, [d, d] float64, without forming the patches.

        Kernel rows i and i + δ are multiplied in the products of image rows h and h + δ, for every i: those products,
        [c·k2, c·k2] for each h and δ, are computed once and summed over the h that each i reads. That takes
        k1 (H/T1) products of rows where patches take k1², and memory of one kernel row's width.
        """
        (k1, k2), (d1, d2), (s1, s2) = self.kernel, self.dilation, self.stride
        t1, t2 = self._counts()
        channels = self.images.shape[1]
        rows = _windows(wide(self.images).permute(2, 1, 0, 3), 3, k2, d2, s2, t2)  # [H, c, B, k2, T2]
        rows = rows.transpose(2, 3).reshape(len(rows), channels * k2, -1)
        span = (t1 - 1) * s1 + 1
        out = rows.new_empty(channels, k1, k2, channels, k1, k2)
        for apart in range(k1):
            met = torch.bmm(rows[: len(rows) - apart * d1], rows[apart * d1 :].mT)
            for i in range(k1 - apart):
                seen = met[i * d1 : i * d1 + span : s1].sum(0).reshape(channels, k2, channels, k2)
                out[:, i, :, :, i + apart] = seen
                out[:, i + apart, :, :, i] = seen.permute(2, 3, 0, 1)
        return out.reshape(channels * k1 * k2, -1)


def _windows(values: Tensor, dim: int, size: int, dilation: int, stride: int, count: int) -> Tensor:
    """A view with `dim` replaced by two, [size, count]: entry (i, t) is at i·dilation + t·stride."""
    shape, strides = list(values.shape), list(values.stride())
    step = strides[dim]
    return values.as_strided(
        [*shape[:dim], size, count, *shape[dim + 1 :]],
        [*strides[:dim], step * dilation, step * stride, *strides[dim + 1 :]],
        values.storage_offset(),
    )


def patches_of(owner: nn.Conv2d, images: Tensor) -> Patches:
    """The patches of images [B, c, ·, ·] that `owner` reads."""
    padding, kernel, dilation = owner.padding, _pair(owner.kernel_size), _pair(owner.dilation)
    if isinstance(padding, str):  # "same" pads an odd total more at the end
        extra = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
        sides = [(e // 2, e - e // 2) for e in extra]
    else:
        sides = [(p, p) for p in padding]
    if any(n for side in sides for n in side):
        images = nn.functional.pad(images, [n for side in reversed(sides) for n in side])
    return Patches(images, kernel, dilation, _pair(owner.stride))


def _pair(sizes: tuple[int, ...]) -> Pair:
    first, second = sizes
    return first, second
