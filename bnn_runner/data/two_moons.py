"""Two interleaved half circles in the plane (scikit-learn's make_moons)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.field_checks import noise_problems
from bnn_runner.data.synthetic import synthetic_parts, synthetic_problems
from bnn_runner.data.tables import table_task
from bnn_runner.errors import raise_all
from bnn_runner.rng import derive_seed, generator
from bnn_runner.tasks import Task, TaskSpec

# The moons lie within 1.6 of their common centre (plus noise); the ring of far points begins at 4.
CENTRE = (0.5, 0.25)
RING = (4.0, 6.0)
NUM_OOD = 200


@dataclass(frozen=True, kw_only=True)
class TwoMoons:
    """Two classes of points in the plane; the set "far" is a ring around both.

    `noise` is the standard deviation of the Gaussian noise on both coordinates.
    """

    num_train: int
    num_test: int
    noise: float
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before generating. Raises `UserError` for invalid values."""
        raise_all(synthetic_problems(self, 2) + noise_problems(self.noise))
        return TaskSpec("two_moons", "classification", (2,), 2, self.val_fraction)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Generate the points; `data_dir` is not used."""
        spec = self.spec()
        x_train, y_train = _moons(self.num_train, self.noise, seed, "train")
        x_test, y_test = _moons(self.num_test, self.noise, seed, "test")
        u = torch.rand(2, NUM_OOD, generator=generator(seed, "two_moons", "far"), dtype=torch.float64)
        radius, angle = RING[0] + (RING[1] - RING[0]) * u[0], 2 * torch.pi * u[1]
        far = torch.stack([CENTRE[0] + radius * angle.cos(), CENTRE[1] + radius * angle.sin()], dim=1)
        return table_task(
            spec,
            torch.cat([x_train, x_test]),
            torch.cat([y_train, y_test]),
            synthetic_parts(self, seed, y_train, y_test),
            ood={"far": far},
            class_names=("upper", "lower"),
        )


def _moons(count: int, noise: float, seed: int, part: str) -> tuple[Tensor, Tensor]:
    """Inputs [count, 2] and labels [count]."""
    from sklearn.datasets import make_moons

    # scikit-learn takes seeds of 32 bits only.
    x, y = make_moons(count, noise=noise, random_state=derive_seed(seed, "two_moons", part) % 2**32)
    return torch.from_numpy(x), torch.from_numpy(y)
