"""Generated 1-D regression with a gap: does the uncertainty grow where there are no data?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.field_checks import noise_problems
from bnn_runner.data.synthetic import NUM_OOD, beyond, normals, synthetic_parts, synthetic_problems, uniforms
from bnn_runner.data.tables import table_task
from bnn_runner.errors import raise_all
from bnn_runner.tasks import Task, TaskSpec

# Inputs lie in [-EDGE, -GAP] and [GAP, EDGE]; "gap" lies between, "far" reaches out to FAR.
GAP, EDGE, FAR = 1.0, 3.0, 5.0


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
        """What is known before generating. Raises `UserError` for invalid values."""
        raise_all(synthetic_problems(self, 1) + noise_problems(self.noise))
        return TaskSpec("gap1d", "regression", (1,), 1, self.val_fraction)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Generate the points; `data_dir` is not used."""
        spec = self.spec()
        signed = 2 * uniforms(self, "gap1d", seed) - 1
        x = torch.where(signed < 0, -1.0, 1.0).double() * (GAP + (EDGE - GAP) * signed.abs())
        y = smooth_truth(x) + self.noise * normals(self, "gap1d", seed, "noise")
        # The outermost tenths of the gap touch the data and are left out.
        gap = torch.linspace(-0.9 * GAP, 0.9 * GAP, NUM_OOD, dtype=torch.float64)[:, None]
        ood = {"gap": gap, "far": beyond(-EDGE, EDGE, (-FAR, FAR))}
        return table_task(spec, x, y, synthetic_parts(self, seed), ood=ood, truth=smooth_truth)
