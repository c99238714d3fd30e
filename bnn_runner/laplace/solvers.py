"""Solvers of (I + H̃) u = b for many right-hand sides, by products with H̃ = Λ^{-½} H Λ^{-½} alone.

Here u = Λ^½ z are whitened weights. The error of a solution with residual r is measured in posterior standard
deviations: e = (I + H̃)⁻¹ r has |aᵀe| ≤ sd(aᵀu) · √(rᵀ(I + H̃)⁻¹r) in every direction a, and that root is at
most ‖r‖, which is computed. So no linear function of the weights, and no output of the tangent model at any
input, is off by more than `error` = ‖r‖ times its own posterior standard deviation.

The prior is the only preconditioner: on trained networks, Kronecker factors or the diagonal of H, which
fill directions without data, needed from 1.1 to more than 8 times as many steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.errors import RunFailed
from bnn_runner.rng import generator

ENOUGH_PROGRESS = 0.5
"""Conjugate gradients restart as long as a round at least halves the error."""
STEEPEST_BATCHES, STEEPEST_STEPS = 3, 8
"""Minibatches, and power iterations on each, to find the longest step of descent."""
DIVERGED = 10.0
"""A relative residual above this means divergence, not slow descent."""

Objective = Literal["low_variance", "noisy_targets"]


@dataclass(frozen=True)
class Whitened:
    """H̃ = Λ^{-½} H Λ^{-½}; `scale` [P] is the diagonal of Λ^{-½}."""

    rows: GGNOperator
    scale: Tensor

    def product(self, vectors: Tensor, indices: Tensor | None = None) -> Tensor:
        """H̃ v for vectors [S, P]; with `indices`, from these points only. One pass over them."""
        return self.scale * self.rows.product(self.scale * vectors, indices)


@dataclass(frozen=True)
class Right:
    """Right-hand sides b = fixed + noise [S, P]; for draws, noise = Λ^{-½} JᵀRε with `epsilon` [N, C, S]."""

    fixed: Tensor
    noise: Tensor
    epsilon: Tensor | None = None

    @property
    def total(self) -> Tensor:
        return self.fixed + self.noise


@dataclass(frozen=True)
class Solution:
    """Solutions u [S, P], the bound `error` [S] in posterior standard deviations, and `residual` [S] = ‖r‖/‖b‖."""

    values: Tensor
    error: Tensor
    residual: Tensor


class Solver(Protocol):
    """Solves (I + H̃) u = b from a start [S, P]."""

    def __call__(self, matrix: Whitened, right: Right, start: Tensor) -> Solution: ...


def solution_of(values: Tensor, residual: Tensor, right: Tensor) -> Solution:
    """A solution u [S, P] with its error, from the true residual b − (I + H̃)u and b = `right` [S, P]."""
    error = residual.norm(dim=1)
    return Solution(values, error, error / right.norm(dim=1).clamp_min(torch.finfo(error.dtype).tiny))


@dataclass(frozen=True)
class ConjugateGradients:
    """Conjugate gradients for each right-hand side, in common passes, until every error is within `tolerance`.

    At most `passes` over the data. The error is that of the true residual, recomputed at the end of a
    round; where rounding has made it differ from that of the recursion, another round starts from there.
    """

    tolerance: float
    passes: int

    def __call__(self, matrix: Whitened, right: Right, start: Tensor) -> Solution:
        b, first = right.total, matrix.rows.passes

        def residual_of(u: Tensor) -> Tensor:
            return b - u - matrix.product(u)

        u, residual = start, residual_of(start)
        while True:
            error = residual.norm(dim=1)
            left = int(self.passes - (matrix.rows.passes - first) - 1)
            if not bool((error > self.tolerance).any()) or left < 1:
                break
            moved = self._round(matrix, u, residual, left)
            again = residual_of(moved)
            better = (again.norm(dim=1) < error).unsqueeze(1)  # rounding can make it worse; then the old one is kept
            u, residual = torch.where(better, moved, u), torch.where(better, again, residual)
            if float(residual.norm(dim=1).max()) > ENOUGH_PROGRESS * float(error.max()):
                break
        if not bool(torch.isfinite(residual).all()):
            raise RunFailed(
                "conjugate gradients met NaN or infinity: the curvature is not finite, or the prior is too weak "
                "compared with rounding. Raise the prior precision (hyper=fixed hyper.precision=...)."
            )
        return solution_of(u, residual, b)

    def _round(self, matrix: Whitened, start: Tensor, residual: Tensor, passes: int) -> Tensor:
        """At most `passes` steps from `start` [S, P]; right-hand sides that have converged are skipped."""
        solution = start.clone()
        active = torch.nonzero(residual.norm(dim=1) > self.tolerance).squeeze(1)
        r = direction = residual[active]
        size = r.square().sum(1)
        for _ in range(passes):
            product = direction + matrix.product(direction)
            alpha = (size / (direction * product).sum(1)).unsqueeze(1)
            solution[active] += alpha * direction
            r = r - alpha * product
            before, size = size, r.square().sum(1)
            going = size > self.tolerance**2
            if not bool(going.any()):
                break
            direction = r + (size / before).unsqueeze(1) * direction
            if not bool(going.all()):
                active, r, direction, size = active[going], r[going], direction[going], size[going]
        return solution


@dataclass(frozen=True)
class Descent:
    """Stochastic gradient descent with Nesterov's momentum, and the average of the last half of its iterates.

    `step` is in units of the inverse of the largest eigenvalue of a minibatch's matrix; at most `passes` over the
    data are made. The objective of a draw is quadratic, with the same minimum in
    both forms (Antorán et al. 2023): low_variance, ½‖RᵀJ z‖² + ½‖z − θ‖²_Λ with θ = θ₀ + Λ⁻¹JᵀRε;
    noisy_targets, ½‖RᵀJ z − ε‖² + ½‖z − θ₀‖²_Λ. Their minibatch gradients differ in variance.
    """

    step: float
    momentum: float
    batch_size: int
    passes: int
    objective: Objective

    def __call__(self, matrix: Whitened, right: Right, start: Tensor) -> Solution:
        """Raises `RunFailed` where it diverges."""
        rows = matrix.rows
        count, first = len(rows), rows.passes
        epsilon = right.epsilon if self.objective == "noisy_targets" else None
        linear = right.total if epsilon is None else right.fixed
        step = self.step / self._steepest(matrix)
        u, velocity = start.clone(), torch.zeros_like(start)
        average, averaged = torch.zeros_like(start), 0
        per_pass = -(-count // self.batch_size)
        total = max(1, int((self.passes - (rows.passes - first) - 1) * per_pass))
        order = torch.empty(0, dtype=torch.int64)

        def off_target(part: Tensor, moved: Tensor) -> Tensor:
            return moved if epsilon is None else moved - epsilon[part].to(moved)

        for i in range(total):
            if i % per_pass == 0:
                order = torch.randperm(count, generator=generator(0, "solver order", i // per_pass))
            chosen = order[(i % per_pass) * self.batch_size :][: self.batch_size]
            ahead = u + self.momentum * velocity
            data = rows.jvp_then_vjp(matrix.scale * ahead, off_target, chosen)
            gradient = matrix.scale * data * (count / len(chosen)) + ahead - linear
            velocity = self.momentum * velocity - step * gradient
            u = u + velocity
            if 2 * i >= total:
                averaged += 1
                average += (u - average) / averaged
        solution = solution_of(average, right.total - average - matrix.product(average), right.total)
        if not bool(torch.isfinite(solution.error).all()) or float(solution.residual.max()) > DIVERGED:
            raise RunFailed(
                f"gradient descent for the draws diverged with method.sgd_step={self.step}: the step is too long for "
                "some minibatch. Lower method.sgd_step, or raise method.sgd_batch_size."
            )
        return solution

    def _steepest(self, matrix: Whitened) -> float:
        """The largest eigenvalue of I + H̃_b over a few minibatches b, each scaled to all N points."""
        count, stream, largest = len(matrix.rows), generator(0, "steepest"), 0.0
        for _ in range(STEEPEST_BATCHES):
            chosen = torch.randperm(count, generator=stream)[: self.batch_size]
            v = torch.randn(1, matrix.rows.size, generator=stream, dtype=torch.float64).to(matrix.scale)
            for _ in range(STEEPEST_STEPS):
                v = v / v.norm()
                v = v + matrix.product(v, chosen) * (count / len(chosen))
            largest = max(largest, float(v.norm()))
        return largest
