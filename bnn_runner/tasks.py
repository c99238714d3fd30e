"""Contracts of data: a task, its splits, and what a data set provides. `base` has those of models and posteriors.

Letters: N data points in a split, B points in a batch, K network outputs, L lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

Kind = Literal["regression", "classification"]


@dataclass(frozen=True)
class TaskSpec:
    """What is known of a data set without reading it: enough to check a model or a method against it.

    Attributes:
        name: as typed after data=.
        kind: regression or classification.
        input_shape: without the batch axis: (1, 28, 28) for an image, (6,) for a table row.
        num_outputs: classes, or targets of a regression.
        val_fraction: share of the training data that is the validation part.
        vocabulary: above 0, inputs are token ids [T] (int64, from 0 to vocabulary - 1, padded at the end with 0);
            only models with `takes_tokens = True` support them.
    """

    name: str
    kind: Kind
    input_shape: tuple[int, ...]
    num_outputs: int
    val_fraction: float
    vocabulary: int = 0


@runtime_checkable
class LazyInputs(Protocol):
    """Inputs [N, ...] that are read or generated batch by batch and are never all in memory."""

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """The points at `indices` [B], in that order, [B, ...]; a point does not depend on the rest of the batch."""
        ...

    def ahead(self, indices: Tensor) -> None:
        """A hint that these points will be read next."""
        ...

    def at(self, indices: Tensor) -> LazyInputs:
        """The points at `indices` [M] as separate inputs; nothing is read."""
        ...

    def joined(self, others: Sequence[LazyInputs]) -> LazyInputs:
        """These points followed by those of `others`, which are of the same type."""
        ...

    def to(self, device: torch.device) -> LazyInputs: ...


@dataclass(frozen=True)
class AsStored:
    """Inputs that need no preparation."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class CastTo:
    """Another preparation, whose floating-point numbers then become `dtype`."""

    raw: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    def __call__(self, x: Tensor) -> Tensor:
        prepared = self.raw(x)
        return prepared.to(self.dtype) if prepared.is_floating_point() else prepared


@dataclass(frozen=True)
class TableReading:
    """What a table of new points shares with the training table.

    Attributes:
        ids: columns that name the rows; a table of predictions has them too.
        decimal: the decimal mark, where a new table does not decide.
        thousands: marks between thousands.
        missing_codes: what stands for a missing value; None for the known ones.
    """

    ids: tuple[str, ...] = ()
    decimal: str = "."
    thousands: str = ""
    missing_codes: tuple[str | float, ...] | None = None


