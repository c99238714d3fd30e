"""Generated 1-D regression with a gap: does the uncertainty grow where no data are?"""

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

# Inputs lie in [-EDGE, -GAP] and [GAP, EDGE]; "gap" is what lies between, "far" reaches out to FAR.
GAP, EDGE, FAR = 1.0, 3.0, 5.0
NUM_OOD = 100


def smooth_truth(x: Tensor) -> Tensor:
    """Noise-free outputs [M, 1] at inputs [M, 1]: sin(2x) + x/3."""
    return torch.sin(2 * x) + x / 3


@dataclass(frozen=True, kw_only=True)
class Gap1D:
    """y = sin(2x) + x/3 + noise, x uniform on two clusters with a gap between them.

    `noise` is the standard deviation of the Gaussian noise. Train and test points come from the
    same distribution; the sets "gap" (inside the gap) and "far" (beyond the edges) have no targets.
    """

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
        return TaskSpec("gap1d", "regression", (1,), 1, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Generate the points; `data_dir` is not used."""
        spec = self.spec()
        x = torch.cat([_clusters(self.num_train, seed, "train"), _clusters(self.num_test, seed, "test")])
        errors = [
            torch.randn(n, 1, generator=generator(seed, "gap1d", part, "noise"), dtype=torch.float64)
            for n, part in ((self.num_train, "train"), (self.num_test, "test"))
        ]
        y = smooth_truth(x) + self.noise * torch.cat(errors)
        rows = torch.arange(len(x))
        parts = divide(rows[: self.num_train], rows[self.num_train :], self._sizes, seed, None, None)
        reach = torch.linspace(0, 1, NUM_OOD // 2 + 1, dtype=torch.float64)[1:, None]
        far = EDGE + (FAR - EDGE) * reach
        # The outermost tenths of the gap touch the data and are left out.
        gap = torch.linspace(-0.9 * GAP, 0.9 * GAP, NUM_OOD, dtype=torch.float64)[:, None]
        ood = {"gap": gap, "far": torch.cat([-far.flip(0), far])}
        return table_task(spec, x, y, parts, ood=ood, truth=smooth_truth)


def _clusters(count: int, seed: int, part: str) -> Tensor:
    """`count` inputs [count, 1], uniform on the two clusters."""
    u = torch.rand(count, 1, generator=generator(seed, "gap1d", part, "inputs"), dtype=torch.float64)
    signed = 2 * u - 1
    return torch.where(signed < 0, -1.0, 1.0).double() * (GAP + (EDGE - GAP) * signed.abs())
