"""The published image sets: how each is read, its classes and scaling, and its out-of-distribution sets."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bnn_runner.data.image_sources import SOURCES
from bnn_runner.data.images import Array, Half, PixelScaling
from bnn_runner.data.sources import Source, look, read, refuse_damaged
from bnn_runner.errors import UserError


@dataclass(frozen=True)
class ImageSet:
    """One published set: `read(place, part)` gives the pixels and classes of "train" or "test".

    `place` is the folder of its files, and `test_files` are the names of those required for "test". `partners` are
    the sets whose test images serve as out-of-distribution sets; `notes` appear in the row of every run.
    """

    source: Source
    read: Callable[[Path, str], Half]
    test_files: tuple[str, ...]
    shape: tuple[int, int, int]
    num_train: int
    num_test: int
    num_classes: int
    scaling: PixelScaling
    partners: tuple[str, ...]
    cites: tuple[str, ...]
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def partner_source(name: str) -> Source:
    """The files required of a set that is out of distribution for another: its test images."""
    return SETS[name].source.only(SETS[name].test_files) if name in SETS else SOURCES[name]


def partner_images(name: str, data_dir: Path) -> Array:
    """Test images of a set, out of distribution for another.

    Raises `FileNotFoundError` if they are missing, and `UserError` if they are damaged.
    """
    found = look(partner_source(name), data_dir)
    if found.missing and name == "cifar100":  # the file with a part of its training images has all test images
        return partner_images("cifar100_subset", data_dir)
    if found.missing:
        raise FileNotFoundError(f"not in {found.place}: {', '.join(found.missing)}")
    refuse_damaged(found)
    if name in SETS:
        return SETS[name].read(found.place, "test").pixels
    return _arrays(found.place / SOURCES[name].files[0].name, "test_images")[0]


# ------------------------------------------------------------------------------------ IDX files


def read_idx(place: Path, part: str) -> Half:
    """Pixels [N, 28, 28] and classes [N] of IDX files (magic number, axes as 32-bit big-endian numbers, bytes)."""
    prefix = "train" if part == "train" else "t10k"
    return Half(
        _idx(place, f"{prefix}-images-idx3-ubyte"), torch.from_numpy(_idx(place, f"{prefix}-labels-idx1-ubyte")).long()
    )


def _idx(place: Path, name: str) -> Array:
    data = read(place, name)
    axes = data[3] if len(data) >= 4 and data[:3] == b"\0\0\x08" else 0
    shape = np.frombuffer(data, ">u4", axes, 4).astype(int) if len(data) >= 4 + 4 * axes else np.zeros(0, int)
    if axes == 0 or len(data) != 4 + 4 * axes + shape.prod():
        raise UserError(f"{place / name} must be a complete IDX file of bytes. Replace it.")
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


# ---------------------------------------------------------------------------------- other files


def _cifar(train: tuple[str, ...], test: str, labels: str) -> Callable[[Path, str], Half]:
    """A reader of the authors' pickled batches, whose checksums have already been compared."""

    def read_batches(place: Path, part: str) -> Half:
        pixels, classes = [], []
        for name in train if part == "train" else (test,):
            with (place / name).open("rb") as f:
                batch = pickle.load(f, encoding="latin1")
            pixels.append(np.asarray(batch["data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            classes.append(torch.tensor(batch[labels]))
        return Half(np.concatenate(pixels), torch.cat(classes))

    return read_batches


def _svhn(place: Path, part: str) -> Half:
    from torchvision import datasets

    loaded = datasets.SVHN(str(place), split=part, download=False)  # torchvision maps the published class 10 to digit 0
    return Half(np.ascontiguousarray(loaded.data.transpose(0, 2, 3, 1)), torch.from_numpy(loaded.labels).long())


def _npz(name: str) -> Callable[[Path, str], Half]:
    def read_arrays(place: Path, part: str) -> Half:
        pixels, classes = _arrays(place / name, f"{part}_images", f"{part}_labels")
        return Half(pixels, torch.from_numpy(classes.astype(np.int64)))

    return read_arrays


def _arrays(path: Path, *names: str) -> list[Array]:
    """Arrays of an .npz file. Raises `UserError` if it could not be read or lacks one."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return [archive[name] for name in names]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"Could not read {path}: {error}. It must contain the arrays {', '.join(names)}.") from error


# ------------------------------------------------------------------------------------- the sets

_IDX_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_DIGITS = tuple(str(digit) for digit in range(10))
_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR10_SCALING = PixelScaling(mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
_CIFAR100_SCALING = PixelScaling(mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762))

SETS = {
    "mnist": ImageSet(
        source=SOURCES["mnist"],
        read=read_idx,
        test_files=_IDX_TEST,
        shape=(1, 28, 28),
        num_train=60_000,
        num_test=10_000,
        num_classes=10,
        class_names=_DIGITS,
        scaling=PixelScaling(mean=(0.1307,), std=(0.3081,)),
        partners=("notmnist", "fashion_mnist", "kmnist"),
        cites=("lecun1998",),
    ),
    "fashion_mnist": ImageSet(
        source=SOURCES["fashion_mnist"],
        read=read_idx,
        test_files=_IDX_TEST,
        shape=(1, 28, 28),
        num_train=60_000,
        num_test=10_000,
        num_classes=10,
        class_names=(
            *("t-shirt", "trouser", "pullover", "dress", "coat"),
            *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
        ),
        scaling=PixelScaling(mean=(0.2860,), std=(0.3530,)),
        partners=("mnist", "kmnist", "notmnist"),
        cites=("xiao2017",),
    ),
    "kmnist": ImageSet(
        source=SOURCES["kmnist"],
        read=read_idx,
        test_files=_IDX_TEST,
        shape=(1, 28, 28),
        num_train=60_000,
        num_test=10_000,
        num_classes=10,
        class_names=("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
        scaling=PixelScaling(mean=(0.1918,), std=(0.3483,)),
        partners=("mnist", "fashion_mnist", "notmnist"),
        cites=("clanuwat2018",),
    ),
    "cifar10": ImageSet(
        source=SOURCES["cifar10"],
        read=_cifar(tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "labels"),
        test_files=("test_batch",),
        shape=(3, 32, 32),
        num_train=50_000,
        num_test=10_000,
        num_classes=10,
        class_names=_CIFAR10_CLASSES,
        scaling=_CIFAR10_SCALING,
        partners=("cifar100", "svhn"),
        cites=("krizhevsky2009",),
    ),
    "cifar100": ImageSet(
        source=SOURCES["cifar100"],
        read=_cifar(("train",), "test", "fine_labels"),
        test_files=("test",),
        shape=(3, 32, 32),
        num_train=50_000,
        num_test=10_000,
        num_classes=100,
        scaling=_CIFAR100_SCALING,
        partners=("cifar10", "svhn"),
        cites=("krizhevsky2009",),
    ),
    "cifar100_subset": ImageSet(
        source=SOURCES["cifar100_subset"],
        read=_npz("cifar100_subset.npz"),
        test_files=("cifar100_subset.npz",),
        shape=(3, 32, 32),
        num_train=5_000,
        num_test=10_000,
        num_classes=100,
        scaling=_CIFAR100_SCALING,
        partners=("cifar10", "svhn"),
        cites=("krizhevsky2009",),
        notes=("a part of CIFAR-100: 50 training images per class (of 500) and the whole test set",),
    ),
    "svhn": ImageSet(
        source=SOURCES["svhn"],
        read=_svhn,
        test_files=("test_32x32.mat",),
        shape=(3, 32, 32),
        num_train=73_257,
        num_test=26_032,
        num_classes=10,
        class_names=_DIGITS,
        scaling=PixelScaling(mean=(0.4377, 0.4438, 0.4728), std=(0.1980, 0.2010, 0.1970)),
        partners=("cifar10", "cifar100"),
        cites=("netzer2011",),
    ),
}