@dataclass(frozen=True)
class Split:
    """Some points of a data set in a fixed order, in memory (on any device) or read when needed.

    Attributes:
        inputs: [N, ...], as stored (uint8 for images).
        targets: [N] int64 class labels or [N, K] standardised floats; None for a split without labels.
        ids: each point's place in the published data set, [N].
        prepare: from a gathered batch of inputs to network inputs, on its device.
    """

    inputs: Tensor | LazyInputs
    targets: Tensor | None
    ids: Tensor
    prepare: Callable[[Tensor], Tensor] = AsStored()

    def __len__(self) -> int:
        return len(self.ids)

    def gather(self, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        """Inputs [..., *input_shape] and targets of `indices` (any shape: [B] or [L, B])."""
        flat = indices.reshape(-1).to(self.inputs.device)
        stored = self.inputs
        # index_select: on a CPU many times faster than [flat] for bytes
        x = self.prepare(stored.index_select(0, flat) if isinstance(stored, Tensor) else stored.read(flat))
        x = x.reshape(*indices.shape, *x.shape[1:])
        if self.targets is None:
            return x, None
        y = self.targets.index_select(0, flat)
        return x, y.reshape(*indices.shape, *y.shape[1:])

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches in order; every point once, none dropped."""
        for start in range(0, len(self), batch_size):
            middle = min(start + batch_size, len(self))
            self.ahead(torch.arange(middle, min(middle + batch_size, len(self))))
            yield self.gather(torch.arange(start, middle, device=self.inputs.device))

    def ahead(self, indices: Tensor) -> None:
        """A hint that the points at `indices` (any shape) will be gathered next; only inputs in files use it."""
        if not isinstance(self.inputs, Tensor) and indices.numel():
            self.inputs.ahead(indices.reshape(-1))

    def subset(self, indices: Tensor) -> Split:
        """The points at `indices` [M], in that order."""
        indices = indices.to(self.inputs.device)
        targets = None if self.targets is None else self.targets[indices]
        inputs = self.inputs[indices] if isinstance(self.inputs, Tensor) else self.inputs.at(indices)
        return replace(self, inputs=inputs, targets=targets, ids=self.ids[indices.to(self.ids.device)])

    def to(self, device: torch.device, dtype: torch.dtype) -> Split:
        """On `device`, floating-point numbers as `dtype`, also those of `prepare`; integers stay integers."""
        inputs = self.inputs.to(device)
        if isinstance(inputs, Tensor) and inputs.is_floating_point():
            inputs = inputs.to(dtype)
        targets = self.targets
        if targets is not None:
            targets = targets.to(device, dtype if targets.is_floating_point() else None)
        return replace(self, inputs=inputs, targets=targets, prepare=CastTo(self.prepare, dtype))


@dataclass(frozen=True)
class Task:
    """What a data set provides for a run.

    Regression targets are standardised on the training part: y_original = target_mean + target_scale * y.

    Attributes:
        spec: what is known without reading the data.
        train: training part.
        val: validation part; may be empty.
        test: test part.
        ood: out-of-distribution sets, by name.
        fingerprint: a hash of the content that a training depends on.
        target_mean: [K]; zeros for classes.
        target_scale: [K]; ones for classes.
        input_mean: by which table inputs were standardised.
        input_scale: by which table inputs were standardised.
        truth: of synthetic data: from inputs [M, D] in original units to noise-free outputs [M, K].
        true_noise: of synthetic data: from such inputs to the noise's standard deviation [M, K].
        unavailable: names of out-of-distribution sets that are missing, with the reason.
        shifted: the test points under a growing shift, with targets: "<name>/<level>", and "clean/0" without shift.
        class_names: of the K classes.
        notes: what a reader should know.
        feature_names: columns that a table of new points must have, in the order that `encode` takes.
        feature_categories: the texts of a text column; `encode` takes each text's place in that list, NaN for a
            missing cell.
        target_names: of the K regression targets.
        encode: from original inputs [M, ...] of new points (a table's float64 columns in original units, uint8 pixels
            [M, C, H, W]) to inputs as the splits store them.
        read_image: reads an image file as an original input, where that is more than taking its pixels (resizing).
        reading: how tables of new points are read, if the data are a table of the user's.
        content: a hash of the user's files, the same for every seed; "" for published and generated data.
    """

    spec: TaskSpec
    train: Split
    val: Split
    test: Split
    ood: Mapping[str, Split]
    fingerprint: str
    target_mean: Tensor
    target_scale: Tensor
    input_mean: Tensor | None = None
    input_scale: Tensor | None = None
    truth: Callable[[Tensor], Tensor] | None = None
    true_noise: Callable[[Tensor], Tensor] | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    shifted: Mapping[str, Split] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()
    feature_categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    target_names: tuple[str, ...] = ()
    encode: Callable[[Tensor], Tensor] | None = None
    read_image: Callable[[Path], Tensor] | None = None
    reading: TableReading | None = None
    content: str = ""

    def without_points(self) -> Task:
        """The task without its points: all that predictions for new points need, if the posterior is saved."""
        stored = self.test.inputs
        shape = (0, *(stored.shape[1:] if isinstance(stored, Tensor) else self.spec.input_shape))
        dtype = stored.dtype if isinstance(stored, Tensor) else torch.uint8
        empty = Split(torch.empty(shape, dtype=dtype), None, torch.arange(0), self.test.prepare)
        return replace(
            self, train=empty, val=empty, test=empty, ood={}, shifted={}, truth=None, true_noise=None, unavailable={}
        )

    def new_points(self, original: Tensor) -> Split:
        """Points without targets from original inputs [M, ...], prepared like those of this task.

        Raises:
            UserError: `encode` does not support a cell.
        """
        stored = original if self.encode is None else self.encode(original)
        like = self.target_mean
        inputs = stored.to(like.device, like.dtype if stored.is_floating_point() else None)
        return Split(inputs, None, torch.arange(len(inputs)), self.test.prepare)

    def splits(self) -> dict[str, Split]:
        """Every split by name: train, val, test, ood/<name>."""
        named = {"train": self.train, "val": self.val, "test": self.test}
        return named | {f"ood/{name}": split for name, split in self.ood.items()}

    def to(self, device: torch.device, dtype: torch.dtype) -> Task:
        """The same task with its tensors on `device` in `dtype`."""
        return replace(
            self,
            train=self.train.to(device, dtype),
            val=self.val.to(device, dtype),
            test=self.test.to(device, dtype),
            ood={name: split.to(device, dtype) for name, split in self.ood.items()},
            shifted={name: split.to(device, dtype) for name, split in self.shifted.items()},
            target_mean=self.target_mean.to(device, dtype),
            target_scale=self.target_scale.to(device, dtype),
        )


@runtime_checkable
class DataSet(Protocol):
    """A frozen dataclass whose fields are its YAML's keys (without `recommended`)."""

    val_fraction: float

    def spec(self) -> TaskSpec:
        """What is known before any file is opened. Raises `UserError` for invalid values."""
        ...

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read or generate the data: the same arguments give the same task. Nothing is written into `data_dir`."""
        ...
