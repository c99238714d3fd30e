"""Closed-form predictive distributions: from a Gaussian over the network's outputs to one over targets.

Shapes: mean [B, K], covariance [B, K, K] of the outputs at B points. Log-probabilities are in nats. They come
without draws, so they say nothing about several points jointly.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bnn_runner.base import Moments, Predictive
from bnn_runner.errors import RunFailed

LARGEST_NEGATIVE = 1e-4  # of the largest variance: more than this is a bug, not rounding


def variances(covariance: Tensor) -> tuple[Tensor, int]:
    """The diagonal [B, K] of `covariance` with tiny negative entries set to zero, and how many there were.

    Raises:
        RunFailed: a variance is more negative than rounding can explain.
    """
    variance = torch.diagonal(covariance, dim1=-2, dim2=-1)
    negative = variance < 0
    count = int(negative.sum())
    if count:
        worst, largest = float(variance.min()), float(variance.max())
        if worst < -LARGEST_NEGATIVE * max(largest, 1e-12):
            raise RunFailed(
                f"Predictive variances must not be negative; the smallest is {worst:.3g}, the largest {largest:.3g}. "
                "The posterior's covariance has lost its numerical precision. Use a larger prior precision."
            )
        variance = variance.clamp(min=0)
    return variance, count


def probit_log_probs(mean: Tensor, variance: Tensor) -> Tensor:
    """Probit approximation: log softmax(m / sqrt(1 + pi/8 v)) [B, K], with v [B, K] the logits' marginal variances.

    MacKay (1992), "The evidence framework applied to classification networks", for each logit.
    """
    return torch.log_softmax(mean / torch.sqrt(1 + math.pi / 8 * variance), dim=-1)


def bridge_log_probs(moments: Moments) -> Tensor:
    """Laplace bridge: log of the mean of its Dirichlet, [B, K].

    The Gaussian is first conditioned on logits that sum to zero, where it matches one Dirichlet:
    alpha_i = (1 - 2/K + exp(m_i) / K^2 sum_j exp(-m_j)) / v_i. Hobbhahn, Kristiadi & Hennig (2022),
    "Fast predictive uncertainty for classification with Bayesian deep networks". Computed in logs,
    so that logits of any size give finite numbers.
    """
    mean, covariance = moments.mean, moments.covariance
    num_classes = mean.shape[-1]
    row_sums = covariance.sum(-1)  # Sigma 1, [B, K]
    total = row_sums.sum(-1, keepdim=True)  # 1' Sigma 1, [B, 1]
    tiny = torch.finfo(mean.dtype).tiny ** 0.5
    # Without any variance along 1 the limit of an isotropic covariance is taken: centre the logits.
    gain = torch.where(total > tiny, row_sums / total.clamp(min=tiny), torch.full_like(row_sums, 1 / num_classes))
    centred = mean - gain * mean.sum(-1, keepdim=True)
    variance = torch.diagonal(covariance, dim1=-2, dim2=-1) - gain * row_sums
    largest = torch.diagonal(covariance, dim1=-2, dim2=-1).amax(-1, keepdim=True)
    variance = torch.maximum(variance, (torch.finfo(mean.dtype).eps * largest).clamp(min=tiny))
    shape_term = centred + torch.logsumexp(-centred, -1, keepdim=True) - 2 * math.log(num_classes)
    constant = 1 - 2 / num_classes
    log_constant = math.log(constant) if constant > 0 else -math.inf
    log_alpha = torch.logaddexp(torch.full_like(shape_term, log_constant), shape_term) - variance.log()
    return torch.log_softmax(log_alpha, dim=-1)


def closed_form_log_probs(moments: Moments, predictive: Predictive, temperature: float | None) -> tuple[Tensor, int]:
    """Log class probabilities [B, K] by bridge or probit, and how many variances were repaired.

    Args:
        moments: of the logits.
        predictive: bridge, or anything else for probit.
        temperature: T in p ∝ p^(1/T); None for 1.
    """
    moments = Moments(widest_on_device(moments.mean), widest_on_device(moments.covariance))
    variance, repaired = variances(moments.covariance)
    log_probs = bridge_log_probs(moments) if predictive == "bridge" else probit_log_probs(moments.mean, variance)
    return (log_probs if temperature is None else torch.log_softmax(log_probs / temperature, -1)), repaired


def widest_on_device(values: Tensor) -> Tensor:
    """In float64 where the device has it, else (MPS) in float32."""
    return values.float() if values.device.type == "mps" else values.double()


def gaussian_log_prob(y: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Log-density log N(y; mean, covariance) over the last axis: y and mean [..., D], covariance [..., D, D] -> [...].

    NaN where a covariance is not positive definite (or not finite), so that it stays visible.
    """
    factor, info = torch.linalg.cholesky_ex(covariance)
    residual = (y - mean).unsqueeze(-1)
    whitened = torch.linalg.solve_triangular(factor, residual, upper=False).squeeze(-1)
    half_log_det = torch.diagonal(factor, dim1=-2, dim2=-1).log().sum(-1)
    value = -0.5 * whitened.square().sum(-1) - half_log_det - 0.5 * y.shape[-1] * math.log(2 * math.pi)
    return torch.where(info == 0, value, torch.full_like(value, math.nan))
