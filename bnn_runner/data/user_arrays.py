"""Your own arrays in an .npz file: vectors or images, with numbers or classes to predict."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bnn_runner.data.array_names import OOD, line, named
from bnn_runner.data.holdout_fraction import fraction_problems, halves_of
from bnn_runner.data.splits import Parts, Sizes, fingerprint
from bnn_runner.data.tables import Scaling, standardise, table_task
from bnn_runner.data.user_splits import (
    NEED_PATH,
    check_classes,
    class_problems,
    given_parts,
    looks_like_classes,
    map_note,
    numbered,
    with_content,
)
from bnn_runner.errors import UserError, raise_all
from bnn_runner.tasks import Kind, Split, Task, TaskSpec

CHANNELS = (1, 2, 3, 4)


@dataclass(frozen=True)
class _Read:
    """Inputs [N, D] (float64) or images [N, C, H, W] (uint8 or float32), training points first.

    The last `num_test` points are the file's own test set, and the `num_val` points before them its validation set
    (None: the seed draws it). Targets are [N, K] or, for classes, labels [N].
    """

    kind: Kind
    inputs: Tensor
    targets: Tensor
    num_val: int | None
    num_test: int | None
    ood: Mapping[str, Tensor]
    class_names: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OwnArrays:
    """Arrays x and y (split by the seed), or x_train, y_train, x_test, y_test; each x_ood_NAME is a set "NAME".

    With x_val and y_val they are the validation part. Other common names (X, labels, train_images) are understood.

    x is [N, D], [N] (one feature), or images [N, C, H, W], [N, H, W, C], [N, H, W]. Images of uint8
    stay bytes; all inputs are standardised on the training part, images by channel. y is [N] or [N, K].
    """

    path: Path | None
    task: Literal["auto", "regression", "classification"]
    test_fraction: float
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What the file contains (it is read for that). Raises `UserError` for invalid values or arrays."""
        return self._spec(self._read())

    def _spec(self, read: _Read) -> TaskSpec:
        problems = fraction_problems(self.test_fraction)
        num_train = len(read.inputs) - (read.num_val or 0) - (read.num_test or 0)
        known = (num_train, read.num_test or 0)
        if read.num_test is None:
            known = (0, 0) if problems else halves_of(num_train, self.test_fraction)
        sizes = self._sizes if read.num_val is None else replace(self._sizes, val_fraction=0.0)
        raise_all(problems + sizes.problems(*known))
        outputs = len(read.class_names) or read.targets.shape[1]
        val = self.val_fraction if read.num_val is None else read.num_val / (num_train + read.num_val)
        return TaskSpec("arrays", read.kind, tuple(read.inputs.shape[1:]), outputs, val)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the file; `data_dir` is not used. Raises `UserError` as `spec` does, and for a single training class."""
        read = self._read()
        spec, path = self._spec(read), self.path
        assert path is not None
        labels = read.targets if read.kind == "classification" else None
        parts = given_parts(
            len(read.inputs), labels, read.num_val, read.num_test, self.test_fraction, self._sizes, seed
        )
        notes = read.notes if labels is None else read.notes + check_classes(labels, parts, read.class_names)
        if read.inputs.ndim == 2:
            task = table_task(
                spec, read.inputs, read.targets, parts, ood=read.ood, class_names=read.class_names, notes=notes
            )
        else:
            task = _image_task(spec, read, parts, notes)
        return with_content(task, path)

    def _read(self) -> _Read:
        if self.path is None:
            raise UserError(NEED_PATH.format(choice="arrays", example="mine.npz"))
        try:
            stat = self.path.stat()
        except OSError as error:
            raise UserError(f"Could not read data.path={self.path}: {error.strerror}. Give an .npz file.") from None
        return _parsed(self.path, stat.st_mtime_ns, stat.st_size, self.task)


@dataclass(frozen=True)
class ChannelScaling:
    """Images [B, C, H, W] of any numbers to (x - mean) / scale, both [C, 1, 1], float32."""

    mean: Tensor
    scale: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        return (images.float() - self.mean.to(images.device)) / self.scale.to(images.device)


def _image_task(spec: TaskSpec, read: _Read, parts: Parts, notes: tuple[str, ...]) -> Task:
    """Images as stored, standardised by channel when they are gathered."""
    pixels = read.inputs[parts.train].double().transpose(0, 1).flatten(1).T
    of_pixels = standardise(pixels)
    if len(of_pixels.constant) == pixels.shape[1]:
        raise UserError("The pixels of the training images must vary; got the same value everywhere.")
    scaling = ChannelScaling(*(t.float()[:, None, None] for t in (of_pixels.mean, of_pixels.scale)))
    of_targets = Scaling(torch.zeros(spec.num_outputs), torch.ones(spec.num_outputs))
    targets = read.targets
    if spec.kind == "regression":
        of_targets = standardise(targets[parts.train])
        if of_targets.constant:
            raise UserError("y must vary over the training points; got the same value everywhere.")
        targets = of_targets.apply(targets)

    def part(rows: Tensor) -> Split:
        return Split(read.inputs[rows], targets[rows], rows, scaling)

    train, val = part(parts.train), part(parts.val)
    mean, scale = of_targets.mean.float(), of_targets.scale.float()
    return Task(
        spec=spec,
        train=train,
        val=val,
        test=part(parts.test),
        ood={name: Split(x, None, torch.arange(len(x)), scaling) for name, x in read.ood.items()},
        fingerprint=fingerprint(train, val.ids, scaling.mean, scaling.scale, mean, scale),
        target_mean=mean,
        target_scale=scale,
        class_names=read.class_names,
        notes=notes,
    )


# ------------------------------------------------------------------------------------- reading


@lru_cache(maxsize=1)
def _parsed(path: Path, modified: int, size: int, task: str) -> _Read:
    """The parsed file; cached, since both `spec` and `load` need it."""
    arrays, notes = named(path, _arrays(path))
    parts = ("",) if "x" in arrays else tuple(f"_{p}" for p in ("train", "val", "test") if f"x_{p}" in arrays)
    inputs, targets, lengths = list[Tensor](), list[Any](), dict[str, int]()
    for part in parts:
        x_name, y_name = f"x{part}", f"y{part}"
        values, layout = _inputs(arrays[x_name], f"{path}, {x_name}")
        inputs.append(values)
        targets.append(_targets(arrays[y_name], f"{path}, {y_name}"))
        lengths[part] = len(values)
        if len(values) != len(targets[-1]):
            raise UserError(
                f"{path}: {x_name} and {y_name} must have equally many points; got {len(values)} and "
                f"{len(targets[-1])}."
            )
        if part in ("", "_train"):
            notes.append(f"{x_name} ({list(arrays[x_name].shape)}, {arrays[x_name].dtype}) is read as {layout}")
    shape, kind = inputs[0].shape[1:], inputs[0].dtype
    ood = {n.removeprefix(OOD): _inputs(a, f"{path}, {n}")[0] for n, a in arrays.items() if n.startswith(OOD)}
    for name, other in [*((f"x{part}", x) for part, x in zip(parts, inputs, strict=True)), *ood.items()]:
        if other.shape[1:] != shape or other.dtype != kind:
            raise UserError(
                f"{path}: points of {name} must be {list(shape)} of {kind}, as the training points; got "
                f"{list(other.shape[1:])} of {other.dtype}."
            )
    if any(
        y.shape[1:] != targets[0].shape[1:] or (y.dtype.kind in "US") != (targets[0].dtype.kind in "US")
        for y in targets
    ):
        raise UserError(f"{path}: the targets of all parts must have the same type and number of columns.")
    counts = (lengths.get("_val"), lengths.get("_test"))
    if parts != ("",):
        drawn = [name for name, count in zip(("validation", "test"), counts, strict=True) if count is None]
        notes.append(
            f"parts: {', '.join(p[1:] for p in parts)}"
            + (f"; the seed draws the {' and the '.join(drawn)} part from train" if drawn else "")
        )
    return _with_targets(path, task, torch.cat(inputs), np.concatenate(targets), counts, ood, notes, list(arrays))


def _with_targets(
    path: Path,
    task: str,
    inputs: Tensor,
    y: Any,
    counts: tuple[int | None, int | None],
    ood: dict[str, Tensor],
    notes: list[str],
    names: list[str],
) -> _Read:
    one = y.ndim == 1 or y.shape[1] == 1
    numbers = y.reshape(len(y), -1)
    one_hot = not one and _is_one_hot(y)
    values = numbers[:, 0].tolist() if one and y.dtype.kind == "f" else []
    few = len(set(values)) > 1 and looks_like_classes(values)
    labels = (y.dtype.kind in "USbiu" and one) or few or one_hot
    kind: Kind = "classification" if task == "classification" or (task == "auto" and labels) else "regression"
    if task == "auto":
        if kind == "classification":
            this, other = (
                f"{y.shape[1]} classes, one-hot" if one_hot else "classes",
                "data.task=regression reads it as numbers",
            )
        else:
            this, other = "numbers", "data.task=classification reads it as classes"
        notes.append(f"y ({y.dtype}) is read as {this}; {other}")
    if kind == "classification":
        if one_hot:
            y, one = y.argmax(1), True
        if not one:
            part = "y" if "y" in names else "y_train"
            corrected = {name: f"a[{name!r}].argmax(1)" for name in names if name.startswith("y")}
            raise UserError(
                f"{path}: for classes, y must have one label per point, [N], or be one-hot, [N, K]; got "
                f"{list(y.shape)}. If the largest entry of a row is its class ({part}.argmax(1)): "
                f"{line(path, names, **corrected)}"
            )
        raw = [str(v) for v in y.reshape(-1)] if y.dtype.kind in "US" else y.reshape(-1).astype(np.float64).tolist()
        found, class_names = numbered(raw)
        raise_all(class_problems(class_names, f"{path}, y", len(raw)))
        notes.append(f"first point: class {class_names[int(found[0])]}")
        return _Read(kind, inputs, found, *counts, ood, class_names, (*notes, *map_note(class_names)))
    if y.dtype.kind in "US":
        raise UserError(f"{path}: for regression, y must be numbers; got text. Use data.task=classification.")
    found = torch.from_numpy(y.astype(np.float64)).reshape(len(y), -1)
    shown = ", ".join(f"{v:.6g}" for v in found[0, :8].tolist())
    return _Read(kind, inputs, found, *counts, ood, (), (*notes, f"first point: y = {shown}"))


def _is_one_hot(y: Any) -> bool:
    """Whether y [N, K] has a single 1 in each row, and zeros else."""
    return y.dtype.kind in "biuf" and bool(np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all())


def _arrays(path: Path) -> dict[str, Any]:
    """Every array by name. Nothing is unpickled: arrays of Python objects are rejected."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise UserError(f"{path} must contain named arrays; got one. Use numpy.savez(file, x=..., y=...).")
        with file:
            return {name: file[name] for name in file.files}
    except ValueError as error:
        hint = ""
        if path.suffix.lower() in (".csv", ".tsv", ".txt", ".parquet", ".xlsx"):
            hint = " For a table, use data=csv."
        raise UserError(
            f"{path} must be an .npz file of numbers (or of text, dtype U, for labels), without Python objects, which "
            f"could run code when read ({error}). Write it with numpy.savez; labels of type object as "
            f"y.astype(str).{hint}"
        ) from None
    except (OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"Could not read {path} as an .npz file: {error}. Write it with numpy.savez.") from None


