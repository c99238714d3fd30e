"""Adam and SGD over stacked tensors, by PyTorch's functional update steps.

The classes of `torch.optim` import the compiler stack when the first one is constructed, which doubles the start-up
time of a small run; the functions behind them do not. The state is plain tensors, so a checkpoint contains nothing
else. Updates are elementwise, so a lane does not depend on other lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from bnn_runner.training.schedules import Schedule


class Optimizer(Protocol):
    """An optimiser; together with the tensors themselves, `state` determines the next update."""

    state: list[Tensor]

    def decay(self, decays: Sequence[float]) -> None:
        """Sets the decay of each tensor for the following steps."""
        ...

    def step(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], lr: float) -> None:
        """Updates the tensors in place."""
        ...


class Adam:
    """Adam (Kingma & Ba 2015), β = (0.9, 0.999), ε = 1e-8; decay × tensor is added to the gradient."""

    def __init__(self, tensors: Sequence[Tensor], decays: Sequence[float], fused: bool) -> None:
        self.count, self.fused = len(tensors), fused
        self.decay(decays)
        moments = [torch.zeros_like(t) for t in (*tensors, *tensors)]
        device = tensors[0].device if fused else torch.device("cpu")
        self.state = moments + [torch.zeros((), dtype=torch.float32, device=device) for _ in tensors]

    def decay(self, decays: Sequence[float]) -> None:
        self.parts = _parts(decays)

    def step(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], lr: float) -> None:
        n, state = self.count, self.state
        for decay, part in self.parts:
            adam(
                [tensors[i] for i in part], [grads[i] for i in part], [state[i] for i in part],
                [state[n + i] for i in part], [], [state[2 * n + i] for i in part],
                fused=self.fused, foreach=False, amsgrad=False, beta1=0.9, beta2=0.999, lr=lr, weight_decay=decay,
                eps=1e-8, maximize=False,
            )  # fmt: skip


class SGD:
    """SGD with momentum: m ← μ m + g, where g includes decay × tensor; the step is m, or g + μ m (Nesterov)."""

    def __init__(
        self, tensors: Sequence[Tensor], decays: Sequence[float], fused: bool, momentum: float, nesterov: bool
    ) -> None:
        self.fused, self.momentum, self.nesterov = fused, momentum, nesterov
        self.state = [torch.zeros_like(t) for t in tensors] if momentum else []
        self.decay(decays)

    def decay(self, decays: Sequence[float]) -> None:
        self.parts = _parts(decays)

    def step(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], lr: float) -> None:
        for decay, part in self.parts:
            buffers: list[Tensor | None] = [self.state[i] if self.momentum else None for i in part]
            sgd(
                [tensors[i] for i in part], [grads[i] for i in part], buffers,
                fused=self.fused, foreach=False, weight_decay=decay, momentum=self.momentum, lr=lr, dampening=0.0,
                nesterov=self.nesterov, maximize=False,
            )  # fmt: skip


def _parts(decays: Sequence[float]) -> list[tuple[float, list[int]]]:
    """Each distinct decay with the indices of its tensors: the update functions take one decay per call."""
    indices: dict[float, list[int]] = {}
    for i, decay in enumerate(decays):
        indices.setdefault(decay, []).append(i)
    return list(indices.items())


def make_optimizer(schedule: Schedule, tensors: Sequence[Tensor], decays: Sequence[float]) -> Optimizer:
    """Returns the schedule's optimiser, with fused updates if the device supports them.

    Args:
        schedule: Names the optimiser and its momentum.
        tensors: The tensors to update.
        decays: Decay of each tensor.
    """
    detached = [t.detach() for t in tensors]
    fused = tensors[0].device.type in ("cpu", "cuda")
    if schedule.optimizer == "adam":
        return Adam(detached, decays, fused)
    return SGD(detached, decays, fused, schedule.momentum, schedule.nesterov and schedule.momentum > 0)
