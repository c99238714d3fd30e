"""What generated data sets share: the numbers of points, their division, and their random numbers.

A generated set has the training points first and the test points after them; N counts both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from bnn_runner.data.field_checks import count_problems
from bnn_runner.data.splits import Parts, Sizes, divide
from bnn_runner.rng import generator

NUM_OOD = 100
"""Points of an out-of-distribution set on a line."""


class Synthetic(Protocol):
    """The fields of every generated set."""

    @property
    def num_train(self) -> int: ...

    @property
    def num_test(self) -> int: ...

    @property
    def val_fraction(self) -> float: ...

    @property
    def train_size(self) -> int | None: ...

    @property
    def test_size(self) -> int | None: ...


def synthetic_problems(data: Synthetic, least: int) -> list[str]:
    """Problems with these fields, if at least `least` training and test points are needed."""
    counts = count_problems(least, num_train=data.num_train, num_test=data.num_test)
    known = (0, 0) if counts else (data.num_train, data.num_test)
    return counts + _sizes(data).problems(*known)


def synthetic_parts(
    data: Synthetic, seed: int, train_labels: Tensor | None = None, test_labels: Tensor | None = None
) -> Parts:
    """Train, val and test rows of the N points; labels as for `divide`."""
    rows = torch.arange(data.num_train + data.num_test)
    train, test = rows[: data.num_train], rows[data.num_train :]
    return divide(train, test, _sizes(data), seed, train_labels, test_labels)


def _sizes(data: Synthetic) -> Sizes:
    return Sizes(data.val_fraction, data.train_size, data.test_size)


def uniforms(data: Synthetic, name: str, seed: int) -> Tensor:
    """Uniform numbers [N, 1] on [0, 1) for the inputs of the set `name`."""
    return _numbers(data, torch.rand, name, seed, "inputs")


def normals(data: Synthetic, name: str, seed: int, what: str) -> Tensor:
    """Standard normal numbers [N, 1] for the "inputs" or the "noise" of the set `name`."""
    return _numbers(data, torch.randn, name, seed, what)


def _numbers(data: Synthetic, kind: Callable[..., Tensor], name: str, seed: int, what: str) -> Tensor:
    """Each part has its own stream, so that more training points do not change the test points."""
    counts = (("train", data.num_train), ("test", data.num_test))
    numbers = [kind(n, 1, generator=generator(seed, name, part, what), dtype=torch.float64) for part, n in counts]
    return torch.cat(numbers)


def beyond(low: float, high: float, shown: tuple[float, float]) -> Tensor:
    """Inputs [NUM_OOD, 1] in ascending order from shown[0] to below `low` and from above `high` to shown[1]."""
    reach = torch.linspace(0, 1, NUM_OOD // 2 + 1, dtype=torch.float64)[1:, None]
    return torch.cat([(low + (shown[0] - low) * reach).flip(0), high + (shown[1] - high) * reach])
