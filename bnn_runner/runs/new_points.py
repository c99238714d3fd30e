"""Reads new points for predictions from files or values, and checks that they fit the run's task.

Columns are matched by name, arrays by shape, images by size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bnn_runner.data.table_file import number, read_table
from bnn_runner.errors import UserError, did_you_mean
from bnn_runner.tasks import Split, Task

TABLES = (".csv", ".tsv", ".txt", ".data")
IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_FEW = 8


@dataclass(frozen=True)
class NewPoints:
    """Points prepared for the network.

    Attributes:
        points: The points.
        labels: Name of each point: its row or its file.
        label_name: What the labels are: 'row' or 'file'.
        notes: Lines for the user, such as ignored columns.
    """

    points: Split
    labels: tuple[str, ...]
    label_name: str
    notes: tuple[str, ...] = ()


def read_points(path: Path, task: Task) -> NewPoints:
    """Reads points from a table (.csv ...), an .npz file with the array x, an image or a folder of images.

    Raises:
        UserError: If the file is not readable or its points do not fit the task.
    """
    if task.spec.vocabulary:
        raise UserError(f"data={task.spec.name} has texts as inputs; predictions for new texts are not supported.")
    if path.is_dir() or path.suffix.lower() in IMAGES:
        return _images(path, task)
    if not path.is_file():
        raise UserError(f"{path} does not exist. Give a table (.csv), an .npz file, an image or a folder of images.")
    if path.suffix.lower() == ".npz":
        values = _npz_array(path)
        return _numbered(from_values(values, task, str(path)))
    if path.suffix.lower() == ".npy":
        raise UserError(f"{path} must be an .npz file with an array x; got a bare array. Use np.savez(file, x=array).")
    table = read_table(path)
    columns = {name: [row[i] for row in table.rows] for i, name in enumerate(_names(table.header, table.width))}
    points, notes = _from_columns(columns, table.header is not None, task, str(path), table.lines, table.number)
    return _numbered(points, notes)


def from_values(x: Any, task: Task, source: str = "x") -> Split:
    """Reads points from a pandas table, an array, a tensor or nested lists, in original units.

    Args:
        x: The points.
        task: The task of the run.
        source: Name of `x` in messages.

    Raises:
        UserError: If the points do not fit the task.
    """
    if hasattr(x, "columns") and hasattr(x, "iloc"):
        columns = {str(name): [str(v) for v in x.iloc[:, i]] for i, name in enumerate(x.columns)}
        return _from_columns(columns, True, task, source, range(len(x)), number)[0]
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
        return _encoded(_channels_first(values, task, source), task, source)
    if task.spec.vocabulary:
        if values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= task.spec.vocabulary:
            raise UserError(f"{source} must hold token ids, whole numbers from 0 to {task.spec.vocabulary - 1}.")
        return _encoded(torch.from_numpy(values.astype(np.int64)), task, source)
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
    return _encoded(torch.from_numpy(values.astype(dtype)), task, source)


def _numbered(points: Split, notes: Sequence[str] = ()) -> NewPoints:
    return NewPoints(points, tuple(str(i + 1) for i in range(len(points))), "row", tuple(notes))


def _encoded(original: Tensor, task: Task, source: str) -> Split:
    """Prepares points as the run prepared its own, and checks their shape against the network's inputs."""
    points = task.new_points(original)
    shape = points.gather(torch.arange(1))[0].shape[1:]
    if tuple(shape) != task.spec.input_shape:
        raise UserError(
            f"{source} has points of shape {list(original.shape[1:])}, which become network inputs of shape "
            f"{list(shape)}; the network of data={task.spec.name} takes {list(task.spec.input_shape)}."
        )
    return points


# ------------------------------------------------------------------------------------- tables


def _names(header: Sequence[str] | None, width: int) -> Sequence[str]:
    return header if header is not None else [f"column {i + 1}" for i in range(width)]


