"""A task from images: kept as uint8 in memory, converted to standardised floats batch by batch on their device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bnn_runner.data.splits import Sizes, divide, fingerprint
from bnn_runner.errors import UserError
from bnn_runner.tasks import Split, Task, TaskSpec

Array = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


@dataclass(frozen=True)
class PixelScaling:
    """Network inputs from pixels: (x / 255 - mean) / std by channel, with published constants of the training set."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 [B, C, H, W] to float32 of the same shape."""
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        return pixels.float().div_(255).sub_(mean).div_(std)


@dataclass(frozen=True)
class Half:
    """The training or the test part of an image set: uint8 pixels [N, H, W] or [N, H, W, C], and classes [N]."""

    pixels: Array
    classes: Tensor


def image_task(
    spec: TaskSpec,
    published: tuple[Half, Half],
    sizes: Sizes,
    seed: int,
    scaling: PixelScaling,
    partners: Mapping[str, Callable[[], Array]],
    class_names: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Task:
    """The task; a point's id is its index in the training files, continued through the test files.

    `published` are the training and the test part. `partners` read the out-of-distribution sets.
    A partner that could not be read is listed in `Task.unavailable` with the reason; this is not an error.
    """
    training, testing = published
    first = len(training.pixels)  # id of the first test image
    rows = torch.arange(first + len(testing.pixels))
    parts = divide(rows[:first], rows[first:], sizes, seed, training.classes, testing.classes)

    def part(half: Half, ids: Tensor, first: int = 0) -> Split:
        return Split(channels_first(half.pixels, ids - first), half.classes[ids - first], ids, scaling)

    train, val, test = part(training, parts.train), part(training, parts.val), part(testing, parts.test, first)
    ood, unavailable = {}, {}
    for name, read in partners.items():
        try:
            pixels = channels_first(read())
        except (OSError, RuntimeError, ValueError, UserError) as error:
            unavailable[name] = str(error)
            continue
        if tuple(pixels.shape[1:]) != spec.input_shape:
            unavailable[name] = f"its images must be {list(spec.input_shape)}; got {list(pixels.shape[1:])}"
            continue
        ood[name] = Split(pixels, None, torch.arange(len(pixels)), scaling)
    return Task(
        spec=spec,
        train=train,
        val=val,
        test=test,
        ood=ood,
        fingerprint=fingerprint(train, val.ids, torch.tensor([scaling.mean, scaling.std])),
        target_mean=torch.zeros(spec.num_outputs),
        target_scale=torch.ones(spec.num_outputs),
        unavailable=unavailable,
        class_names=class_names,
        notes=notes,
    )


def channels_first(pixels: Array, rows: Tensor | None = None) -> Tensor:
    """uint8 [M, C, H, W] of the images at `rows` (None: all), from [N, H, W] or [N, H, W, C]."""
    chosen = torch.from_numpy(pixels if rows is None else pixels[rows.numpy()])
    if chosen.dtype != torch.uint8 or chosen.ndim not in (3, 4):
        raise ValueError(f"it must contain images of bytes; got {chosen.dtype} of shape {list(chosen.shape)}")
    return chosen.unsqueeze(1) if chosen.ndim == 3 else chosen.permute(0, 3, 1, 2).contiguous()
