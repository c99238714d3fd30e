"""KL(q ‖ prior) of a factorised Gaussian q = Π N(μ, σ²), with its gradients in μ and σ, in nats.

Both are computed without autograd: each term depends on one weight, and a step needs the gradients only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class KLTerm(Protocol):
    """KL of one tensor, exact or by one sample w = μ + σ ε."""

    def value(self, mu: Tensor, sigma: Tensor, eps: Tensor) -> Tensor: ...

    def add_gradients(
        self, weight: float, mu: Tensor, sigma: Tensor, eps: Tensor, in_mu: Tensor, in_sigma: Tensor
    ) -> None:
        """Add `weight` times ∂KL/∂μ and ∂KL/∂σ to `in_mu` and `in_sigma`, in place (fresh memory costs more)."""
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

    log p is the wide part's logarithm, whose gradient is exact, plus a spike s(w) around 0. The spike's gradient is
    the score-function estimator with control variate s(μ): E (s(w) − s(μ)) ε/σ in μ, E (s(w) − s(μ)) (ε² − 1)/σ in σ.
    Differentiating s(w) itself is unbiased too, but where q is wider than the spike (σ₂ = e⁻⁸) its slope is in the
    thousands and rarely sampled: means are pushed out of the spike's range, and useless weights keep a large mean.
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
        precision = 1 / self.sigma1**2
        in_mu.add_(mu, alpha=weight * precision)
        in_sigma.add_(sigma, alpha=weight * precision).addcdiv_(sigma.new_ones(()), sigma, value=-weight)
        # s(w) − s(μ) as one logarithm: the digits that log1p would add are negligible compared with the sum's noise.
        gain = self._ratio(torch.addcmul(mu, sigma, eps)).add_(1).div_(self._ratio(mu).add_(1)).log_().div_(sigma)
        in_mu.addcmul_(gain, eps, value=-weight)
        in_sigma.add_(gain, alpha=weight).addcmul_(gain.mul_(eps), eps, value=-weight)

    def _ratio(self, w: Tensor) -> Tensor:
        """r(w), the narrow part divided by the wide one; s = log(1 + r)."""
        offset = math.log((1 - self.weight) / self.sigma2) - math.log(self.weight / self.sigma1)
        slope = 0.5 * (1 / self.sigma2**2 - 1 / self.sigma1**2)
        # Below e^−87 float32 has no normal numbers, and exp is ten to fifty times as slow; s is almost 0 there.
        return w.square().mul_(-slope).add_(offset).clamp_min_(-87.0).exp_()
