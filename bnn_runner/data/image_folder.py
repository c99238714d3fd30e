"""Your own images in folders: the name of an image's folder is its class; streamed from the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.field_checks import is_integer
from bnn_runner.data.holdout_fraction import fraction_problems, halves_of
from bnn_runner.data.image_checks import ImageFacts, check_images, copies_between, digests, white_of
from bnn_runner.data.image_files import ImageFiles, ReadImage
from bnn_runner.data.image_layout import Listing, list_images
from bnn_runner.data.images import PixelScaling
from bnn_runner.data.splits import Sizes, fingerprint
from bnn_runner.data.user_splits import content_of, given_parts, map_note
from bnn_runner.errors import raise_all
from bnn_runner.tasks import Split, Task, TaskSpec

# The scaling of networks trained on ImageNet; for grey images its mean over the channels.
SCALINGS = {
    1: PixelScaling(mean=(0.449,), std=(0.226,)),
    3: PixelScaling(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
}


@dataclass(frozen=True, kw_only=True)
class ImageFolder:
    """path/train/CLASS/..., path/val/CLASS/... and path/test/CLASS/..., or path/CLASS/... split by the seed.

    Splits may have other names (Training, test_set, valid); the seed draws those that are missing.
    path/ood/NAME/... are out-of-distribution sets. All images are opened once before training, so that damaged ones
    are listed together. Images are decoded when a batch needs them,
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
        return self._spec(list_images(Path(self.path)), problems)

    def _spec(self, found: Listing, problems: list[str]) -> TaskSpec:
        sizes = self._sizes if found.num_val is None else replace(self._sizes, val_fraction=0.0)
        raise_all(problems + sizes.problems(*((0, 0) if problems else self._halves(found))))
        shape = (self.channels, self.size, self.size)
        val = self.val_fraction if found.num_val is None else found.num_val / (found.num_train + found.num_val)
        return TaskSpec("image_folder", "classification", shape, len(found.classes), val)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def _halves(self, found: Listing) -> tuple[int, int]:
        if found.num_test is None:
            return halves_of(found.num_train, self.test_fraction)
        return found.num_train, found.num_test

    def load(self, data_dir: Path, seed: int) -> Task:
        """List the files; images are read later. Raises `UserError` for folders of another layout."""
        self.spec()
        assert self.path is not None
        found = list_images(Path(self.path))
        spec = self._spec(found, [])
        y = found.labels
        parts = given_parts(len(y), y, found.num_val, found.num_test, self.test_fraction, self._sizes, seed)
        everything = [*found.paths, *(path for paths in found.ood.values() for path in paths)]
        facts = check_images(everything, self.workers)
        white, notes = white_of(everything, facts)
        rows = {"train": parts.train, "validation": parts.val, "test": parts.test}
        notes += copies_between({name: ids.tolist() for name, ids in rows.items()}, found.paths, facts)
        notes += _as_read(found, facts, spec.input_shape)
        scaling = SCALINGS[self.channels]

        def stored(paths: list[Path]) -> ImageFiles:
            return ImageFiles(paths, self.size, self.channels, self.workers, white=white)

        def part(ids: Tensor) -> Split:
            return Split(stored([found.paths[i] for i in ids.tolist()]), y[ids], ids, scaling)

        train, val = part(parts.train), part(parts.val)
        seen = Split(digests([facts[i] for i in train.ids.tolist()]), train.targets, train.ids)
        constants = [torch.tensor([self.size, self.channels]), torch.tensor([scaling.mean, scaling.std])]
        constants += [] if white is None else [torch.tensor(white)]
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
            notes=(*found.notes, *notes, *map_note(found.classes)),
            read_image=ReadImage(self.size, self.channels, white),
            content=content_of(fact.digest for fact in facts),
        )


def _as_read(found: Listing, facts: Sequence[ImageFacts], shape: tuple[int, ...]) -> list[str]:
    """The first image as it is read, and files with several pictures."""
    first, fact = found.paths[0], facts[0]
    name = "/".join(first.parts[-2:])
    kind = "colour" if shape[0] == 3 else "grey"
    notes = [
        f"images are read as {kind}, {shape[1]} x {shape[2]}; first: {name} ({fact.mode}, {fact.size[0]} x "
        f"{fact.size[1]}), class {found.classes[int(found.labels[0])]}"
    ]
    several = sum(f.frames > 1 for f in facts)
    return notes + ([f"{several} files have several pictures: the first of each is read"] if several else [])
