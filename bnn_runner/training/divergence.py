"""Checks for diverged trainings: a loss or a weight that is infinite or NaN."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from bnn_runner.models.likelihoods import noise_advice


class Diverged(Exception):
    """Some lanes (`lanes` are their indices) reached a non-finite loss or weight; the message names the step."""

    def __init__(self, message: str, lanes: tuple[int, ...]) -> None:
        super().__init__(message)
        self.lanes = lanes


def check_loss(nll: Tensor, step: int, steps_per_epoch: int, lr: float, log_noise: Tensor | None = None) -> None:
    """Checks the losses of one step.

    Args:
        nll: Loss of each lane, [L].
        step: Number of updates so far, this one included.
        steps_per_epoch: Updates per epoch.
        lr: `schedule.lr`, for the message.
        log_noise: Log σ in standardised units where it is fixed; a small one is named first in the message.

    Raises:
        Diverged: If a loss is not finite.
    """
    if math.isfinite(nll.sum().item()):
        return
    lanes = tuple(int(i) for i in (~torch.isfinite(nll)).nonzero().flatten())
    epoch = (step - 1) // steps_per_epoch + 1
    raise Diverged(
        f"training diverged: the loss became {float(nll[lanes[0]])} at step {step} (epoch {epoch}). "
        f"{noise_advice(log_noise)}Lower schedule.lr (now {lr}) or add warm-up with schedule.warmup_epochs.",
        lanes,
    )


def check_weights(tensors: Iterable[Tensor], step: int, lr: float, log_noise: Tensor | None = None) -> None:
    """Checks the weights after the last update, which no later loss would reveal.

    Args:
        tensors: Parameters and floating-point buffers, [L, ...] each.
        step: Number of updates.
        lr: `schedule.lr`, for the message.
        log_noise: Log σ in standardised units where it is fixed; a small one is named first in the message.

    Raises:
        Diverged: If a weight is not finite.
    """
    finite = torch.stack([torch.isfinite(t.detach()).reshape(len(t), -1).all(1) for t in tensors]).all(0)
    if not bool(finite.all()):
        raise Diverged(
            f"training diverged: the weights became infinite or NaN in the last update (step {step}). "
            f"{noise_advice(log_noise)}Lower schedule.lr (now {lr}) or add warm-up with schedule.warmup_epochs.",
            tuple(int(i) for i in (~finite).nonzero().flatten()),
        )
