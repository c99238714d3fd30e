"""Your own images in folders: the name of an image's folder is its class; streamed from the files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.field_checks import is_integer
from bnn_runner.data.holdout_fraction import fraction_problems, halves_of
from bnn_runner.data.image_files import SUFFIXES, ImageFiles, decode, digests
from bnn_runner.data.images import PixelScaling
from bnn_runner.data.splits import Sizes, divide, fingerprint
from bnn_runner.data.user_splits import map_note, seeded_parts
from bnn_runner.errors import UserError, raise_all
from bnn_runner.tasks import Split, Task, TaskSpec

# The scaling of networks trained on ImageNet; for grey images its mean over the channels.
SCALINGS = {
    1: PixelScaling(mean=(0.449,), std=(0.226,)),
    3: PixelScaling(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
}
OOD = "ood"


@dataclass(frozen=True)
class _Listing:
    """Images by part, ordered by name, with their classes. `num_train` is None if the seed splits them."""

    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: Tensor
    num_train: int | None
    ood: dict[str, tuple[Path, ...]]


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """path/train/CLASS/... and path/test/CLASS/..., or path/CLASS/... split by the seed.

    path/ood/NAME/... are out-of-distribution sets. Images are decoded when a batch needs them,
    resized to `size` x `size` (the shorter side, then cropped at the centre) with `channels` 3 or 1, by `workers`
    threads. The fingerprint hashes the content of each training image.
    """

    path: str | None
    size: int
    channels: int
    workers: int | None
    test_fraction: float
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What the folders state, without opening an image. Raises `UserError` for invalid values or folders."""
        problems = fraction_problems(self.test_fraction)
        if not (is_integer(self.size) and self.size >= 1):
            problems.append(f"data.size must be at least 1 (side of an image in pixels); got {self.size}.")
        if self.channels not in SCALINGS:
            problems.append(f"data.channels must be 3 (colour) or 1 (grey); got {self.channels}.")
        if self.workers is not None and not (is_integer(self.workers) and self.workers >= 0):
            problems.append(f"data.workers must be at least 0 (threads), or null for one per core; got {self.workers}.")
        if self.path is None:
            problems.append(
                "data=image_folder requires a folder: data.path=pictures (relative to the working directory), with "
                "one folder per class, or with train/ and test/ that have one folder per class."
            )
            raise_all(problems + self._sizes.problems(0, 0))
            raise AssertionError("unreachable: there was a problem")
        found = _listing(Path(self.path))
        raise_all(problems + self._sizes.problems(*((0, 0) if problems else self._halves(found))))
        shape = (self.channels, self.size, self.size)
        return TaskSpec("image_folder", "classification", shape, len(found.classes), self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def _halves(self, found: _Listing) -> tuple[int, int]:
        total = len(found.paths)
        if found.num_train is None:
            return halves_of(total, self.test_fraction)
        return found.num_train, total - found.num_train

    def load(self, data_dir: Path, seed: int) -> Task:
        """List the files; images are read later. Raises `UserError` for folders of another layout."""
        spec = self.spec()
        assert self.path is not None
        found = _listing(Path(self.path))
        y, rows, n = found.labels, torch.arange(len(found.paths)), found.num_train
        if n is None:
            parts = seeded_parts(len(rows), y, self.test_fraction, self._sizes, seed)
        else:
            parts = divide(rows[:n], rows[n:], self._sizes, seed, y[:n], y[n:])
        scaling = SCALINGS[self.channels]

        def stored(paths: list[Path]) -> ImageFiles:
            return ImageFiles(paths, self.size, self.channels, self.workers)

        def part(ids: Tensor) -> Split:
            return Split(stored([found.paths[i] for i in ids.tolist()]), y[ids], ids, scaling)

        train, val = part(parts.train), part(parts.val)
        seen = Split(digests([found.paths[i] for i in train.ids.tolist()]), train.targets, train.ids)
        constants = torch.tensor([self.size, self.channels]), torch.tensor([scaling.mean, scaling.std])
        return Task(
            spec=spec,
            train=train,
            val=val,
            test=part(parts.test),
            ood={
                name: Split(stored(list(paths)), None, torch.arange(len(paths)), scaling)
                for name, paths in found.ood.items()
            },
            fingerprint=fingerprint(seen, val.ids, *constants),
            target_mean=torch.zeros(spec.num_outputs),
            target_scale=torch.ones(spec.num_outputs),
            class_names=found.classes,
            notes=map_note(found.classes),
            read_image=partial(decode, size=self.size, channels=self.channels),
        )


def _listing(root: Path) -> _Listing:
    if not root.is_dir():
        raise UserError(f"data.path must be a folder with one folder per class; {root} is not a folder.")
    own = [(root / part).is_dir() for part in ("train", "test")]
    if any(own) and not all(own):
        there, absent = ("train", "test") if own[0] else ("test", "train")
        raise UserError(
            f"{root} must have train/ and test/, or neither; got {there}/ without {absent}/. Add {absent}/, or give a "
            "folder with one folder per class."
        )
    ood = {p.name: _images(p) for p in _folders(root / OOD)} if (root / OOD).is_dir() else {}
    if not all(own):
        classes, paths, labels = _labelled(root, None)
        return _Listing(classes, paths, labels, None, ood)
    classes, paths, labels = _labelled(root / "train", None)
    _, more, more_labels = _labelled(root / "test", classes)
    return _Listing(classes, paths + more, torch.cat([labels, more_labels]), len(paths), ood)


def _labelled(folder: Path, known: tuple[str, ...] | None) -> tuple[tuple[str, ...], tuple[Path, ...], Tensor]:
    """Classes (those `known`, or the folders' names in order), images and their classes [N]."""
    folders = [p for p in _folders(folder) if p.name != OOD]
    names = known or tuple(p.name for p in folders)
    if known is None and len(names) < 2:
        raise UserError(f"{folder} must have at least 2 folders, one per class; got {len(names)}.")
    paths: list[Path] = []
    labels: list[int] = []
    for place in folders:
        if place.name not in names:
            raise UserError(
                f"{place} must be a class of the training images: {', '.join(names[:20])}. Rename or delete it."
            )
        images = _images(place)
        if not images:
            raise UserError(f"{place} has no images ({', '.join(SUFFIXES)}). Add some, or delete it.")
        paths += images
        labels += [names.index(place.name)] * len(images)
    if not paths:
        raise UserError(f"{folder} has no images. Add one folder per class.")
    return names, tuple(paths), torch.tensor(labels)


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _images(folder: Path) -> tuple[Path, ...]:
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return tuple(sorted(found))
