"""Generated one-dimensional regression sets of published experiments."""

from __future__ import annotations

import math
from collections.abc import Callable
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

NUM_OOD = 100


@dataclass(frozen=True)
class Curve:
    """Noise-free outputs at inputs [M, 1], the range of the inputs, and the range that pictures show.

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
    "far" is what pictures show beyond the range; it has no targets.
    """

    name: str
    num_train: int
    num_test: int
    noise: float
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before generating. Raises `UserError` for values that cannot be."""
        counts = count_problems(1, num_train=self.num_train, num_test=self.num_test)
        if self.name not in CURVES:
            counts.append(
                f"data.name={self.name} is not known. The curves are {', '.join(CURVES)}. Choose one of them."
            )
        known = (0, 0) if counts else (self.num_train, self.num_test)
        raise_all(counts + noise_problems(self.noise) + self._sizes.problems(*known))
        return TaskSpec(self.name, "regression", (1,), 1, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Generate the points; `data_dir` is not used."""
        spec, curve = self.spec(), CURVES[self.name]
        train_x, train_y = self._points(self.num_train, seed, "train")
        test_x, test_y = self._points(self.num_test, seed, "test")
        rows = torch.arange(self.num_train + self.num_test)
        parts = divide(rows[: self.num_train], rows[self.num_train :], self._sizes, seed, None, None)
        reach = torch.linspace(0, 1, NUM_OOD // 2 + 1, dtype=torch.float64)[1:, None]
        below, above = curve.shown[0] - curve.low, curve.shown[1] - curve.high
        far = torch.cat([(curve.low + below * reach).flip(0), curve.high + above * reach])
        return table_task(
            spec,
            torch.cat([train_x, test_x]),
            torch.cat([train_y, test_y]),
            parts,
            ood={"far": far},
            truth=curve.truth,
        )

    def _points(self, count: int, seed: int, part: str) -> tuple[Tensor, Tensor]:
        """Inputs and outputs [count, 1]."""
        curve = CURVES[self.name]
        u = torch.rand(count, 1, generator=generator(seed, self.name, part, "inputs"), dtype=torch.float64)
        x = curve.low + (curve.high - curve.low) * u
        e = torch.randn(count, 1, generator=generator(seed, self.name, part, "noise"), dtype=torch.float64) * self.noise
        if curve.noise_inside:
            return x, curve.truth(x + e)
        return x, curve.truth(x) + e
