"""Generated one-dimensional regression sets of published experiments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bnn_runner.data.field_checks import noise_problems
from bnn_runner.data.synthetic import beyond, normals, synthetic_parts, synthetic_problems, uniforms
from bnn_runner.data.tables import table_task
from bnn_runner.errors import raise_all
from bnn_runner.tasks import Task, TaskSpec


@dataclass(frozen=True)
class Curve:
    """Noise-free outputs at inputs [M, 1], the range of the inputs, and the range that figures show.

    `noise_inside`: the noise e also moves the input, y = g(x + e) + x + e, as in Blundell et al. (2015).
    """

    truth: Callable[[Tensor], Tensor]
    low: float
    high: float
    shown: tuple[float, float]
    noise_inside: bool = False


def _waves(x: Tensor) -> Tensor:
    return x + 0.3 * torch.sin(2 * math.pi * x) + 0.3 * torch.sin(4 * math.pi * x)


CURVES = {
    "bbb_curve": Curve(_waves, 0.0, 0.5, (-0.2, 1.2), noise_inside=True),
    "cubic": Curve(lambda x: x**3, -4.0, 4.0, (-6.0, 6.0)),
}


@dataclass(frozen=True, kw_only=True)
class MadeCurve:
    """x uniform on a range, and one output.

    bbb_curve: y = x + 0.3 sin 2π(x + e) + 0.3 sin 4π(x + e) + e on [0, 0.5] (Blundell et al. 2015).
    cubic: y = x³ + e on [−4, 4] (Hernández-Lobato & Adams 2015). e ~ N(0, `noise`²). The set
    "far" covers what figures show beyond the range; it has no targets.
    """

    name: str
    num_train: int
    num_test: int
    noise: float
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before generating. Raises `UserError` for invalid values."""
        problems = synthetic_problems(self, 1) + noise_problems(self.noise)
        if self.name not in CURVES:
            problems.append(f"data.name must be one of {', '.join(CURVES)}; got {self.name}.")
        raise_all(problems)
        return TaskSpec(self.name, "regression", (1,), 1, self.val_fraction)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Generate the points; `data_dir` is not used."""
        spec, curve = self.spec(), CURVES[self.name]
        x = curve.low + (curve.high - curve.low) * uniforms(self, self.name, seed)
        e = self.noise * normals(self, self.name, seed, "noise")
        y = curve.truth(x + e) if curve.noise_inside else curve.truth(x) + e
        ood = {"far": beyond(curve.low, curve.high, curve.shown)}
        return table_task(spec, x, y, synthetic_parts(self, seed), ood=ood, truth=curve.truth)
