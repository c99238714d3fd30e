"""Small tables that come with scikit-learn: wine, breast cancer (classes) and diabetes (regression)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bnn_runner.data.holdout_fraction import fraction_problems, halves_of
from bnn_runner.data.splits import Sizes, divide, seeded_order
from bnn_runner.data.tables import table_task
from bnn_runner.errors import raise_all
from bnn_runner.rng import generator
from bnn_runner.tasks import Kind, Task, TaskSpec

SETS: dict[str, tuple[Kind, int, int, int]] = {
    "wine": ("classification", 178, 13, 3),
    "breast_cancer": ("classification", 569, 30, 2),
    "diabetes": ("regression", 442, 10, 1),
}
"""Kind, rows, features, outputs."""


@dataclass(frozen=True, kw_only=True)
class Bundled:
    """Rows of numbers; `test_fraction` of them, drawn by the seed (stratified for classes), is the test set."""

    name: str
    test_fraction: float
    val_fraction: float
    train_size: int | None
    test_size: int | None

    def spec(self) -> TaskSpec:
        """What is known before reading. Raises `UserError` for invalid values."""
        problems = []
        if self.name not in SETS:
            problems.append(f"data.name must be one of {', '.join(SETS)}; got {self.name}.")
        problems += fraction_problems(self.test_fraction)
        train, test = (0, 0) if problems else halves_of(SETS[self.name][1], self.test_fraction)
        raise_all(problems + self._sizes.problems(train, test))
        kind, _, features, outputs = SETS[self.name]
        return TaskSpec(self.name, kind, (features,), outputs, self.val_fraction)

    @property
    def _sizes(self) -> Sizes:
        return Sizes(self.val_fraction, self.train_size, self.test_size)

    def load(self, data_dir: Path, seed: int) -> Task:
        """Read the table that comes with scikit-learn; `data_dir` is not used."""
        from sklearn import datasets

        spec = self.spec()
        bunch = getattr(datasets, f"load_{self.name}")()
        x, y = torch.from_numpy(bunch.data).double(), torch.from_numpy(bunch.target)
        classes = spec.kind == "classification"
        labels = y if classes else None
        order = seeded_order(len(y), labels, generator(seed, "split", self.name))
        num_train, _ = halves_of(len(y), self.test_fraction)
        train, test = order[:num_train].sort().values, order[num_train:].sort().values
        parts = divide(
            train, test, self._sizes, seed, None if labels is None else y[train], None if labels is None else y[test]
        )
        return table_task(
            spec,
            x,
            y if classes else y.double().unsqueeze(1),
            parts,
            class_names=tuple(map(str, bunch.target_names)) if classes else (),
            feature_names=tuple(map(str, bunch.feature_names)),
        )
