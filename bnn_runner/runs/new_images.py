"""New points in image files: a file that is not readable is marked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bnn_runner.data.image_files import SUFFIXES as IMAGES
from bnn_runner.data.image_files import open_image
from bnn_runner.errors import UserError
from bnn_runner.runs.points import NewPoints, encoded
from bnn_runner.tasks import Task


def read_images(path: Path, task: Task) -> NewPoints:
    """Points in an image or a folder of images. Raises `UserError` if none is readable."""
    if len(task.spec.input_shape) != 3:
        raise UserError(
            f"data={task.spec.name} has inputs of shape {list(task.spec.input_shape)}; got images ({path}). "
            "Give a table (.csv), or an .npz file with the array x."
        )
    files, others = [path], 0
    if path.is_dir():
        shown = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        all_files = sorted(p for p in shown if p.is_file())
        files = [p for p in all_files if p.suffix.lower() in IMAGES]
        others = len(all_files) - len(files)
    if not files:
        raise UserError(f"{path} contains no images ({', '.join(IMAGES)}).")
    read = task.read_image or _reader(task)
    pixels, misfits = list[Tensor](), dict[int, str]()
    for i, file in enumerate(files):
        try:
            pixels.append(read(file))
        except UserError as error:
            misfits[i] = str(error)
    if not pixels:
        raise UserError(*list(misfits.values())[:5])
    labels = tuple(str(f.relative_to(path)) if path.is_dir() else f.name for f in files)
    notes = [f"ignored: {others} files that are not images"] if others else []
    if misfits:
        reasons = " ".join(list(misfits.values())[:5])
        notes.append(f"{len(misfits)} of {len(files)} images not predicted, see their column note: {reasons}")
    points = encoded(torch.stack(pixels), task, str(path))
    return NewPoints(points, labels, "file", tuple(notes), misfits=misfits)


def _reader(task: Task) -> Callable[[Path], Tensor]:
    """Returns a function that reads an image file as bytes [C, H, W], or raises `UserError` for another size."""
    channels, height, width = task.spec.input_shape

    def read(file: Path) -> Tensor:
        converted = open_image(file, channels)
        if converted.size != (width, height):
            raise UserError(
                f"{file} must be {width} x {height} pixels for data={task.spec.name}; got {converted.size[0]} x "
                f"{converted.size[1]}. Resize it."
            )
        pixels = torch.from_numpy(np.array(converted))
        return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1)

    return read
