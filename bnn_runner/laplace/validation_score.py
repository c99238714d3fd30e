"""The validation score of prior precisions: the mean log-likelihood under the method's own predictive."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bnn_runner.base import Likelihood
from bnn_runner.curvature.base import Curvature
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.psd import wide
from bnn_runner.evaluation.closed_form import gaussian_log_prob
from bnn_runner.laplace.posterior import SampledNetworks
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.rng import generator
from bnn_runner.tasks import Task

VALIDATION_DRAWS = 200
_AT_ONCE = 20
Validation = Callable[[Task, Jacobians, Curvature, Sequence[Tensor]], list[float]]


@torch.no_grad()
def validation_logliks(
    task: Task, jacobians: Jacobians, curvature: Curvature, candidates: Sequence[Tensor]
) -> list[float]:
    """Mean log-likelihood of the validation part for each candidate [T]; one pass over the Jacobians.

    Regression: by the exact Gaussian predictive. Classes and heteroscedastic regression have none: by
    `VALIDATION_DRAWS` draws of each point's outputs. (Probit would mistake the logits' common shift, which affects
    neither softmax nor data, for uncertainty, and so shrink the posterior to nothing.)
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
    """Log E p(y_b | f_b) [B] over outputs f_b ~ N(mean_b, covariance_b), by the same draws in every call."""
    stream = generator(0, "validation outputs")
    normal = torch.randn(VALIDATION_DRAWS, 1, mean.shape[-1], generator=stream, dtype=torch.float64).to(mean)
    values, vectors = torch.linalg.eigh(covariance.to(mean))
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)  # [B, K, K]
    outputs = mean + (root @ normal.unsqueeze(-1)).squeeze(-1)  # [M, B, K]
    return torch.logsumexp(likelihood.log_prob(outputs, y), 0) - math.log(VALIDATION_DRAWS)


@torch.no_grad()
def network_validation_logliks(
    task: Task, jacobians: Jacobians, curvature: Curvature, candidates: Sequence[Tensor]
) -> list[float]:
    """The same for draws of the network itself: log E p(y | f(x, w* + δ)).

    By `VALIDATION_DRAWS` draws, from the same normals for every candidate.
    """
    likelihood = jacobians.network.likelihood
    found = []
    for candidate in candidates:
        networks = SampledNetworks(jacobians, curvature.gaussian(candidate), 0, 0, VALIDATION_DRAWS)
        parts = []
        for begin in range(0, VALIDATION_DRAWS, _AT_ONCE):
            some = networks[begin : begin + _AT_ONCE]
            each = [likelihood.log_prob(some(x), y) for x, y in task.val.batches(256) if y is not None]
            parts.append(torch.logsumexp(wide(torch.cat(each, -1)), 0))
        mean = torch.logsumexp(torch.stack(parts), 0).mean() - math.log(VALIDATION_DRAWS)
        found.append(float(mean - wide(task.target_scale).log().sum()))
    return found
