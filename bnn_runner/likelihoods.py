"""Likelihoods: log-probability, moments and the root of the output-space curvature.

All of them broadcast over leading axes, so that S draws or L lanes are scored at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.errors import UserError

_LOG_2PI = math.log(2 * math.pi)


@dataclass(frozen=True)
class Categorical:
    """Softmax classes; y [B] int64, outputs [..., B, K] logits."""

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        log_probs = torch.log_softmax(outputs, dim=-1)
        return log_probs.gather(-1, y.expand(outputs.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """K × (K−1) root of diag(p) − p pᵀ, which is singular (its rank is K−1).

        A = diag(√p) − p √pᵀ is a K × K root and A √p = 0, so the Householder reflection that takes
        √p to the last axis makes one column of it vanish; the others are the root.
        """
        root_p = torch.softmax(outputs, dim=-1).sqrt()
        root_p = root_p / root_p.norm(dim=-1, keepdim=True)
        square = torch.diag_embed(root_p) - root_p.square().unsqueeze(-1) * root_p.unsqueeze(-2)
        # v = √p + e_last: no cancellation, as √p ≥ 0.
        v = root_p.clone()
        v[..., -1] += 1
        reflected = square - (square @ v.unsqueeze(-1)) * v.unsqueeze(-2) / (v.square().sum(-1)[..., None, None] / 2)
        return reflected[..., :-1]


@dataclass(frozen=True)
class Gaussian:
    """Homoscedastic Gaussian; y [B, K], outputs [..., B, K]; `log_noise` is log σ, broadcast to [..., B, K]."""

    log_noise: Tensor

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Sum over the K outputs of log N(y_k; outputs_k, σ_k²)."""
        z = (y - outputs) * torch.exp(-self.log_noise)
        return (-0.5 * (z.square() + _LOG_2PI) - self.log_noise).sum(-1)

    def mean_variance(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [..., B, K] and variance (broadcastable to it) of y, standardised units."""
        return outputs, torch.exp(2 * self.log_noise)

    def curvature_root(self, outputs: Tensor) -> Tensor:
        """diag(1/σ), [B, K, K]."""
        return torch.diag_embed(torch.exp(-self.log_noise).expand(outputs.shape))


@dataclass(frozen=True)
class NoiseRule:
    """How the regression noise of every method in a comparison comes about.

    learned: log σ is trained with the weights from the residual variance of the initial network;
    fixed: `sigma`, in the target's own units; residual: weights are trained at σ = 1 (standardised),
    then σ² is the mean squared training residual.
    """

    noise: Literal["learned", "fixed", "residual"] = "learned"
    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.noise == "fixed" and self.sigma is None:
            raise UserError(
                "likelihood.noise=fixed has no noise level. The rule takes the standard deviation as given. "
                "Add likelihood.sigma=VALUE, in the target's own units."
            )
        if self.sigma is not None and not self.sigma > 0:
            raise UserError(f"likelihood.sigma={self.sigma} is not a standard deviation. It must be above 0.")
        if self.noise != "fixed" and self.sigma is not None:
            raise UserError(
                f"likelihood.sigma={self.sigma} would be ignored under likelihood.noise={self.noise}. "
                "Use likelihood.noise=fixed with it, or drop it."
            )
