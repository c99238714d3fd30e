"""Values of the tangent model's loss L_h, and bounds on how far they are above its minimum.

L_h(v) = Σ_n ℓ_n(h_n) + ½ vᵀΛv with ℓ_n = −log p(y_n | h_n). For softmax, every choice of class probabilities π_n gives
a bound by Fenchel duality (Boyd & Vandenberghe 2004, §5.1),

    L_h(v) − min L_h ≤ Σ_n KL(π_n ‖ p_n) + ½ ‖v − Λ⁻¹Jᵀ(y − π)‖²_Λ,    p_n = softmax(h_n).

With π = p it is ½ gᵀΛ⁻¹g of the gradient g, which is a hundred times too large along directions with much curvature.
With π = p + B J x for a Newton step x it is ½ xᵀ(H + Λ)x to second order: the Newton decrement, which is right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.base import Likelihood
from bnn_runner.models.likelihoods import Categorical, Gaussian

NEARLY = 0.999
"""Share of the step at which the first probability would vanish."""


@dataclass(frozen=True)
class TangentOptimum:
    """The end of a search for v*.

    Attributes:
        weights: v* [P].
        loglik: Σ log p(y | h(v*)) in standardised units.
        gradient: ‖∇L_h‖ relative to the sum of its parts' norms.
        gap: in nats, a bound: L_h is at most this far above its minimum, and the evidence this far below its value
            at v*.
        passes: over the data.
        route: how it was found: function space, newton, or sgd and newton.
    """

    weights: Tensor
    loglik: float
    gradient: float
    gap: float
    passes: float
    route: str = "newton"


@dataclass(frozen=True)
class State:
    """L_h(v) and its gradient [P] (0 where weights are held), Σ log p, the outputs h(v) [N, K].

    `size` is the sum of the norms of the gradient's two parts.
    """

    value: float
    gradient: Tensor
    loglik: float
    size: float
    outputs: Tensor

    @property
    def ratio(self) -> float:
        return float(self.gradient.norm()) / max(self.size, 1e-300)


def gradient_gap(gradient: Tensor, precisions: Tensor) -> float:
    """½ gᵀΛ⁻¹g over the weights that are not held, since L_h minus its penalty is convex."""
    free = precisions > 0
    return 0.5 * float((gradient[free].square() / precisions[free]).sum())


def dual_gap(
    likelihood: Likelihood, outputs: Tensor, moved: Tensor, gradient: Tensor, bent: Tensor, precisions: Tensor
) -> float:
    """The bound of the module's text with π = p + t B J x; infinity for a likelihood without a known conjugate.

    Args:
        likelihood: softmax, or a Gaussian with a fixed noise, whose loss is quadratic.
        outputs: h(v) [N, K].
        moved: J x [N, K] of any direction x.
        gradient: g at v [P].
        bent: H x [P] with the output curvatures B at h(v).
        precisions: the diagonal of Λ, [P].
    """
    length = 1.0
    if isinstance(likelihood, Categorical):
        p = torch.softmax(outputs, dim=-1)
        relative = moved - (p * moved).sum(-1, keepdim=True)  # (B J x)_k / p_k
        lowest = -float(relative.min())
        length = min(1.0, NEARLY / lowest) if lowest > 0 else 1.0
        change = length * relative
        distance = float((p * (1 + change) * torch.log1p(change)).sum())
    elif isinstance(likelihood, Gaussian):
        root = likelihood.curvature_root(outputs)
        distance = 0.5 * float(torch.einsum("nkc,nk->nc", root, moved).square().sum())
    else:
        return float("inf")
    return distance + gradient_gap(gradient + length * bent, precisions)
