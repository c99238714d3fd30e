"""Data sets as a user has them: a table with named columns (one of texts) and small images of bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.images import PixelScaling
from bnn_runner.data.splits import Sizes, divide, fingerprint
from bnn_runner.data.tables import standardise, table_task
from bnn_runner.rng import generator
from bnn_runner.tasks import Split, Task, TaskSpec

COLOURS = ("blue", "green", "red")


@dataclass(frozen=True)
class Boats:
    """Columns length, colour and speed (metres, texts, knots) to two targets of very different size."""

    val_fraction: float = 0.1

    def spec(self) -> TaskSpec:
        return TaskSpec("boats", "regression", (5,), 2, self.val_fraction)

    def load(self, data_dir: Path, seed: int) -> Task:
        g = generator(seed, "boats")
        length = 5 + 10 * torch.rand(60, generator=g, dtype=torch.float64)
        colour = torch.randint(0, 3, (60,), generator=g).double()
        speed = 100 + 3 * torch.randn(60, generator=g, dtype=torch.float64)
        original = torch.stack([length, colour, speed], 1)
        hot = _one_hot(original)
        targets = torch.stack([1000 * length + 200 * colour, 0.01 * speed], 1)
        targets += torch.tensor([50.0, 0.001]) * torch.randn(60, 2, generator=g, dtype=torch.float64)
        rows = torch.arange(60)
        parts = divide(rows[:40], rows[40:], Sizes(self.val_fraction, None, None), seed, None, None)
        scaling = standardise(hot[parts.train])
        task = table_task(self.spec(), hot, targets, parts, scaling=scaling, target_names=("price", "wear"))
        return replace(
            task,
            feature_names=("length", "colour", "speed"),
            feature_categories={"colour": COLOURS},
            encode=lambda x: scaling.apply(_one_hot(x)),
        )


def _one_hot(original: Tensor) -> Tensor:
    length, colour, speed = original.T
    hot = torch.stack([(colour == k).double() for k in range(3)], 1)
    hot[colour.isnan()] = torch.nan
    return torch.cat([length[:, None], hot, speed[:, None]], 1)


@dataclass(frozen=True)
class Tiles:
    """Colour images of 8 x 6 bytes whose brighter channel is the class."""

    val_fraction: float = 0.1

    def spec(self) -> TaskSpec:
        return TaskSpec("tiles", "classification", (3, 8, 6), 2, self.val_fraction)

    def load(self, data_dir: Path, seed: int) -> Task:
        g = generator(seed, "tiles")
        classes = torch.randint(0, 2, (60,), generator=g)
        pixels = torch.randint(0, 120, (60, 3, 8, 6), generator=g, dtype=torch.uint8)
        pixels[torch.arange(60), classes] += 100
        scaling = PixelScaling(mean=(0.3, 0.3, 0.2), std=(0.2, 0.25, 0.15))
        rows = torch.arange(60)

        def part(first: int, last: int) -> Split:
            return Split(pixels[first:last], classes[first:last], rows[first:last], scaling)

        train, val = part(0, 36), part(36, 40)
        return Task(
            spec=self.spec(),
            train=train,
            val=val,
            test=part(40, 60),
            ood={},
            fingerprint=fingerprint(train, val.ids),
            target_mean=torch.zeros(2),
            target_scale=torch.ones(2),
            class_names=("left", "right"),
        )