def _checked(values: Any, where: str, kinds: str, what: str) -> Any:
    if values.dtype.kind not in kinds:
        raise UserError(f"{where} must be {what}; got {values.dtype}.")
    if values.ndim == 0 or len(values) == 0:
        raise UserError(f"{where} must have at least one point; its first axis counts the points.")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        first = tuple(int(i) for i in np.argwhere(~np.isfinite(values))[0])
        raise UserError(
            f"{where} must be finite; got {values[first]} at {list(first)} (counted from 0). Fill it in, or remove the "
            "point."
        )
    return values


def _inputs(values: Any, where: str) -> tuple[Tensor, str]:
    """[N, D] float64, or images [N, C, H, W] of uint8 or float32; and how they are read."""
    values = _checked(values, where, "biuf", "an array of numbers")
    if values.ndim <= 2:
        vectors = torch.from_numpy(values.astype(np.float64)).reshape(len(values), -1)
        shown = ", ".join(f"{v:.6g}" for v in vectors[0, :6].tolist()) + (", ..." if vectors.shape[1] > 6 else "")
        return vectors, f"vectors of {vectors.shape[1]} numbers, the first [{shown}]"
    layout = "[N, H, W]" if values.ndim == 3 else "[N, C, H, W]"
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4:
        first, last = values.shape[1] in CHANNELS, values.shape[3] in CHANNELS
        if first == last:
            raise UserError(
                f"{where} must be images [N, C, H, W] or [N, H, W, C] with {CHANNELS[0]} to {CHANNELS[-1]} channels "
                f"and larger sides; got shape {list(values.shape)}, in which the channels are ambiguous."
            )
        layout = layout if first else "[N, H, W, C]"
        values = values if first else np.moveaxis(values, 3, 1)
    else:
        raise UserError(
            f"{where} must be vectors [N, D] or images [N, C, H, W], [N, H, W, C] or [N, H, W]; got shape "
            f"{list(values.shape)}."
        )
    dtype = np.uint8 if values.dtype == np.uint8 else np.float32
    one = values[0]
    what = f"images {layout} of {one.shape[0]} x {one.shape[1]} x {one.shape[2]} (C, H, W)"
    return torch.from_numpy(
        np.ascontiguousarray(values.astype(dtype))
    ), f"{what}, the first from {one.min():g} to {one.max():g}"


def _targets(values: Any, where: str) -> Any:
    values = _checked(values, where, "biufUS", "numbers, or text for labels")
    if values.ndim > 2:
        raise UserError(f"{where} must be [N] or [N, K]; got shape {list(values.shape)}.")
    if values.dtype.kind != "S":
        return values
    try:
        return np.char.decode(values, "utf-8")
    except UnicodeDecodeError:
        return np.char.decode(values, "latin-1")
