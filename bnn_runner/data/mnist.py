"""MNIST: handwritten digits, 60,000 to train on and 10,000 to test (LeCun et al., 1998)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bnn_runner.base import Task, TaskSpec
from bnn_runner.data.files import ensure_torchvision_files, missing
from bnn_runner.data.images import Array, ImageFiles, PixelScaling, check_bytes, image_task, npz_images
from bnn_runner.data.splits import Sizes
from bnn_runner.errors import raise_all

NUM_TRAIN, NUM_TEST, NUM_CLASSES = 60_000, 10_000, 10
# The IDX files as they are when unpacked, with their lengths; Fashion-MNIST's have the same names and lengths.
IDX_BYTES = {
    "train-images-idx3-ubyte": 47_040_016,
    "train-labels-idx1-ubyte": 60_008,
    "t10k-images-idx3-ubyte": 7_840_016,
    "t10k-labels-idx1-ubyte": 10_008,
}
SCALING = PixelScaling(mean=(0.1307,), std=(0.3081,))


@dataclass(frozen=True, kw_only=True)
class MNIST:
    """28 x 28 grey images. Out of distribution: notMNIST (letters) and Fashion-MNIST, each where its files are.

    Files under the data folder: `MNIST/raw/` (downloaded when absent), `notMNIST_test.npz` (array
    `test_images`), `FashionMNIST/raw/`.
    """

    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before reading. Raises `UserError` for values that cannot be."""
        raise_all(self._sizes.problems(NUM_TRAIN, NUM_TEST))
        return TaskSpec("mnist", "classification", (1, 28, 28), NUM_CLASSES, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the images. Raises `UserError` when files are missing (and cannot be downloaded) or damaged."""
        from torchvision import datasets

        spec = self.spec()
        ensure_torchvision_files("MNIST", data_dir, "MNIST/raw", tuple(IDX_BYTES))
        check_bytes(data_dir / "MNIST" / "raw", IDX_BYTES)
        train = datasets.MNIST(str(data_dir), train=True, download=False)
        test = datasets.MNIST(str(data_dir), train=False, download=False)
        files = ImageFiles(
            train.data.numpy(),
            train.targets,
            test.data.numpy(),
            test.targets,
            tuple(str(digit) for digit in range(NUM_CLASSES)),
        )
        partners = {
            "notmnist": lambda: npz_images(data_dir / "notMNIST_test.npz"),
            "fashion_mnist": lambda: _fashion_images(data_dir),
        }
        return image_task(spec, files, self._sizes, seed, SCALING, partners)


def _fashion_images(data_dir: Path) -> Array:
    """Fashion-MNIST's test images [10000, 28, 28]."""
    from torchvision import datasets

    folder = data_dir / "FashionMNIST" / "raw"
    absent = missing(folder, IDX_BYTES)
    if absent:
        raise FileNotFoundError(f"not in {folder}: {', '.join(absent)}")
    images: Array = datasets.FashionMNIST(str(data_dir), train=False, download=False).data.numpy()
    return images
