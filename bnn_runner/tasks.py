"""Contracts of data: what a task is, its splits, and what a data set gives. `base` has those of models and posteriors.

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
    """What a data set is, known without reading it: enough to check a model or a method against it.

    `input_shape` is without the batch axis ((1, 28, 28) for an image, (6,) for a table row).
    `vocabulary` above 0 says that inputs are token ids [T] (int64, from 0 to vocabulary - 1, padded
    at the end with 0); only models that say `takes_tokens = True` take them.
    """

    name: str
    kind: Kind
    input_shape: tuple[int, ...]
    num_outputs: int
    val_fraction: float
    vocabulary: int = 0


@runtime_checkable
class LazyInputs(Protocol):
    """Inputs [N, ...] that are read or made batch by batch and are never all in memory."""

    @property
    def device(self) -> torch.device:
        """Where batches come to lie."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """The points at `indices` [B], in that order, [B, ...]: the same whatever else is in the batch."""
        ...

    def ahead(self, indices: Tensor) -> None:
        """A hint that these points are read next."""
        ...

    def at(self, indices: Tensor) -> LazyInputs:
        """The points at `indices` [M] as inputs of their own; nothing is read."""
        ...

    def joined(self, others: Sequence[LazyInputs]) -> LazyInputs:
        """These points and then those of `others`, which are of the same kind."""
        ...

    def to(self, device: torch.device) -> LazyInputs: ...


@dataclass(frozen=True)
class Split:
    """Some points of a data set, in memory (on whichever device) or read as they are asked for, in a fixed order.

    `inputs` [N, ...] are kept as stored (uint8 for images); `prepare` makes network inputs of a
    gathered batch, on its device. `targets` are [N] int64 class labels or [N, K] standardised
    floats; a split without labels (out of distribution) has none. `ids` [N] name each point by its
    place in the published data set.
    """

    inputs: Tensor | LazyInputs
    targets: Tensor | None
    ids: Tensor
    prepare: Callable[[Tensor], Tensor] = lambda x: x

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
        """A hint that the points at `indices` (any shape) are gathered next, for inputs that are read from files."""
        if not isinstance(self.inputs, Tensor) and indices.numel():
            self.inputs.ahead(indices.reshape(-1))

    def subset(self, indices: Tensor) -> Split:
        """The points at `indices` [M], in that order."""
        indices = indices.to(self.inputs.device)
        targets = None if self.targets is None else self.targets[indices]
        inputs = self.inputs[indices] if isinstance(self.inputs, Tensor) else self.inputs.at(indices)
        return replace(self, inputs=inputs, targets=targets, ids=self.ids[indices.to(self.ids.device)])

    def to(self, device: torch.device, dtype: torch.dtype) -> Split:
        """On `device`, floating-point numbers as `dtype`, also those that `prepare` makes; integers stay integers."""
        inputs = self.inputs.to(device)
        if isinstance(inputs, Tensor) and inputs.is_floating_point():
            inputs = inputs.to(dtype)
        targets = self.targets
        if targets is not None:
            targets = targets.to(device, dtype if targets.is_floating_point() else None)
        raw = self.prepare

        def prepare(x: Tensor) -> Tensor:
            made = raw(x)
            return made.to(dtype) if made.is_floating_point() else made

        return replace(self, inputs=inputs, targets=targets, prepare=prepare)


@dataclass(frozen=True)
class Task:
    """What a data set gives to a run.

    Regression targets are standardised on the training part: y_original = target_mean +
    target_scale * y, both [K] (zeros and ones for classes). `truth` maps original-unit inputs
    [M, D] to noise-free outputs [M, K] where the data are made, `true_noise` to the noise's standard
    deviation [M, K]. `fingerprint` is a hash of the content that a training depends on.
    `unavailable` says why an out-of-distribution set is absent. `shifted` are the test points under a
    growing shift, with their targets: "<name>/<level>", and "clean/0" without any.

    What predictions for new points need: `encode` makes inputs as the splits store them of original
    ones [M, ...] (a table's float64 columns in original units, an image set's uint8 pixels [M, C, H, W]).
    `feature_names` name the columns that a table of new points must have, in the order that `encode`
    takes; `feature_categories` lists the texts of a column of texts, where `encode` takes each text's
    place in that list; NaN stands for a missing cell. `read_image` reads an image file as an original
    input where the set does more than take its pixels (resizing). `target_names` [K] name regression targets.
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

    def new_points(self, original: Tensor) -> Split:
        """Points without targets from original inputs [M, ...], prepared as those of this task are.

        Raises what `encode` raises (`UserError` for a cell that it cannot take).
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
        """What is known before any file is opened. Raises `UserError` for values that cannot be."""
        ...

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read or make the data. Same arguments, same task. Reading never writes beside the data."""
        ...
