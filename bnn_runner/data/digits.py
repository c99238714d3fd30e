"""Handwritten digits of 8 x 8 pixels (scikit-learn's load_digits): real data without a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.splits import Sizes, divide, seeded_order
from bnn_runner.data.tables import Scaling, table_task
from bnn_runner.errors import raise_all
from bnn_runner.rng import generator
from bnn_runner.tasks import Task, TaskSpec

NUM_IMAGES, NUM_PIXELS, NUM_CLASSES, LARGEST_PIXEL = 1797, 64, 10, 16
TEST_FRACTION = 0.2
NUM_TEST = round(TEST_FRACTION * NUM_IMAGES)


@dataclass(frozen=True, kw_only=True)
class Digits:
    """1,797 digits as 64 numbers from 0 to 1; one fifth, drawn by the seed and stratified by class, is the test set.

    The set "shuffled" holds the test images, each with its pixels in a random order of its own.
    """

    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before reading. Raises `UserError` for invalid values."""
        raise_all(self._sizes.problems(NUM_IMAGES - NUM_TEST, NUM_TEST))
        return TaskSpec("digits", "classification", (NUM_PIXELS,), NUM_CLASSES, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the digits that come with scikit-learn; `data_dir` is not used."""
        from sklearn.datasets import load_digits

        spec = self.spec()
        pixels, classes = load_digits(return_X_y=True)
        x, y = torch.from_numpy(pixels).double(), torch.from_numpy(classes)
        order = seeded_order(len(y), y, generator(seed, "split", "digits"))
        test_rows, train_rows = order[:NUM_TEST].sort().values, order[NUM_TEST:].sort().values
        parts = divide(train_rows, test_rows, self._sizes, seed, y[train_rows], y[test_rows])
        return table_task(
            spec,
            x,
            y,
            parts,
            scaling=Scaling(torch.zeros(NUM_PIXELS).double(), torch.full((NUM_PIXELS,), LARGEST_PIXEL).double()),
            ood={"shuffled": _shuffle_pixels(x[parts.test], seed)},
            class_names=tuple(str(digit) for digit in range(NUM_CLASSES)),
        )


def _shuffle_pixels(images: Tensor, seed: int) -> Tensor:
    """Each row of `images` [N, D] in a random order of its own."""
    keys = torch.rand(images.shape, generator=generator(seed, "digits", "shuffled"))
    return images.gather(1, keys.argsort(dim=1))
