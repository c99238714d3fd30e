"""The tangent model h(x, v) = f(x, w*) + J(x)(v − w*) and its own optimum v*.

v* = argmin_v  L_h(v) = Σ_n −log p(y_n | h(x_n, v)) + ½ vᵀΛv, which is convex. A network with
normalisation layers, or one whose training stopped early, is no stationary point of L_f at w*; the
evidence of the tangent model is to be taken at v* (Antorán et al. 2022). Weights held at MAP
stay at w* and have no part in the penalty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnn_runner.linearised.algebra import wide
from bnn_runner.linearised.jacobians import BatchJacobians, Jacobians
from bnn_runner.linearised.posterior import WeightGaussian
from bnn_runner.tasks import Task

KEPT_BYTES = 2**30
"""Jacobians of the whole training set up to this size are kept; larger ones are made anew in each pass."""


@dataclass(frozen=True)
class TangentOptimum:
    """v* [P], Σ log p(y | h(v*)) in standardised units, the relative gradient left, and passes over the data."""

    weights: Tensor
    loglik: float
    gradient: float
    passes: int

    def converged(self, tolerance: float) -> bool:
        return self.gradient <= tolerance


@dataclass(frozen=True)
class _Piece:
    """A batch: outputs f [B, K] at w*, targets, and its Jacobian as kept rows [B, K, P] or as factors."""

    outputs: Tensor
    targets: Tensor
    rows: Tensor | None
    factors: BatchJacobians | None

    def push(self, v: Tensor) -> Tensor:
        """J v, [B, K] float64."""
        if self.rows is not None:
            return self.rows @ v
        assert self.factors is not None
        return wide(self.factors.push(v.to(self.factors.outputs)))

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu, [P] float64."""
        if self.rows is not None:
            return torch.einsum("bkp,bk->p", self.rows, u)
        assert self.factors is not None
        return wide(self.factors.pull(u.to(self.factors.outputs)))


@dataclass
class TangentModel:
    """The tangent model on the training set. Counts its passes: the cost of all that is done with it."""

    task: Task
    jacobians: Jacobians
    passes: int = 0
    _kept: list[_Piece] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parameters = self.jacobians.network.parameters
        self.centre = torch.cat([self.jacobians.part(n, wide(parameters[n])) for n in self.jacobians.names])
        self.likelihood = self.jacobians.network.likelihood

    def _pieces(self) -> Iterator[_Piece]:
        """One pass over the training set, in order."""
        self.passes += 1
        if self._kept is not None:
            yield from self._kept
            return
        outputs = self.task.spec.num_outputs
        keep = 8 * len(self.task.train) * outputs * len(self.centre) <= KEPT_BYTES
        made = []
        for x, y in self.task.train.batches(self.jacobians.batch_size(outputs)):
            assert y is not None
            batch = self.jacobians(x)
            piece = _Piece(wide(batch.outputs), y, wide(batch.dense()) if keep else None, None if keep else batch)
            if keep:
                made.append(piece)
            yield piece
        if keep:
            self._kept = made

    def value_and_gradient(self, v: Tensor, precisions: Tensor) -> tuple[float, Tensor, float, float]:
        """L_h(v), its gradient [P], Σ log p, and the size that the gradient's two parts have before they cancel."""
        loglik, data = 0.0, torch.zeros_like(v)
        for piece in self._pieces():
            with torch.enable_grad():
                at = (piece.outputs + piece.push(v - self.centre)).requires_grad_()
                log_prob = self.likelihood.log_prob(at, piece.targets).sum()
                (score,) = torch.autograd.grad(log_prob, at)
            loglik += float(log_prob.detach())
            data -= piece.pull(score)
        prior = precisions * v
        return -loglik + 0.5 * float(prior @ v), data + prior, loglik, float(data.norm() + prior.norm())

    def curvature_product(self, v: Tensor, direction: Tensor, precisions: Tensor) -> Tensor:
        """(Σ_n JᵀB(h(x_n, v))J + Λ) d, [P]."""
        total = precisions * direction
        for piece in self._pieces():
            root = self.likelihood.curvature_root(piece.outputs + piece.push(v - self.centre))
            inside = torch.einsum("bkc,bk->bc", root, piece.push(direction))
            total = total + piece.pull(torch.einsum("bkc,bc->bk", root, inside))
        return total

    def optimum(
        self, precisions: Tensor, gaussian: WeightGaussian, start: Tensor, tolerance: float, budget: int
    ) -> TangentOptimum:
        """v* by Newton steps, each by conjugate gradients preconditioned with the fitted Σ ≈ (H + Λ)⁻¹.

        `precisions` [P] is the diagonal of Λ. Stops where ‖∇L_h‖ is `tolerance` of what its parts
        (data, prior) add up to without cancelling, or when `budget` passes over the data are spent;
        a pass makes the Jacobians anew where they are too many to keep. With the full curvature and
        Gaussian noise it takes one step, which is the closed form (H + Λ)⁻¹JᵀB(y − f + Jw*).
        """
        spent, v = self.passes, start
        value, gradient, loglik, size = self.value_and_gradient(v, precisions)
        while (ratio := float(gradient.norm()) / max(size, 1e-300)) > tolerance and self.passes - spent < budget:
            step = self._newton_step(v, gradient, precisions, gaussian, min(0.1, math.sqrt(ratio)), spent + budget)
            length = 1.0
            while True:
                moved = self.value_and_gradient(v + length * step, precisions)
                enough = moved[0] <= value + 1e-4 * length * float(gradient @ step) + 1e-12 * abs(value)
                if enough or length < 1e-6 or self.passes - spent >= budget:
                    break
                length /= 2
            if not enough:
                break
            v = v + length * step
            value, gradient, loglik, size = moved
        return TangentOptimum(v, loglik, float(gradient.norm()) / max(size, 1e-300), self.passes - spent)

    def _newton_step(
        self,
        v: Tensor,
        gradient: Tensor,
        precisions: Tensor,
        gaussian: WeightGaussian,
        tolerance: float,
        last: int,
    ) -> Tensor:
        """−(JᵀBJ + Λ)⁻¹ g at v, to a relative residual of `tolerance` in the preconditioned norm."""
        solution, residual = torch.zeros_like(v), -gradient
        preconditioned = gaussian.product(residual.unsqueeze(0))[0]
        direction, size = preconditioned, float(residual @ preconditioned)
        first = size
        while size > tolerance**2 * first and (self.passes < last or not bool(solution.any())):
            product = self.curvature_product(v, direction, precisions)
            alpha = size / float(direction @ product)
            solution, residual = solution + alpha * direction, residual - alpha * product
            preconditioned = gaussian.product(residual.unsqueeze(0))[0]
            before, size = size, float(residual @ preconditioned)
            direction = preconditioned + (size / before) * direction
        return solution
