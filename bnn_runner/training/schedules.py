"""Training schedules: optimiser, number of epochs and learning rate at each step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bnn_runner.errors import raise_all


@dataclass(frozen=True)
class Schedule:
    """Optimiser, length and learning rate of a training.

    The learning rate is lr × factor(step): a linear warm-up over `warmup_epochs`, then cosine (down to
    `final_fraction`), step (times `decay` at each of `milestones`, which are fractions of the epochs) or constant. It
    depends only on the step, so a resumed training needs no scheduler state.
    """

    optimizer: Literal["adam", "sgd"] = "adam"
    epochs: int = 100
    batch_size: int = 128
    lr: float = 0.001
    shape: Literal["cosine", "step", "constant"] = "cosine"
    warmup_epochs: float = 0.0
    final_fraction: float = 0.0
    milestones: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", tuple(self.milestones))
        problems = []
        if self.epochs < 1:
            problems.append(f"schedule.epochs must be at least 1; got {self.epochs}.")
        if self.batch_size < 1:
            problems.append(f"schedule.batch_size must be at least 1; got {self.batch_size}.")
        if not 0 < self.lr < math.inf:
            problems.append(f"schedule.lr must be positive and finite; got {self.lr}.")
        longest = self.epochs if self.epochs >= 1 else math.inf  # invalid epochs are reported only once, above
        if not 0 <= self.warmup_epochs <= longest:
            problems.append(
                f"schedule.warmup_epochs must be between 0 and schedule.epochs={self.epochs}; got {self.warmup_epochs}."
            )
        if not 0 <= self.final_fraction <= 1:
            problems.append(f"schedule.final_fraction must be between 0 and 1; got {self.final_fraction}.")
        if not 0 <= self.momentum < 1:
            problems.append(f"schedule.momentum must be in [0, 1); got {self.momentum}.")
        if any(not 0 < m < 1 for m in self.milestones):
            problems.append(
                f"schedule.milestones must be fractions of the epochs, between 0 and 1; got {list(self.milestones)}."
            )
        raise_all(problems)

    def lr_at(self, step: int, steps_per_epoch: int) -> float:
        """Returns the learning rate of update number `step` (from 0)."""
        total, warmup = self.epochs * steps_per_epoch, self.warmup_epochs * steps_per_epoch
        if step < warmup:
            return self.lr * (step + 1) / max(warmup, 1)
        done = (step - warmup) / max(total - warmup, 1)
        if self.shape == "cosine":
            low = self.final_fraction
            return self.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * done)))
        if self.shape == "step":
            return self.lr * self.decay ** sum(step >= m * total for m in self.milestones)
        return self.lr
