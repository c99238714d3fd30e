"""The Laplace evidence, and the validation score of a prior precision, both as functions of the precisions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bnn_runner.base import Likelihood, Network
from bnn_runner.likelihoods import Gaussian
from bnn_runner.linearised.algebra import wide
from bnn_runner.linearised.groups import Group
from bnn_runner.linearised.jacobians import Jacobians
from bnn_runner.linearised.posterior import WeightGaussian
from bnn_runner.predictives import gaussian_log_prob
from bnn_runner.streams import generator
from bnn_runner.tasks import Task

VALIDATION_DRAWS = 200
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


@torch.no_grad()
def validation_logliks(
    task: Task, jacobians: Jacobians, curvature: Curvature, candidates: Sequence[Tensor]
) -> list[float]:
    """Mean log-likelihood of the validation part for each candidate [T]; one pass over the Jacobians.

    Regression: the exact Gaussian predictive. Classes and heteroscedastic regression have none: `VALIDATION_DRAWS`
    draws of each point's outputs. (Probit would take the logits' common shift, which no softmax sees and no data
    inform, for doubt, and shrink the posterior to nothing.)
    """
    gaussians = [curvature.gaussian(c) for c in candidates]
    likelihood = jacobians.network.likelihood
    totals = torch.zeros(len(gaussians), dtype=torch.float64)
    batch_size = jacobians.batch_size(task.spec.num_outputs)
    for x, y in task.val.batches(batch_size):
        assert y is not None
        batch = jacobians(x)
        for i, gaussian in enumerate(gaussians):
            covariance = gaussian.covariance(batch)
            if isinstance(likelihood, Gaussian):
                noise = torch.diag_embed(torch.exp(2 * likelihood.log_noise).expand(batch.outputs.shape))
                totals[i] += gaussian_log_prob(y, batch.outputs, covariance + noise).sum().cpu()
            else:
                totals[i] += wide(_sampled_log_prob(likelihood, y, batch.outputs, covariance)).sum().cpu()
    return (totals / len(task.val) - float(wide(task.target_scale).log().sum())).tolist()


def _sampled_log_prob(likelihood: Likelihood, y: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Log E p(y_b | f_b) [B] over outputs f_b ~ N(mean_b, covariance_b), by draws that are the same in every call."""
    stream = generator(0, "validation outputs")
    normal = torch.randn(VALIDATION_DRAWS, 1, mean.shape[-1], generator=stream, dtype=torch.float64).to(mean)
    values, vectors = torch.linalg.eigh(covariance.to(mean))
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)  # [B, K, K]
    outputs = mean + (root @ normal.unsqueeze(-1)).squeeze(-1)  # [M, B, K]
    return torch.logsumexp(likelihood.log_prob(outputs, y), 0) - math.log(VALIDATION_DRAWS)