def _from_columns(
    columns: Mapping[str, Sequence[str]],
    named: bool,
    task: Task,
    source: str,
    lines: Sequence[int],
    to_number: Callable[[str], float | None],
) -> tuple[Split, list[str]]:
    """Reads points from columns of texts: by name if the task names its columns, else by position."""
    if len(task.spec.input_shape) != 1 or task.spec.vocabulary:
        raise UserError(
            f"data={task.spec.name} has inputs of shape {list(task.spec.input_shape)}; got a table ({source}"
            "). Give an .npz file with the array x, or images."
        )
    notes: list[str] = []
    features = task.feature_names
    if features and named:
        missing = [name for name in features if name not in columns]
        if missing:
            near = did_you_mean(missing[0], columns)
            raise UserError(
                f"{source} is missing the input column{'s' if len(missing) > 1 else ''} {', '.join(missing)}.{near} "
                f"Its columns: {_few(list(columns))}."
            )
        extra = [name for name in columns if name not in features]
        if extra:
            notes.append(f"ignored columns: {_few(extra)} (the inputs are {_few(features)})")
        inputs = {name: columns[name] for name in features}
    else:
        width = len(features) or task.spec.input_shape[0]
        if len(columns) != width:
            names = f": {_few(features)}" if features else ""
            raise UserError(
                f"{source} must have {width} columns in the order of data={task.spec.name}{names}; got "
                f"{len(columns)}. Leave out the target and any other column."
            )
        inputs = dict(zip(features or columns, columns.values(), strict=True))
        notes.append(f"columns are matched by position ({_few(list(columns))})")
    numbers = [_column(name, cells, task, source, lines, to_number) for name, cells in inputs.items()]
    values = torch.tensor(numbers, dtype=torch.float64).T
    points = _encoded(values, task, source)
    assert isinstance(points.inputs, torch.Tensor)
    finite = torch.isfinite(points.inputs).reshape(len(points), -1).all(1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        empty = [name for name, cells in inputs.items() if to_number(cells[row]) != to_number(cells[row])]
        raise UserError(
            f"{source}, line {lines[row]}: no value in {_few(empty) or 'a column'}. Predictions require every "
            "input: fill it in, or remove the row."
        )
    return points, notes


def _column(
    name: str,
    cells: Sequence[str],
    task: Task,
    source: str,
    lines: Sequence[int],
    to_number: Callable[[str], float | None],
) -> list[float]:
    """Values of one column: numbers as they are, categories as their index. Raises `UserError` for other values."""
    categories = task.feature_categories.get(name)
    values: list[float] = []
    for cell, line in zip(cells, lines, strict=True):
        value = to_number(cell)
        if categories is not None:
            value = float(categories.index(cell)) if cell in categories else value if value != value else None
        if value is None:
            expected = f"one of {_few(categories)}" if categories is not None else "a number"
            raise UserError(
                f"{source}, line {line}, column {name} must be {expected}; got {cell!r}. Correct it, or remove the row."
            )
        values.append(value)
    return values


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


# ------------------------------------------------------------------------- arrays and images


def _npz_array(path: Path) -> Any:
    import zipfile

    try:
        with np.load(path, allow_pickle=False) as archive:
            names = archive.files
            name = "x" if "x" in names else names[0] if len(names) == 1 else None
            if name is None:
                raise UserError(f"{path} must contain an array x; it has {_few(names) or 'nothing'}. Save it as x=...")
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


def _images(path: Path, task: Task) -> NewPoints:
    if len(task.spec.input_shape) != 3:
        raise UserError(
            f"data={task.spec.name} has inputs of shape {list(task.spec.input_shape)}; got images ({path}). "
            "Give a table (.csv), or an .npz file with the array x."
        )
    files, others = [path], 0
    if path.is_dir():
        all_files = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        files = [p for p in all_files if p.suffix.lower() in IMAGES]
        others = len(all_files) - len(files)
    if not files:
        raise UserError(f"{path} contains no images ({', '.join(IMAGES)}).")
    read = task.read_image or _reader(task)
    pixels = torch.stack([read(file) for file in files])
    labels = tuple(str(f.relative_to(path)) if path.is_dir() else f.name for f in files)
    notes = (f"ignored: {others} files that are not images",) if others else ()
    return NewPoints(_encoded(pixels, task, str(path)), labels, "file", notes)


def _reader(task: Task) -> Callable[[Path], Tensor]:
    """Returns a function that reads an image file as bytes [C, H, W], or raises `UserError` for another size."""
    from PIL import Image, UnidentifiedImageError

    channels, height, width = task.spec.input_shape

    def read(file: Path) -> Tensor:
        try:
            with Image.open(file) as image:
                converted = image.convert("L" if channels == 1 else "RGB")
        except FileNotFoundError:
            raise UserError(f"{file} does not exist. Give an image or a folder of images.") from None
        except (OSError, UnidentifiedImageError) as error:
            raise UserError(f"Could not read {file} as an image ({error}). Remove it from the folder.") from error
        if converted.size != (width, height):
            raise UserError(
                f"{file} must be {width} x {height} pixels for data={task.spec.name}; got {converted.size[0]} x "
                f"{converted.size[1]}. Resize it."
            )
        pixels = torch.from_numpy(np.array(converted))
        return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1)

    return read
