"""A task from images: kept as uint8 in memory, made into standardised floats batch by batch on their device."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnn_runner.base import Split, Task, TaskSpec
from bnn_runner.data.splits import Sizes, divide, fingerprint
from bnn_runner.errors import UserError

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
class ImageFiles:
    """A published image set: uint8 pixels [N, H, W] or [N, H, W, C], and classes [N]."""

    train_pixels: Array
    train_classes: Tensor
    test_pixels: Array
    test_classes: Tensor
    class_names: tuple[str, ...]


def image_task(
    spec: TaskSpec,
    files: ImageFiles,
    sizes: Sizes,
    seed: int,
    scaling: PixelScaling,
    partners: Mapping[str, Callable[[], Array]],
) -> Task:
    """The task; a point's id is its place in the training files, then (counting on) in the test files.

    `partners` read the out-of-distribution sets. One that cannot be read is listed in
    `Task.unavailable` with the reason, and is never an error.
    """
    num_train, num_test = len(files.train_pixels), len(files.test_pixels)
    rows = torch.arange(num_train + num_test)
    parts = divide(rows[:num_train], rows[num_train:], sizes, seed, files.train_classes, files.test_classes)

    def from_train(ids: Tensor) -> Split:
        return Split(channels_first(files.train_pixels, ids), files.train_classes[ids], ids, scaling)

    train, val = from_train(parts.train), from_train(parts.val)
    test_rows = parts.test - num_train
    test = Split(channels_first(files.test_pixels, test_rows), files.test_classes[test_rows], parts.test, scaling)
    ood, unavailable = {}, {}
    for name, read in partners.items():
        try:
            pixels = channels_first(read())
        except (OSError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile) as error:
            unavailable[name] = str(error)
            continue
        if tuple(pixels.shape[1:]) != spec.input_shape:
            unavailable[name] = f"its images are {tuple(pixels.shape[1:])}, not {spec.input_shape}"
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
        class_names=files.class_names,
    )


def channels_first(pixels: Array, rows: Tensor | None = None) -> Tensor:
    """uint8 [M, C, H, W] of the images at `rows` (all of them without), from [N, H, W] or [N, H, W, C]."""
    chosen = torch.from_numpy(pixels if rows is None else pixels[rows.numpy()])
    if chosen.dtype != torch.uint8 or chosen.ndim not in (3, 4):
        raise ValueError(f"holds {chosen.dtype} numbers of shape {tuple(chosen.shape)}, not images of bytes")
    return chosen.unsqueeze(1) if chosen.ndim == 3 else chosen.permute(0, 3, 1, 2).contiguous()


def npz_images(path: Path) -> Array:
    """The array `test_images` of an .npz file. Raises `FileNotFoundError` or `ValueError` with a readable reason."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    try:
        with np.load(path, allow_pickle=False) as archive:
            images: Array = archive["test_images"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} could not be read ({error})") from error
    return images


def check_bytes(folder: Path, sizes: Mapping[str, int]) -> None:
    """Raise `UserError` for every file in `folder` whose length is not the published one (a broken-off copy)."""
    problems = [
        f"{folder / name} is damaged. It has {found:,} bytes, expected were {expected:,}. "
        "Replace it, or take it away and it is downloaded again."
        for name, expected in sizes.items()
        if (found := (folder / name).stat().st_size) != expected
    ]
    if problems:
        raise UserError(*problems)
