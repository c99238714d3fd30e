"""Reads new points for predictions from files or values, and checks that they fit the run's task.

Columns are matched by name, arrays by shape, images by size. A row or an image that does not fit is marked, and the
others are predicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bnn_runner.errors import UserError
from bnn_runner.runs.new_arrays import npz_array, points_of_values
from bnn_runner.runs.new_images import IMAGES, read_images
from bnn_runner.runs.new_tables import points_of_frame, points_of_table
from bnn_runner.runs.points import NewPoints, numbered
from bnn_runner.tasks import Task


def read_points(path: Path, task: Task) -> NewPoints:
    """Reads points from a table (.csv ...), an .npz file with the array x, an image or a folder of images.

    Raises:
        UserError: If the file is not readable, or none of its points fits the task.
    """
    if task.spec.vocabulary:
        raise UserError(f"data={task.spec.name} has texts as inputs; predictions for new texts are not supported.")
    if path.is_dir() or path.suffix.lower() in IMAGES:
        return read_images(path, task)
    if not path.is_file():
        raise UserError(f"{path} does not exist. Give a table (.csv), an .npz file, an image or a folder of images.")
    if path.suffix.lower() == ".npz":
        values = npz_array(path)
        return numbered(points_of_values(values, task, str(path)))
    if path.suffix.lower() == ".npy":
        raise UserError(f"{path} must be an .npz file with an array x; got a bare array. Use np.savez(file, x=array).")
    return points_of_table(path, task)


def from_values(x: Any, task: Task, source: str = "x") -> NewPoints:
    """Reads points from a pandas table, an array, a tensor or nested lists, in original units.

    Args:
        x: The points.
        task: The task of the run.
        source: Name of `x` in messages.

    Raises:
        UserError: If none of the points fits the task.
    """
    if hasattr(x, "columns") and hasattr(x, "iloc"):
        return points_of_frame(x, task, source)
    return numbered(points_of_values(x, task, source))
