"""The contract of a data set: specification and content agree, splits are disjoint, and the seed alone decides."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.tasks import DataSet, Split, Task
from bnn_runner.testing.expect import require, require_equal, require_unchanged, snapshot


def check_data(data: DataSet, data_dir: Path | str = "/nonexistent", seeded: bool = True) -> Task:
    """The whole contract of a data set; returns the task of seed 0.

    - `spec()` is known without files and is that of the loaded task: shapes, types, number of outputs.
    - No point is in two of train, val and test; `train_size` and `test_size`, where set, are exact.
    - Points are the same however they are gathered; targets of a regression are standardised on the training part.
    - The same seed gives the same task and fingerprint, another seed another training part.
    - Loading changes no global state.

    Args:
        data: an instance; set its sizes small.
        data_dir: where its files lie; not read by generated data.
        seeded: whether another seed gives other training points (not so for a fixed split without validation part).

    Raises:
        AssertionError: saying which line of the contract does not hold.
    """
    name = type(data).__name__
    require(dataclasses.is_dataclass(data), f"{name} must be a frozen dataclass whose fields are its YAML's keys.")
    require(isinstance(data, DataSet), f"{name} must have val_fraction, spec() and load(data_dir, seed).")
    before = snapshot()
    task = data.load(Path(data_dir), 0)
    require_unchanged(before, snapshot(), f"{name}.load")
    check_spec(data, task)
    check_splits(data, task)
    check_gather(task)
    check_standardisation(task)
    check_seeds(data, task, Path(data_dir), seeded)
    return task


def stored(split: Split) -> Tensor:
    """Inputs as they are kept, read if they stay in files."""
    return split.inputs if isinstance(split.inputs, Tensor) else split.inputs.read(torch.arange(len(split)))


def check_spec(data: DataSet, task: Task) -> None:
    """What `spec()` states is what every split holds."""
    spec = data.spec()
    require(task.spec == spec, f"The task must have the specification spec() states; got {task.spec} for {spec}.")
    require(
        spec.val_fraction == data.val_fraction,
        f"spec().val_fraction must be the field val_fraction={data.val_fraction}; got {spec.val_fraction}.",
    )
    for name, split in task.splits().items():
        sizes = len(split), len(split.inputs), len(split.ids)
        require(len(set(sizes)) == 1, f"{name}: as many inputs and ids as points are needed; got {sizes}.")
        require(split.ids.dtype == torch.int64, f"{name}: ids must be int64; got {split.ids.dtype}.")
        x, y = split.gather(torch.arange(len(split)))
        shape, dtype = (len(split), *spec.input_shape), torch.int64 if spec.vocabulary else torch.float32
        require(x.shape == shape, f"{name}: inputs must be [N, *input_shape] = {list(shape)}; got {list(x.shape)}.")
        require(x.dtype == dtype, f"{name}: inputs must be {dtype}; got {x.dtype}.")
        require(bool(torch.isfinite(x).all()), f"{name}: inputs must be finite.")
        if spec.vocabulary:
            inside = bool(x.min() >= 0 and x.max() < spec.vocabulary)
            require(inside, f"{name}: token ids must lie between 0 and {spec.vocabulary - 1}.")
        elif len(spec.input_shape) == 3:
            kept = stored(split).dtype
            require(kept == torch.uint8, f"{name}: images must be kept as uint8 and scaled in `prepare`; got {kept}.")
        if name.startswith("ood/"):
            require(y is None and len(split) > 0, f"{name}: an out-of-distribution set has points and no targets.")
            continue
        assert y is not None, f"{name} must have targets"
        if spec.kind == "classification":
            require(y.dtype == torch.int64 and y.shape == (len(split),), f"{name}: labels must be int64 [N].")
            inside = len(y) == 0 or bool(y.min() >= 0 and y.max() < spec.num_outputs)
            require(inside, f"{name}: labels must lie between 0 and {spec.num_outputs - 1}.")
        else:
            fits = y.dtype == torch.float32 and y.shape == (len(split), spec.num_outputs)
            require(fits, f"{name}: targets must be float32 [N, {spec.num_outputs}]; got {y.dtype} {list(y.shape)}.")
            require(bool(torch.isfinite(y).all()), f"{name}: targets must be finite.")


def check_splits(data: DataSet, task: Task) -> None:
    """Stated sizes are exact, and no point is in two parts."""
    for key, split in (("train_size", task.train), ("test_size", task.test)):
        wanted = getattr(data, key, None)
        require(wanted in (None, len(split)), f"data.{key}={wanted} must be exact; got {len(split)} points.")
    fraction, train = task.spec.val_fraction, getattr(data, "train_size", None)
    if train is not None:
        wanted = round(train * fraction / (1 - fraction))
        require(
            len(task.val) == wanted,
            f"The validation part must keep its share at train_size={train}: {wanted} points; got {len(task.val)}.",
        )
    ids = torch.cat([task.train.ids, task.val.ids, task.test.ids])
    require(len(ids.unique()) == len(ids), "No point may be in two of train, val and test: ids must be unique.")
    for name, split in task.ood.items():
        require(len(split.ids.unique()) == len(split), f"ood/{name}: ids must be unique.")


def check_gather(task: Task) -> None:
    """A point is the same alone, in a batch, and for lanes of indices [L, B]."""
    message = "A point must be the same in every batch: `prepare` must treat points one by one."
    for split in task.splits().values():
        count = min(len(split), 6)
        if count < 4:
            continue
        lanes = torch.stack([torch.arange(count), torch.arange(count).flip(0)])
        x, y = split.gather(lanes)
        for lane in range(2):
            alone_x, alone_y = split.gather(lanes[lane])
            require_equal(x[lane], alone_x, message, tolerance=0)
            if y is not None and alone_y is not None:
                require_equal(y[lane], alone_y, message, tolerance=0)
        one, _ = split.gather(lanes[1, :1])
        require_equal(one, x[1, :1], message, tolerance=0)


def check_standardisation(task: Task) -> None:
    """Targets have mean 0 and standard deviation 1 on the training part, or are left alone with mean 0 and scale 1."""
    mean, scale = task.target_mean, task.target_scale
    shape = (task.spec.num_outputs,)
    require(mean.shape == scale.shape == shape, f"target_mean and target_scale must be [K] = {list(shape)}.")
    require(bool((scale > 0).all()), f"target_scale must be positive; got {scale.tolist()}.")
    untouched = bool((mean == 0).all() and (scale == 1).all())
    if task.spec.kind == "classification":
        require(untouched, "Classes must have target_mean 0 and target_scale 1.")
        known = len(task.class_names)
        require(known in (0, task.spec.num_outputs), f"class_names must name every class or none; got {known}.")
    elif not untouched:
        y = task.train.targets
        assert y is not None
        y = y.double()
        message = "Regression targets must be standardised on the training part, to mean 0 and standard deviation 1."
        require_equal(y.mean(0), torch.zeros_like(y[0]), message, tolerance=1e-3)
        spread = (y - y.mean(0)).square().mean(0).sqrt()
        constant = spread == 0  # nothing to scale
        require_equal(torch.where(constant, 1.0, spread), torch.ones_like(spread), message, tolerance=5e-2)


def check_seeds(data: DataSet, task: Task, data_dir: Path, seeded: bool) -> None:
    """The seed, and nothing else, decides on the split; the fingerprint follows the training part."""
    name = type(data).__name__
    state = torch.get_rng_state()
    torch.manual_seed(123)
    same, other = data.load(data_dir, 0), data.load(data_dir, 1)
    torch.set_rng_state(state)
    require(
        same.fingerprint == task.fingerprint,
        f"{name}.load must give the same fingerprint for the same seed: it is part of the key of trained networks.",
    )
    message = f"{name}.load must give the same points for the same seed: use generator(seed, NAME), no global state."
    for key, split in task.splits().items():
        again = same.splits()[key]
        require_equal(again.ids, split.ids, message, tolerance=0)
        require_equal(stored(again), stored(split), message, tolerance=0)
        if split.targets is not None and again.targets is not None:
            require_equal(again.targets, split.targets, message, tolerance=0)
    if seeded:
        differs = stored(other.train).shape != stored(task.train).shape
        differs = differs or not torch.equal(stored(other.train), stored(task.train))
        require(differs, f"{name}.load must give another training part for another seed; seeds 0 and 1 agree.")
        require(other.fingerprint != task.fingerprint, "The fingerprint must follow the training points.")
