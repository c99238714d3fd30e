"""New points in arrays: vectors by their width, images by their size."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_runner.errors import UserError
from bnn_runner.runs.points import encoded, few
from bnn_runner.tasks import Split, Task


def points_of_values(x: Any, task: Task, source: str) -> Split:
    """Points from an array, a tensor or nested lists. Raises `UserError` if they do not fit."""
    try:
        values = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
    except ValueError:
        raise UserError(f"{source} must have rows of equal length; got rows of different lengths.") from None
    if values.dtype.kind not in "biuf":
        raise UserError(
            f"{source} must hold numbers; got {values.dtype}. Give an array of numbers, or a table with column names."
        )
    if len(values.shape) == 0 or len(values) == 0:
        raise UserError(f"{source} must hold at least one point (its first axis); got none.")
    shape = task.spec.input_shape
    if len(shape) == 3 and values.ndim in (3, 4):
        return encoded(_channels_first(values, task, source), task, source)
    if task.spec.vocabulary:
        if values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= task.spec.vocabulary:
            raise UserError(f"{source} must hold token ids, whole numbers from 0 to {task.spec.vocabulary - 1}.")
        return encoded(torch.from_numpy(values.astype(np.int64)), task, source)
    expected = (len(task.feature_names),) if task.feature_names else shape
    if values.ndim == 1 and expected == (1,):
        values = values[:, None]
    if values.shape[1:] != expected:
        names = f" ({', '.join(task.feature_names)})" if task.feature_names else ""
        raise UserError(
            f"{source} must have shape [points, {', '.join(map(str, expected))}]{names} for data="
            f"{task.spec.name}; got {list(values.shape)}."
        )
    dtype = np.uint8 if values.dtype == np.uint8 else np.float64
    return encoded(torch.from_numpy(values.astype(dtype)), task, source)


def npz_array(path: Path) -> Any:
    """The array x of an .npz file, or its only one. Raises `UserError` if there is none."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = archive.files
            lowered = [n for n in names if n.lower() == "x"]
            name = "x" if "x" in names else lowered[0] if lowered else names[0] if len(names) == 1 else None
            if name is None:
                raise UserError(f"{path} must contain an array x; it has {few(names) or 'nothing'}. Save it as x=...")
            return archive[name]
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise UserError(
            f"Could not read {path} as .npz ({error}). Save arrays of numbers: np.savez(file, x=array)."
        ) from error


def _channels_first(values: Any, task: Task, source: str) -> Tensor:
    """Images as [M, C, H, W]; bytes if the run's own images are bytes."""
    channels, height, width = task.spec.input_shape
    if values.ndim == 3:
        values = values[:, None] if channels == 1 else values
    elif values.shape[1:] != task.spec.input_shape and values.shape[1:] == (height, width, channels):
        values = values.transpose(0, 3, 1, 2)
    if values.ndim != 4:
        raise UserError(f"{source} must have shape [M, C, H, W] with {channels} channels; got {list(values.shape)}.")
    if getattr(task.test, "inputs", values).dtype == torch.uint8 and values.dtype != np.uint8:
        raise UserError(
            f"{source} must hold bytes (uint8, 0 to 255); got {values.dtype}. Give the images of data="
            f"{task.spec.name} unscaled: the run scales them."
        )
    values = values if values.dtype == np.uint8 else values.astype(np.float64)
    return torch.from_numpy(np.ascontiguousarray(values))
