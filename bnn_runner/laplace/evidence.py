"""The Laplace evidence as a function of the prior precisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.psd import wide
from bnn_runner.laplace.posterior import WeightGaussian
from bnn_runner.tasks import Task

At = Callable[[Tensor], tuple[float, Tensor]]
"""From precisions to Σ log p(y | ·) (nats, original units) and the squares of `PriorShape` at the point."""


class Curvature(Protocol):
    """What the evidence and the rules need of a fitted curvature, whose T groups each have a precision."""

    @property
    def groups(self) -> tuple[Group, ...]: ...

    def log_det_ratio(self, precisions: Tensor) -> Tensor: ...

    def effective_dimensions(self, precisions: Tensor) -> Tensor: ...

    def gaussian(self, precisions: Tensor) -> WeightGaussian: ...


@torch.no_grad()
def log_likelihood(task: Task, network: Network, batch_size: int = 1024) -> float:
    """Σ_n log p(y_n | f(x_n, w*)) over the training set, nats; regression in original target units."""
    total = 0.0
    for x, y in task.train.batches(batch_size):
        assert y is not None
        total += float(wide(network.likelihood.log_prob(network(x), y)).sum())
    return total - len(task.train) * float(wide(task.target_scale).log().sum())


def log_evidence(loglik: float, squares: Tensor, curvature: Curvature, precisions: Tensor) -> Tensor:
    """Log p(D) ≈ log p(D | w*) − ½ [w*ᵀΛw* + log det(H + Λ) − log det Λ], nats (MacKay 1992; Immer et al. 2021).

    `precisions` is one λ [1], one a group [T] or one a weight [P] of the basis, differentiable in it;
    `squares` are the squares that belong to them (see `PriorShape`). Weights held at MAP have no part in it.
    """
    penalty = (precisions.cpu().expand(len(squares)) * squares).sum()
    return loglik - 0.5 * (penalty + curvature.log_det_ratio(precisions).cpu())
