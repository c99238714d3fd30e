"""Regression noise chosen by the evidence together with the prior precisions, for every structure of curvature.

The noise variances σ_k² of training are divided by one common factor β, so that the curvature is βH with H as
fitted, and βH + Λ = β (H + M) with M = Λ/β. In terms of M,

    log p(D) = C + ½ NK log β − ½ β (R + ‖w‖²_M) − ½ [log det(H + M) − log det M],

R the sum of squared residuals over σ_k² and C the log-likelihood without residuals, both at
β = 1. The best β for given M is NK / (R + ‖w‖²_M), which is MacKay's (NK − γ)/R wherever M is stationary. So a rule
searches M alone, on the same spectrum as without noise, and the noise follows from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.curvature.base import Curvature, WeightGaussian
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobians import BatchJacobians
from bnn_runner.curvature.psd import wide
from bnn_runner.laplace.evidence import LogEvidence
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.tasks import Task


@dataclass(frozen=True)
class NoiseTerms:
    """`count` is N·K, `constant` is C in nats and original target units."""

    count: int
    constant: float

    @classmethod
    def of(cls, task: Task, likelihood: Gaussian) -> NoiseTerms:
        points, outputs = len(task.train), task.spec.num_outputs
        log_noise = (wide(likelihood.log_noise) + wide(task.target_scale).log()).expand(outputs).sum()
        count = points * outputs
        return cls(count, -points * float(log_noise) - 0.5 * count * math.log(2 * math.pi))


@dataclass(frozen=True)
class EvidenceWithNoise:
    """The evidence `inner` as a function of M = Λ/β, with the best noise factor β for each M."""

    inner: LogEvidence
    curvature: Curvature
    noise: NoiseTerms

    def factor(self, precisions: Tensor) -> Tensor:
        """The best β for given M: NK / (R + ‖w‖²_M), differentiable in M."""
        squares = self.inner.squares(precisions)
        penalty = (precisions.cpu().expand(len(squares)) * squares).sum()
        residuals = 2 * (self.noise.constant - self.inner.log_likelihood(precisions))
        return self.noise.count / (residuals + penalty)

    def __call__(self, precisions: Tensor) -> Tensor:
        gain = 0.5 * self.noise.count * (self.factor(precisions).log() - 1)
        return self.noise.constant + gain - 0.5 * self.curvature.log_det_ratio(precisions).cpu()

    def log_likelihood(self, precisions: Tensor) -> float:
        with torch.no_grad():
            beta = float(self.factor(precisions))
        misfit = beta * (self.noise.constant - self.inner.log_likelihood(precisions))
        return self.noise.constant + 0.5 * self.noise.count * math.log(beta) - misfit

    def squares(self, precisions: Tensor) -> Tensor:
        with torch.no_grad():
            return self.factor(precisions) * self.inner.squares(precisions)

    def gap(self, precisions: Tensor) -> float:
        """β times that of `inner`, like L_h."""
        gap = self.inner.gap(precisions)
        with torch.no_grad():
            return float(self.factor(precisions)) * gap if gap else 0.0

    @property
    def exhausted(self) -> bool:
        return self.inner.exhausted


def with_noise(network: Network, beta: float) -> Network:
    """The network with every noise variance divided by β."""
    assert isinstance(network.likelihood, Gaussian)
    return replace(network, likelihood=Gaussian(network.likelihood.log_noise - 0.5 * math.log(beta)))


@dataclass(frozen=True)
class NoisyGaussian:
    """N(0, Σ/β), for `inner` N(0, Σ)."""

    inner: WeightGaussian
    beta: float

    @property
    def rounded_information(self) -> float:
        return float(getattr(self.inner, "rounded_information", 0.0))

    def sample(self, seed: int, start: int, stop: int) -> Tensor:
        return self.inner.sample(seed, start, stop) * self.beta**-0.5

    def product(self, vectors: Tensor) -> Tensor:
        return self.inner.product(vectors) / self.beta

    def covariance(self, jacobians: BatchJacobians) -> Tensor:
        return self.inner.covariance(jacobians) / self.beta

    def covariance_root(self, jacobians: BatchJacobians) -> Tensor:
        return self.inner.covariance_root(jacobians) * self.beta**-0.5


@dataclass(frozen=True)
class NoisyCurvature:
    """βH, for `inner` H."""

    inner: Curvature
    beta: float

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.inner.groups

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        return self.inner.log_det_ratio(precisions / self.beta)

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        return self.inner.effective_dimensions(precisions / self.beta)

    def gaussian(self, precisions: Tensor) -> NoisyGaussian:
        return NoisyGaussian(self.inner.gaussian(precisions / self.beta), self.beta)
