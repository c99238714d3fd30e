"""Generated 1-D regression on a straight line with unit noise: the toy of concrete dropout (Gal et al. 2017, §4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.fields import count_problems, noise_problems
from bnn_runner.data.splits import Sizes, divide
from bnn_runner.data.tables import table_task
from bnn_runner.errors import raise_all
from bnn_runner.streams import generator
from bnn_runner.tasks import Task, TaskSpec


def line(x: Tensor) -> Tensor:
    """Noise-free outputs [M, 1] at inputs [M, 1]: 2x + 8."""
    return 2 * x + 8


@dataclass(frozen=True, kw_only=True)
class Line1D:
    """y = 2x + 8 + noise, x standard normal; `noise` is the standard deviation of the Gaussian noise."""

    num_train: int
    num_test: int
    noise: float
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before generating. Raises `UserError` for values that cannot be."""
        counts = count_problems(1, num_train=self.num_train, num_test=self.num_test)
        known = (0, 0) if counts else (self.num_train, self.num_test)
        raise_all(counts + noise_problems(self.noise) + self._sizes.problems(*known))
        return TaskSpec("line1d", "regression", (1,), 1, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Generate the points; `data_dir` is not used."""
        spec = self.spec()

        def normal(count: int, *words: str) -> Tensor:
            return torch.randn(count, 1, generator=generator(seed, "line1d", *words), dtype=torch.float64)

        sizes = (("train", self.num_train), ("test", self.num_test))
        x = torch.cat([normal(n, part, "inputs") for part, n in sizes])
        y = line(x) + self.noise * torch.cat([normal(n, part, "noise") for part, n in sizes])
        rows = torch.arange(len(x))
        parts = divide(rows[: self.num_train], rows[self.num_train :], self._sizes, seed, None, None)
        return table_task(spec, x, y, parts, truth=line)
