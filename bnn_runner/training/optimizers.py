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

from bnn_runner.training.schedules import Schedule


class Optimizer(Protocol):
    """One update in place; `state` is all that the next one depends on beside the tensors themselves."""

    state: list[Tensor]

    def decay(self, decays: Sequence[float]) -> None:
        """From now on these decays, one a tensor."""
        ...

    def step(self, tensors: Sequence[Tensor], grads: Sequence[Tensor], lr: float) -> None: ...


class Adam:
    """Kingma & Ba 2015, β = (0.9, 0.999), ε = 1e-8; `decays` times each tensor joins its gradient."""

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
    """Momentum m ← μ m + g, g with decay times the tensor; the step is m, or g + μ m (Nesterov)."""

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
    """Each distinct decay with the places of its tensors: the update functions take one decay a call."""
    places: dict[float, list[int]] = {}
    for i, decay in enumerate(decays):
        places.setdefault(decay, []).append(i)
    return list(places.items())


def make_optimizer(schedule: Schedule, tensors: Sequence[Tensor], decays: Sequence[float]) -> Optimizer:
    """The schedule's optimiser, with fused updates where the device has them."""
    detached = [t.detach() for t in tensors]
    fused = tensors[0].device.type in ("cpu", "cuda")
    if schedule.optimizer == "adam":
        return Adam(detached, decays, fused)
    return SGD(detached, decays, fused, schedule.momentum, schedule.nesterov and schedule.momentum > 0)
