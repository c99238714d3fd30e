"""Generated 1-D regression whose noise grows with the input."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from bnn_runner.data.field_checks import is_number
from bnn_runner.data.gap1d import smooth_truth
from bnn_runner.data.synthetic import beyond, normals, synthetic_parts, synthetic_problems, uniforms
from bnn_runner.data.tables import table_task
from bnn_runner.errors import raise_all
from bnn_runner.tasks import Task, TaskSpec

EDGE, FAR = 3.0, 5.0
"""Inputs lie in [-EDGE, EDGE]; "far" reaches out to FAR."""


@dataclass(frozen=True, kw_only=True)
class Hetero1D:
    """y = sin(2x) + x/3 + σ(x) ε, x uniform on [-3, 3], log σ linear in x.

    `noise_left` and `noise_right` are σ(-3) and σ(3). The set "far" (beyond the edges) has no targets.
    """

    num_train: int
    num_test: int
    noise_left: float
    noise_right: float
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before generating. Raises `UserError` for invalid values."""
        noises = [
            f"data.{key} must be positive (the standard deviation of the noise at one edge); got {value}. "
            f"Use for example data.{key}=0.2."
            for key, value in (("noise_left", self.noise_left), ("noise_right", self.noise_right))
            if not (is_number(value) and value > 0)
        ]
        raise_all(synthetic_problems(self, 1) + noises)
        return TaskSpec("hetero1d", "regression", (1,), 1, self.val_fraction)

    def true_noise(self, x: Tensor) -> Tensor:
        """σ(x) [M, 1] at inputs [M, 1]: from `noise_left` to `noise_right`, evenly in the logarithm."""
        return self.noise_left * (self.noise_right / self.noise_left) ** ((x + EDGE) / (2 * EDGE))

    def load(self, data_dir: Path, seed: int) -> Task:
        """Generate the points; `data_dir` is not used."""
        spec = self.spec()
        x = EDGE * (2 * uniforms(self, "hetero1d", seed) - 1)
        y = smooth_truth(x) + self.true_noise(x) * normals(self, "hetero1d", seed, "noise")
        parts, ood = synthetic_parts(self, seed), {"far": beyond(-EDGE, EDGE, (-FAR, FAR))}
        return table_task(spec, x, y, parts, ood=ood, truth=smooth_truth, true_noise=self.true_noise)
