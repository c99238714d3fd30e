"""Your own arrays in an .npz file: vectors or images, with numbers or classes to predict."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bnn_runner.data.holdout_fraction import fraction_problems, halves_of
from bnn_runner.data.splits import Parts, Sizes, divide, fingerprint
from bnn_runner.data.tables import Scaling, standardise, table_task
from bnn_runner.data.user_splits import (
    NEED_PATH,
    check_classes,
    class_problems,
    map_note,
    numbered,
    seeded_parts,
    with_content,
)
from bnn_runner.errors import UserError, raise_all
from bnn_runner.tasks import Kind, Split, Task, TaskSpec

WHOLE, HALVES, OOD = ("x", "y"), ("x_train", "y_train", "x_test", "y_test"), "x_ood_"
CHANNELS = (1, 2, 3, 4)


@dataclass(frozen=True)
class _Read:
    """Inputs [N, D] (float64) or images [N, C, H, W] (uint8 or float32), training points first.

    The last `num_test` points are the file's own test set (0: the seed draws one). Targets are
    [N, K] or, for classes, labels [N].
    """

    kind: Kind
    inputs: Tensor
    targets: Tensor
    num_test: int
    ood: Mapping[str, Tensor]
    class_names: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OwnArrays:
    """Arrays x and y (split by the seed), or x_train, y_train, x_test, y_test; each x_ood_NAME is a set "NAME".

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
        total = len(read.inputs)
        known = (total - read.num_test, read.num_test) if read.num_test else (0, 0)
        if not read.num_test and not problems:
            known = halves_of(total, self.test_fraction)
        raise_all(problems + self._sizes.problems(*known))
        outputs = len(read.class_names) or read.targets.shape[1]
        return TaskSpec("arrays", read.kind, tuple(read.inputs.shape[1:]), outputs, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the file; `data_dir` is not used. Raises `UserError` as `spec` does, and for a single training class."""
        read = self._read()
        spec, path = self._spec(read), self.path
        assert path is not None
        labels = read.targets if read.kind == "classification" else None
        total = len(read.inputs)
        if read.num_test:
            rows, cut = torch.arange(total), total - read.num_test
            held = (None, None) if labels is None else (labels[:cut], labels[cut:])
            parts = divide(rows[:cut], rows[cut:], self._sizes, seed, *held)
        else:
            parts = seeded_parts(total, labels, self.test_fraction, self._sizes, seed)
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
    arrays = _arrays(path)
    whole, halves = (all(name in arrays for name in names) for names in (WHOLE, HALVES))
    if whole == halves:
        raise UserError(
            f"{path} must contain either {' and '.join(WHOLE)} (split by the seed) or {', '.join(HALVES)}; got "
            f"{', '.join(arrays) or 'nothing'}. Write them with numpy.savez(file, x=..., y=...)."
        )
    names = (WHOLE,) if whole else (HALVES[:2], HALVES[2:])
    inputs, targets, notes = [], [], list[str]()
    for x_name, y_name in names:
        inputs.append(_inputs(arrays[x_name], f"{path}, {x_name}"))
        targets.append(_targets(arrays[y_name], f"{path}, {y_name}"))
        if len(inputs[-1]) != len(targets[-1]):
            raise UserError(
                f"{path}: {x_name} and {y_name} must have equally many points; got {len(inputs[-1])} and "
                f"{len(targets[-1])}."
            )
    shape, kind = inputs[0].shape[1:], inputs[0].dtype
    ood = {n.removeprefix(OOD): _inputs(a, f"{path}, {n}") for n, a in arrays.items() if n.startswith(OOD)}
    for name, other in [*zip(("x_train", "x_test"), inputs, strict=False), *ood.items()]:
        if other.shape[1:] != shape or other.dtype != kind:
            raise UserError(
                f"{path}: points of {name} must be {list(shape)} of {kind}, as the training points; got "
                f"{list(other.shape[1:])} of {other.dtype}."
            )
    known = {*WHOLE, *HALVES} if not whole else set(WHOLE)
    unused = [name for name in arrays if name not in known and not name.startswith(OOD)]
    notes += [f"not used: {', '.join(unused)}"] if unused else []
    if targets[0].shape[1:] != targets[-1].shape[1:] or (targets[0].dtype.kind in "US") != (
        targets[-1].dtype.kind in "US"
    ):
        raise UserError(f"{path}: y_train and y_test must have the same type and number of columns.")
    y, x = np.concatenate(targets), torch.cat(inputs)
    num_test = len(inputs[1]) if halves else 0
    return _with_targets(path, task, x, y, num_test, ood, notes)


def _with_targets(
    path: Path, task: str, inputs: Tensor, y: Any, num_test: int, ood: dict[str, Tensor], notes: list[str]
) -> _Read:
    one = y.ndim == 1 or y.shape[1] == 1
    labels = y.dtype.kind in "USbiu" and one
    kind: Kind = "classification" if task == "classification" or (task == "auto" and labels) else "regression"
    if task == "auto":
        this, other = ("classes", "regression"), ("numbers", "classification")
        if kind == "regression":
            this, other = other, this
        notes.append(f"y ({y.dtype}) is read as {this[0]}; data.task={this[1]} reads it as {other[0]}")
    if kind == "classification":
        if not one:
            raise UserError(f"{path}: for classes, y must have one label per point, [N]; got {list(y.shape)}.")
        raw = [str(v) for v in y.reshape(-1)] if y.dtype.kind in "US" else y.reshape(-1).astype(np.float64).tolist()
        found, names = numbered(raw)
        raise_all(class_problems(names, f"{path}, y", len(raw)))
        return _Read(kind, inputs, found, num_test, ood, names, (*notes, *map_note(names)))
    if y.dtype.kind in "US":
        raise UserError(f"{path}: for regression, y must be numbers; got text. Use data.task=classification.")
    values = torch.from_numpy(y.astype(np.float64)).reshape(len(y), -1)
    return _Read(kind, inputs, values, num_test, ood, (), tuple(notes))


def _arrays(path: Path) -> dict[str, Any]:
    """Every array by name. Nothing is unpickled: arrays of Python objects are rejected."""
    try:
        file = np.load(path, allow_pickle=False)
        if isinstance(file, np.ndarray):
            raise UserError(f"{path} must contain named arrays; got one. Use numpy.savez(file, x=..., y=...).")
        with file:
            return {name: file[name] for name in file.files}
    except ValueError as error:
        raise UserError(
            f"{path} must be an .npz file of numbers (or of text, dtype U, for labels), without Python objects, which "
            f"could run code when read ({error}). Write it with numpy.savez."
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


def _inputs(values: Any, where: str) -> Tensor:
    """[N, D] float64, or images [N, C, H, W] of uint8 or float32."""
    values = _checked(values, where, "biuf", "an array of numbers")
    if values.ndim <= 2:
        return torch.from_numpy(values.astype(np.float64)).reshape(len(values), -1)
    if values.ndim == 3:
        values = values[:, None]
    elif values.ndim == 4:
        first, last = values.shape[1] in CHANNELS, values.shape[3] in CHANNELS
        if first == last:
            raise UserError(
                f"{where} must be images [N, C, H, W] or [N, H, W, C] with {CHANNELS[0]} to {CHANNELS[-1]} channels "
                f"and larger sides; got shape {list(values.shape)}, in which the channels are ambiguous."
            )
        values = values if first else np.moveaxis(values, 3, 1)
    else:
        raise UserError(
            f"{where} must be vectors [N, D] or images [N, C, H, W], [N, H, W, C] or [N, H, W]; got shape "
            f"{list(values.shape)}."
        )
    dtype = np.uint8 if values.dtype == np.uint8 else np.float32
    return torch.from_numpy(np.ascontiguousarray(values.astype(dtype)))


def _targets(values: Any, where: str) -> Any:
    values = _checked(values, where, "biufUS", "numbers, or text for labels")
    if values.ndim > 2:
        raise UserError(f"{where} must be [N] or [N, K]; got shape {list(values.shape)}.")
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
