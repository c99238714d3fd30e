"""Published image sets by name: MNIST and its relatives, CIFAR-10, CIFAR-100, SVHN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bnn_runner.data.downloads import ensure
from bnn_runner.data.image_sets import SETS, partner_images, partner_source
from bnn_runner.data.images import Array, Half, image_task
from bnn_runner.data.read_once import once
from bnn_runner.data.shifts import shift_problems, shifted
from bnn_runner.data.sources import Source
from bnn_runner.data.splits import Sizes
from bnn_runner.errors import UserError, raise_all
from bnn_runner.tasks import Task, TaskSpec


@dataclass(frozen=True, kw_only=True)
class PublishedImages:
    """The image set `name` with its published training and test part; downloaded if it is missing.

    Out-of-distribution sets are the test images of other published sets, if their files exist; `prepare=true`
    downloads them too. `shifts` are names of `bnn_runner.data.shifts`: the test images are also scored under each,
    at every level. Training does not depend on them.
    """

    name: str
    val_fraction: float
    train_size: int | None
    test_size: int | None
    shifts: tuple[str, ...]

    def spec(self) -> TaskSpec:
        """What is known before reading. Raises `UserError` for invalid values."""
        if self.name not in SETS:
            raise UserError(
                f"data.name must be one of {', '.join(SETS)}; got {self.name}.",
                *self._sizes.problems(0, 0),
                *shift_problems(self.shifts),
            )
        found = SETS[self.name]
        raise_all(self._sizes.problems(found.num_train, found.num_test) + shift_problems(self.shifts))
        return TaskSpec(self.name, "classification", found.shape, found.num_classes, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    @property
    def cites(self) -> tuple[str, ...]:
        """Keys of its sources in the bibliography."""
        return SETS[self.name].cites

    def sources(self) -> Sequence[Source]:
        return (SETS[self.name].source,)

    def partner_sources(self) -> Mapping[str, Source]:
        return {name: partner_source(name) for name in SETS[self.name].partners}

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the images. Raises `UserError` for damaged files, and for missing ones that could not be downloaded."""
        spec = self.spec()
        chosen = SETS[self.name]
        place = ensure(chosen.source, data_dir)

        def half(part: str) -> Half:
            return once((self.name, place, part), partial(chosen.read, place, part))

        task = image_task(
            spec,
            (half("train"), half("test")),
            self._sizes,
            seed,
            chosen.scaling,
            {name: partial(_partner, name, data_dir) for name in chosen.partners},
            chosen.class_names,
            chosen.notes,
        )
        return replace(task, shifted=shifted(task.test, self.shifts, seed))


def _partner(name: str, data_dir: Path) -> Array:
    return once(("partner", name, data_dir), partial(partner_images, name, data_dir))
