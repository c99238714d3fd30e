"""Which points are train, val and test: seeded, nested, class-stratified, and the fingerprint of a training part.

Every data set divides its points here, so that `data.val_fraction`, `data.train_size` and
`data.test_size` mean the same everywhere:

- `val_fraction` of the training points is set aside, in an order that depends only on the data seed;
- `train_size` = n keeps exactly n of the rest, and val_fraction / (1 - val_fraction) times n of the points set
  aside, so that validation keeps its share;
- `test_size` = n keeps exactly n test points, whatever `train_size` is.

With the same seed, a smaller part is always contained in a larger one. Each part is in ascending order of ids.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bnn_runner.data.field_checks import is_integer, is_number
from bnn_runner.rng import generator
from bnn_runner.tasks import Split


@dataclass(frozen=True)
class Sizes:
    """How much of a data set is used: three fields of every data set."""

    val_fraction: float
    train_size: int | None
    test_size: int | None

    def problems(self, num_train: int, num_test: int) -> list[str]:
        """Problems with the fields for a set of `num_train` and `num_test` points, as sentences that name the keys."""
        found = []
        fraction_ok = is_number(self.val_fraction) and 0 <= self.val_fraction < 1
        if not fraction_ok:
            found.append(
                "data.val_fraction must be at least 0 and below 1 (the share of the training points for validation); "
                f"got {self.val_fraction}. Use for example data.val_fraction=0.1."
            )
        for key, size in (("train_size", self.train_size), ("test_size", self.test_size)):
            if size is not None and not (is_integer(size) and size >= 1):
                found.append(
                    f"data.{key} must be a whole number of at least 1; got {size}. Use data.{key}=null for all points."
                )
        if not fraction_ok or num_train < 1 or num_test < 1:
            return found
        left = num_train - self._num_set_aside(num_train)
        if left < 1:
            found.append(
                f"data.val_fraction must leave a point to train on; got {self.val_fraction} of {num_train} training "
                "points. Lower data.val_fraction."
            )
        elif self.train_size is not None and is_integer(self.train_size) and self.train_size > left:
            used = f" (of {num_train}, less data.val_fraction={self.val_fraction})" if left < num_train else ""
            found.append(
                f"data.train_size must be at most {left}, the number of training points{used}; got {self.train_size}. "
                f"Use data.train_size={left}, or null for all."
            )
        if self.test_size is not None and is_integer(self.test_size) and self.test_size > num_test:
            found.append(
                f"data.test_size must be at most {num_test}, the number of test points; got {self.test_size}. "
                f"Use data.test_size={num_test}, or null for all."
            )
        return found

    def _num_set_aside(self, num_train: int) -> int:
        """Validation points of the whole set: rounded, and at least one if `val_fraction` is positive."""
        return max(1, round(self.val_fraction * num_train)) if self.val_fraction > 0 else 0

    def counts(self, num_train: int) -> tuple[int, int, int]:
        """(points set aside, validation points used, training points used)."""
        aside = self._num_set_aside(num_train)
        if self.train_size is None:
            return aside, aside, num_train - aside
        share = round(self.train_size * self.val_fraction / (1 - self.val_fraction))
        return aside, min(aside, max(1, share)), self.train_size


@dataclass(frozen=True)
class Parts:
    """Row numbers of each part [N], ascending."""

    train: Tensor
    val: Tensor
    test: Tensor


def divide(
    train_rows: Tensor,
    test_rows: Tensor,
    sizes: Sizes,
    seed: int,
    train_labels: Tensor | None,
    test_labels: Tensor | None,
) -> Parts:
    """Train, val and test rows from the two published halves.

    Args:
        train_rows: rows of the training half.
        test_rows: rows of the test half.
        sizes: how many of them to use; must have no problems.
        seed: of the division.
        train_labels: the class of each of `train_rows`, for stratification; None for regression.
        test_labels: the same for `test_rows`.
    """
    aside, num_val, num_train = sizes.counts(len(train_rows))
    order = train_rows[seeded_order(len(train_rows), train_labels, generator(seed, "split", "val"))]
    val, train = order[:num_val], order[aside : aside + num_train]
    test = test_rows
    if sizes.test_size is not None:
        test = test_rows[seeded_order(len(test_rows), test_labels, generator(seed, "split", "test"))][: sizes.test_size]
    return Parts(train.sort().values, val.sort().values, test.sort().values)


def seeded_order(count: int, labels: Tensor | None, stream: torch.Generator) -> Tensor:
    """A random order of `count` points; with labels, every prefix of it contains the classes in proportion.

    The j-th of the n_c points of class c is placed at (j + 1/2) / n_c of the way, so that the first m points contain
    m n_c / N of them, up to rounding.
    """
    order = torch.randperm(count, generator=stream)
    if labels is None:
        return order
    shuffled = labels[order]
    place = torch.empty(count, dtype=torch.float64)
    for label in torch.unique(shuffled):
        members = (shuffled == label).nonzero().squeeze(1)
        place[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    return order[torch.argsort(place, stable=True)]


def fingerprint(train: Split, val_ids: Tensor, *constants: Tensor) -> str:
    """A hash of what a training depends on: inputs, targets, scaling constants, and ids of the validation points."""
    digest = hashlib.blake2b(digest_size=16)
    targets = () if train.targets is None else (train.targets,)
    for tensor in (train.inputs, *targets, train.ids, val_ids, *constants):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
        digest.update(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
