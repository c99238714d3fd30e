"""What the predictive distribution of a split says at each point: a weighted mixture over draws, in closed form.

Metrics, figures and predictions for new points share these. Shapes: S draws, N points, K outputs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bnn_runner.scoring import Evaluation, SplitEvaluation


def log_weights(evaluation: Evaluation, num_draws: int | None = None) -> Tensor:
    """Normalised log-weights [S] (of the first `num_draws` draws): their exponentials sum to one."""
    return torch.log_softmax(evaluation.log_weights[:num_draws].double(), 0)


def log_mixture(loglik: Tensor, log_weight: Tensor) -> Tensor:
    """Weighted log-mean-exp, log sum_s w_s exp(loglik[s, ...]): [S, ...] and normalised log w [S] -> [...], nats."""
    shape = (len(log_weight),) + (1,) * (loglik.dim() - 1)
    return torch.logsumexp(loglik + log_weight.to(loglik.dtype).reshape(shape), dim=0).double()


def mixture_mean(values: Tensor, log_weight: Tensor) -> Tensor:
    """sum_s w_s values[s, ...]: [S or 1, ...] -> [...]; a first axis of 1 holds for every draw."""
    if len(values) == 1:
        return values[0].double()
    return torch.tensordot(log_weight.exp(), values.double(), dims=1)


def total_entropy(split: SplitEvaluation) -> Tensor:
    """Entropy [N] of the predictive class probabilities, nats; 0 log 0 = 0."""
    assert split.mean_probs is not None
    probs = split.mean_probs.double()
    return -torch.xlogy(probs, probs).sum(-1)


def variance_parts(split: SplitEvaluation, log_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Aleatoric and epistemic variance of y, each [N, K], original units squared; their sum is the variance of y.

    From draws: sum_s w_s v_s, and the weighted variance over draws of the means (law of total variance). A closed form
    gives `epistemic` itself, and the rest is aleatoric.
    """
    assert split.means is not None and split.variances is not None
    num_points = split.means.shape[1]
    if split.epistemic is not None:
        epistemic = split.epistemic.double()
        return (split.variances[0].double() - epistemic).expand_as(epistemic), epistemic
    centre = mixture_mean(split.means, log_weight)
    epistemic = mixture_mean((split.means.double() - centre).square(), log_weight)
    aleatoric = mixture_mean(split.variances, log_weight)
    return aleatoric.expand(num_points, centre.shape[-1]), epistemic


def pit(split: SplitEvaluation, log_weight: Tensor) -> Tensor:
    """Probability integral transform [N, K]: sum_s w_s Phi((y - m_s) / sd_s), uniform when calibrated."""
    assert split.means is not None and split.variances is not None and split.targets is not None
    sd = split.variances.double().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    below = 0.5 * (1 + torch.erf((split.targets - split.means.double()) / (sd * math.sqrt(2))))
    return mixture_mean(below, log_weight)
