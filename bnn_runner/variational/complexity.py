"""KL(q ‖ prior) of a factorised Gaussian q = Π N(μ, σ²), with its gradients in μ and σ, in nats.

Both are computed without autograd: the terms act on each weight alone, and a step needs no value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Complexity(Protocol):
    """KL of one tensor, exact or by one sample w = μ + σ ε."""

    def value(self, mu: Tensor, sigma: Tensor, eps: Tensor) -> Tensor: ...

    def add_gradients(
        self, weight: float, mu: Tensor, sigma: Tensor, eps: Tensor, in_mu: Tensor, in_sigma: Tensor
    ) -> None:
        """`weight` times ∂KL/∂μ and ∂KL/∂σ are added to `in_mu` and `in_sigma` in place (fresh memory costs more)."""
        ...

    @property
    def needs_eps(self) -> bool: ...


@dataclass(frozen=True)
class GaussianPrior:
    """N(0, 1/λ): KL = Σ ½ (λ(μ² + σ²) − 1 − log λ) − log σ, exact (`eps` is not used)."""

    precision: float
    needs_eps: bool = False

    def value(self, mu: Tensor, sigma: Tensor, eps: Tensor) -> Tensor:
        squares = mu.double().square() + sigma.double().square()
        return (0.5 * (self.precision * squares - 1 - math.log(self.precision)) - sigma.double().log()).sum()

    def add_gradients(
        self, weight: float, mu: Tensor, sigma: Tensor, eps: Tensor, in_mu: Tensor, in_sigma: Tensor
    ) -> None:
        in_mu.add_(mu, alpha=weight * self.precision)
        in_sigma.add_(sigma, alpha=weight * self.precision).addcdiv_(sigma.new_ones(()), sigma, value=-weight)


@dataclass(frozen=True)
class ScaleMixture:
    """π N(0, σ₁²) + (1 − π) N(0, σ₂²) (Blundell et al. 2015, eq. 7).

    The entropy of q is exact; E_q log p(w) is estimated at one sample w = μ + σ ε.
    """

    weight: float
    sigma1: float
    sigma2: float
    needs_eps: bool = True

    def _logs(self, w: Tensor) -> tuple[Tensor, Tensor]:
        first = math.log(self.weight / self.sigma1) - 0.5 * (w / self.sigma1).square()
        second = math.log((1 - self.weight) / self.sigma2) - 0.5 * (w / self.sigma2).square()
        return first, second

    def value(self, mu: Tensor, sigma: Tensor, eps: Tensor) -> Tensor:
        log_prior = torch.logaddexp(*self._logs((mu + sigma * eps).double()))  # less ½ log 2π, as below
        return -(sigma.double().log() + 0.5).sum() - log_prior.sum()

    def add_gradients(
        self, weight: float, mu: Tensor, sigma: Tensor, eps: Tensor, in_mu: Tensor, in_sigma: Tensor
    ) -> None:
        w = torch.addcmul(mu, sigma, eps)
        narrow, wide = 1 / self.sigma2**2, 1 / self.sigma1**2
        # The share of the wide part is a logistic function of w²: its logit is linear in w².
        offset = math.log(self.weight / self.sigma1) - math.log((1 - self.weight) / self.sigma2)
        share = torch.sigmoid(w.square().mul_(0.5 * (narrow - wide)).add_(offset))
        slope = share.mul_(wide - narrow).add_(narrow).mul_(w)  # −d log p/dw
        in_mu.add_(slope, alpha=weight)
        in_sigma.addcmul_(slope, eps, value=weight).addcdiv_(sigma.new_ones(()), sigma, value=-weight)
