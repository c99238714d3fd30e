"""Images of the user's own in folders: the name of an image's folder is its class; streamed from the files."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.field_checks import is_integer
from bnn_runner.data.image_files import SUFFIXES, ImageFiles, decode, digests
from bnn_runner.data.images import PixelScaling
from bnn_runner.data.splits import Sizes, divide, fingerprint
from bnn_runner.data.test_fraction import fraction_problems, halves_of
from bnn_runner.data.user_splits import map_note, seeded_parts
from bnn_runner.errors import UserError, raise_all
from bnn_runner.tasks import Split, Task, TaskSpec

# What networks trained on ImageNet expect; for grey images their means.
SCALINGS = {
    1: PixelScaling(mean=(0.449,), std=(0.226,)),
    3: PixelScaling(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
}
OOD = "ood"


@dataclass(frozen=True)
class _Listing:
    """Images by part, in the order of their names, with their classes. `num_train` is None where the seed splits."""

    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: Tensor
    num_train: int | None
    ood: dict[str, tuple[Path, ...]]


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """path/train/CLASS/... and path/test/CLASS/..., or path/CLASS/... with a split chosen by the seed.

    path/ood/NAME/... are out-of-distribution sets. Images are decoded when a batch needs them, resized
    to `size` x `size` (the shorter side, then the middle is cut out) with `channels` 3 or 1, by
    `workers` threads. What a training depends on is known by the content of each file.
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
        """What the folders say, without opening an image. Raises `UserError` for what cannot be."""
        problems = fraction_problems(self.test_fraction)
        if not (is_integer(self.size) and self.size >= 1):
            problems.append(f"data.size={self.size} cannot be. It is the side of an image in pixels: 1 or more.")
        if self.channels not in SCALINGS:
            problems.append(f"data.channels={self.channels} cannot be. Give 3 (colours) or 1 (grey).")
        if self.workers is not None and not (is_integer(self.workers) and self.workers >= 0):
            problems.append(
                f"data.workers={self.workers} cannot be. It is a number of threads; null is one a core, 0 none."
            )
        if self.path is None:
            problems.append(
                "data=image_folder needs a folder of yours. Give data.path=pictures (relative to where the command is "
                "started), with a folder for each class, or train/ and test/ with one for each class."
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
        """List the files; images are read later. Raises `UserError` for folders that are no such set."""
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
        raise UserError(f"data.path={root} is no folder. Give the folder that holds a folder for each class.")
    own = [(root / part).is_dir() for part in ("train", "test")]
    if any(own) and not all(own):
        there, absent = ("train", "test") if own[0] else ("test", "train")
        raise UserError(
            f"{root} has {there}/ and no {absent}/. Add it, or give a folder with one folder for each class."
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
        raise UserError(
            f"{folder} has {len(names)} folders, and a folder stands for a class. There must be two or more."
        )
    paths: list[Path] = []
    labels: list[int] = []
    for place in folders:
        if place.name not in names:
            raise UserError(
                f"{place} is a class that there are no training images of. Those are {', '.join(names[:20])}. "
                "Rename it, or take it away."
            )
        images = _images(place)
        if not images:
            raise UserError(f"{place} holds no images ({', '.join(SUFFIXES)}). Put some there, or take it away.")
        paths += images
        labels += [names.index(place.name)] * len(images)
    if not paths:
        raise UserError(f"{folder} holds no images. Put a folder for each class there.")
    return names, tuple(paths), torch.tensor(labels)


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _images(folder: Path) -> tuple[Path, ...]:
    found = (p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
    return tuple(sorted(found))
