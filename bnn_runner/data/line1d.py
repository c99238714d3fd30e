"""Generated 1-D regression on a straight line with unit noise: the toy of concrete dropout (Gal et al. 2017, §4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bnn_runner.data.field_checks import noise_problems
from bnn_runner.data.synthetic import normals, synthetic_parts, synthetic_problems
from bnn_runner.data.tables import table_task
from bnn_runner.errors import raise_all
from bnn_runner.tasks import Task, TaskSpec


def line(x: Tensor) -> Tensor:
    """Noise-free outputs [M, 1] at inputs [M, 1]: 2x + 8."""
    return 2 * x + 8


@dataclass(frozen=True, kw_only=True)
class Line1D:
    """y = 2x + 8 + noise, x standard normal; `noise` is the standard deviation of the Gaussian noise.

    Without `standardise`, networks are trained on y as it is. This matters for Adam, whose steps do not scale with the
    unit of the outputs.
    """

    num_train: int
    num_test: int
    noise: float
    standardise: bool
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before generating. Raises `UserError` for invalid values."""
        raise_all(synthetic_problems(self, 1) + noise_problems(self.noise))
        return TaskSpec("line1d", "regression", (1,), 1, self.val_fraction)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Generate the points; `data_dir` is not used."""
        spec = self.spec()
        x = normals(self, "line1d", seed, "inputs")
        y = line(x) + self.noise * normals(self, "line1d", seed, "noise")
        return table_task(spec, x, y, synthetic_parts(self, seed), truth=line, scale_targets=self.standardise)
