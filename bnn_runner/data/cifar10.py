"""CIFAR-10: small colour photographs in ten classes, 50,000 to train on, 10,000 to test (Krizhevsky, 2009)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bnn_runner.base import Task, TaskSpec
from bnn_runner.data.files import ensure_torchvision_files
from bnn_runner.data.images import ImageFiles, PixelScaling, check_bytes, image_task, npz_images
from bnn_runner.data.splits import Sizes
from bnn_runner.errors import UserError, raise_all

NUM_TRAIN, NUM_TEST, NUM_CLASSES = 50_000, 10_000, 10
FOLDER = "cifar-10-batches-py"
FILE_BYTES = {
    "data_batch_1": 31_035_704,
    "data_batch_2": 31_035_320,
    "data_batch_3": 31_035_999,
    "data_batch_4": 31_035_696,
    "data_batch_5": 31_035_623,
    "test_batch": 31_035_526,
    "batches.meta": 158,
}
SCALING = PixelScaling(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))


@dataclass(frozen=True, kw_only=True)
class CIFAR10:
    """32 x 32 colour images. Out of distribution: CIFAR-100's test images, where their file is.

    Files under the data folder: `cifar-10-batches-py/` (downloaded when absent) and
    `cifar100_subset.npz` (array `test_images` [N, 32, 32, 3]).
    """

    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before reading. Raises `UserError` for values that cannot be."""
        raise_all(self._sizes.problems(NUM_TRAIN, NUM_TEST))
        return TaskSpec("cifar10", "classification", (3, 32, 32), NUM_CLASSES, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the images. Raises `UserError` when files are missing (and cannot be downloaded) or damaged."""
        from torchvision import datasets

        spec = self.spec()
        ensure_torchvision_files("CIFAR10", data_dir, FOLDER, tuple(FILE_BYTES))
        check_bytes(data_dir / FOLDER, FILE_BYTES)
        try:
            train = datasets.CIFAR10(str(data_dir), train=True, download=False)
            test = datasets.CIFAR10(str(data_dir), train=False, download=False)
        except RuntimeError as error:  # torchvision has compared MD5 sums
            raise UserError(
                f"A file in {data_dir / FOLDER} is damaged. Its MD5 sum is not the published one ({error}). "
                "Replace the files, or take the folder away and it is downloaded again."
            ) from error
        files = ImageFiles(
            train.data,
            torch.tensor(train.targets),
            test.data,
            torch.tensor(test.targets),
            tuple(train.classes),
        )
        partners = {"cifar100": lambda: npz_images(data_dir / "cifar100_subset.npz")}
        return image_task(spec, files, self._sizes, seed, SCALING, partners)
