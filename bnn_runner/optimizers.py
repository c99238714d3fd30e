"""Adam and SGD over stacked tensors, by torch's own functional update steps.

`torch.optim`'s classes import the compiler stack when the first of them is made, which doubles the
start of a small run; the functions behind them do not. The state is plain tensors, so a checkpoint
holds nothing else. Updates act on each number alone: a lane among others moves as it would alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from bnn_runner.schedules import Schedule


class Optimizer(Protocol):
    """One update in place; `state` is all that the next one depends on beside the tensors themselves."""

    state: list[Tensor]

    def step(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], lr: float) -> None: ...


class Adam:
    """Kingma & Ba 2015, β = (0.9, 0.999), ε = 1e-8, no weight decay of its own."""

    def __init__(self, tensors: Sequence[Tensor], fused: bool) -> None:
        self.count, self.fused = len(tensors), fused
        moments = [torch.zeros_like(t) for t in (*tensors, *tensors)]
        device = tensors[0].device if fused else torch.device("cpu")
        self.state = moments + [torch.zeros((), dtype=torch.float32, device=device) for _ in tensors]

    def step(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], lr: float) -> None:
        n = self.count
        adam(
            list(tensors), list(grads), self.state[:n], self.state[n : 2 * n], [], self.state[2 * n :],
            fused=self.fused, foreach=False, amsgrad=False, beta1=0.9, beta2=0.999, lr=lr, weight_decay=0.0, eps=1e-8,
            maximize=False,
        )  # fmt: skip


class SGD:
    """Momentum m ← μ m + g; the step is m, or g + μ m (Nesterov)."""

    def __init__(self, tensors: Sequence[Tensor], fused: bool, momentum: float, nesterov: bool) -> None:
        self.fused, self.momentum, self.nesterov = fused, momentum, nesterov
        self.state = [torch.zeros_like(t) for t in tensors] if momentum else []

    def step(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], lr: float) -> None:
        buffers: list[Tensor | None] = [*self.state] if self.momentum else [None] * len(tensors)
        sgd(
            list(tensors), list(grads), buffers,
            fused=self.fused, foreach=False, weight_decay=0.0, momentum=self.momentum, lr=lr, dampening=0.0,
            nesterov=self.nesterov, maximize=False,
        )  # fmt: skip


def make_optimizer(schedule: Schedule, tensors: Sequence[Tensor]) -> Optimizer:
    """The schedule's optimiser, with fused updates where the device has them."""
    detached = [t.detach() for t in tensors]
    fused = tensors[0].device.type in ("cpu", "cuda")
    if schedule.optimizer == "adam":
        return Adam(detached, fused)
    return SGD(detached, fused, schedule.momentum, schedule.nesterov and schedule.momentum > 0)
