"""The tangent model h(x, v) = f(x, w*) + J(x)(v − w*) and its own optimum v*.

v* = argmin_v  L_h(v) = Σ_n −log p(y_n | h(x_n, v)) + ½ vᵀΛv, which is convex. For a network with
normalisation layers, or one whose training stopped early, w* is not a stationary point of L_f; the
evidence of the tangent model is then to be taken at v* (Antorán et al. 2022). Weights held at MAP
stay at w* and are not part of the penalty.

Where the training set has few outputs, v* is found in function space (`dual_tangent`); otherwise by
conjugate gradients within a number of passes over the data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from bnn_runner.curvature.base import WeightGaussian
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.products import Differentiated
from bnn_runner.curvature.psd import Repairs, wide
from bnn_runner.laplace import dual_tangent
from bnn_runner.runtime.console import Progress
from bnn_runner.runtime.memory import halving, memory_limit
from bnn_runner.tasks import Task

POINTS = 128
"""Points that are differentiated at once, at most."""
PASSES_KEPT, PASSES_RECOMPUTED = 2000, 100
"""Default numbers of passes over the data, with kept Jacobians and where each pass differentiates again."""
FLOAT32_GRADIENT = 1e-5
"""Relative gradients below this are rounding, where products are recomputed in float32."""
GAP_NATS = 1e-3
"""Distance of the evidence from its optimum that is negligible."""
_T = TypeVar("_T")
MOST_SHAPES = 3
"""Gram matrices are recomputed for another shape of Λ at most this many times."""


@dataclass(frozen=True)
class TangentOptimum:
    """The end of a search for v*.

    Attributes:
        weights: v* [P].
        loglik: Σ log p(y | h(v*)) in standardised units.
        gradient: ‖∇L_h‖ relative to the sum of its parts' norms.
        gap: ½ gᵀΛ⁻¹g in nats: L_h is at most this far above its minimum, and the evidence this far below its value at
            v*, since L_h minus its penalty is convex.
        passes: over the data.
    """

    weights: Tensor
    loglik: float
    gradient: float
    gap: float
    passes: int


@dataclass(frozen=True)
class _Piece:
    """A batch: outputs f [B, K] at w*, targets, and its Jacobian, as kept rows [B, K, P] or as products."""

    outputs: Tensor
    targets: Tensor
    rows: Tensor | None
    products: Differentiated | None

    def jvp(self, v: Tensor) -> Tensor:
        """J v, [B, K] float64."""
        if self.rows is not None:
            return self.rows @ v
        assert self.products is not None
        return wide(self.products.jvp(v))

    def vjp(self, u: Tensor) -> Tensor:
        """Jᵀu, [P] float64."""
        if self.rows is not None:
            return torch.einsum("bkp,bk->p", self.rows, u)
        assert self.products is not None
        return wide(self.products.vjp(u))


@dataclass(frozen=True)
class _State:
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


@dataclass
class TangentModel:
    """The tangent model on the training set. It counts its passes over the data, which are its cost.

    The Jacobians of the training set are kept where they fit into `kept_bytes` of the memory limit; otherwise,
    or where memory runs out while they are collected, each pass differentiates again. A pass in which memory
    runs out starts again with half as many points at once, counted in `repairs`.
    """

    task: Task
    jacobians: Jacobians
    progress: Progress = field(default=lambda stage, done, total: None, repr=False)
    repairs: Repairs = field(default_factory=Repairs, repr=False)
    passes: int = 0
    _last_pass: int = field(default=0, repr=False)
    _fits: bool = field(default=True, repr=False)
    _kept: list[_Piece] | None = field(default=None, repr=False)
    _grams: dual_tangent.Grams | None = field(default=None, repr=False)
    _alpha: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parameters = self.jacobians.network.parameters
        self.centre = torch.cat([self.jacobians.part(n, wide(parameters[n])) for n in self.jacobians.names])
        self.likelihood = self.jacobians.network.likelihood

    @property
    def keeps(self) -> bool:
        size = 8 * len(self.task.train) * self.task.spec.num_outputs * len(self.centre)
        return self._fits and size <= memory_limit().kept_bytes

    @property
    def max_passes(self) -> int:
        """The default number of passes over the data."""
        return PASSES_KEPT if self.keeps else PASSES_RECOMPUTED

    def reachable(self, tolerance: float) -> float:
        """`tolerance`, or the smallest relative gradient that rounding allows."""
        float64 = self.jacobians.network.parameters[self.jacobians.names[0]].dtype == torch.float64
        return tolerance if float64 or self.keeps else max(tolerance, FLOAT32_GRADIENT)

    @property
    def in_function_space(self) -> bool:
        """Whether v* is found in function space; no longer after several Λ of different shapes (see `Grams`)."""
        made = 0 if self._grams is None else self._grams.made
        return made <= MOST_SHAPES and dual_tangent.affordable(self.task, self.jacobians)

    def _halved(self, work: Callable[[], _T]) -> _T:
        """A whole pass; where memory runs out, it starts again in smaller chunks."""
        return halving(work, self._halve)

    def _halve(self) -> bool:
        if self.keeps and self._kept is None:
            self._fits = False
        return self.jacobians.halve(self.repairs)

    def _pieces(self) -> Iterator[_Piece]:
        """One pass over the training set, in order."""
        self.passes += 1
        for piece in self._made() if self._kept is None else self._kept:
            if self._last_pass:
                self.progress("tangent optimum", min(self.passes, self._last_pass) - 1, self._last_pass)
            yield piece

    def _made(self) -> Iterator[_Piece]:
        outputs = self.task.spec.num_outputs
        made = []
        keeps = self.keeps
        points = self.jacobians.batch_size(outputs) if keeps else self.jacobians.points_at_once(POINTS)
        for x, y in self.task.train.batches(points):
            assert y is not None
            if keeps:
                batch = self.jacobians(x)
                piece = _Piece(wide(batch.outputs), y, wide(batch.dense()), None)
                made.append(piece)
            else:
                products = Differentiated(self.jacobians, x)
                piece = _Piece(wide(products.outputs), y, None, products)
            yield piece
        if keeps:
            self._kept = made

    def state(self, v: Tensor, precisions: Tensor) -> _State:
        """L_h at v, with its gradient. One pass."""
        return self._halved(lambda: self._state(v, precisions))

    def _state(self, v: Tensor, precisions: Tensor) -> _State:
        loglik, data, outputs = 0.0, torch.zeros_like(v), []
        for piece in self._pieces():
            with torch.enable_grad():
                at = (piece.outputs + piece.jvp(v - self.centre)).requires_grad_()
                log_prob = self.likelihood.log_prob(at, piece.targets).sum()
                (score,) = torch.autograd.grad(log_prob, at)
            loglik += float(log_prob.detach())
            data -= piece.vjp(score)
            outputs.append(at.detach())
        data, prior = data * (precisions > 0), precisions * v
        value = -loglik + 0.5 * float(prior @ v)
        return _State(value, data + prior, loglik, float(data.norm() + prior.norm()), torch.cat(outputs))

    def curvature_product(self, outputs: Tensor, direction: Tensor, precisions: Tensor) -> Tensor:
        """(Σ_n JᵀB(h_n)J + Λ) d, [P], at outputs h [N, K]; d is 0 where weights are held. One pass."""
        total = self._halved(lambda: self._data_product(outputs, direction))
        return total * (precisions > 0) + precisions * direction

    def _data_product(self, outputs: Tensor, direction: Tensor) -> Tensor:
        total, done = torch.zeros_like(direction), 0
        for piece in self._pieces():
            root = self.likelihood.curvature_root(outputs[done : done + len(piece.outputs)])
            done += len(piece.outputs)
            inside = torch.einsum("bkc,bk->bc", root, piece.jvp(direction))
            total = total + piece.vjp(torch.einsum("bkc,bc->bk", root, inside))
        return total

    def optimum(
        self,
        precisions: Tensor,
        start: Tensor,
        tolerance: float,
        max_passes: int,
        guess: WeightGaussian | None = None,
    ) -> TangentOptimum:
        """v* in function space where that is affordable and there is no `guess`, else by `newton`.

        The arguments are those of `newton`.
        """
        if guess is None and self.in_function_space:
            found = self.dual_optimum(precisions, tolerance)
            if found.gradient <= tolerance or found.gap <= GAP_NATS:
                return found
            start = found.weights  # under a weak prior rounding limits it
        return self.newton(precisions, start, tolerance, max_passes, guess)

    def dual_optimum(self, precisions: Tensor, tolerance: float) -> TangentOptimum:
        """v* = Λ⁻¹Jᵀα: a few passes for the Gram matrix, which is shared by all multiples of Λ, and two for v*."""
        first = self.passes
        if self._grams is None:
            self._grams = dual_tangent.Grams(self.task, self.jacobians, self.progress, self.repairs)
        made = self._grams.passes
        gram = self._grams(precisions)
        self.passes += self._grams.passes - made
        assert self._grams.centre_outputs is not None
        x, targets = self.task.train.gather(torch.arange(len(self.task.train)))
        assert targets is not None
        outputs = torch.cat([wide(self.jacobians.network(part)) for part in x.split(POINTS)])
        offset = outputs - self._grams.centre_outputs.view_as(outputs)
        start = torch.zeros_like(offset) if self._alpha is None else self._alpha
        found = dual_tangent.mode(gram, offset, targets, self.likelihood, start, tolerance)
        self._alpha = found.alpha
        free = precisions > 0
        prior, gradient = self._vjp(found.alpha) * free, self._vjp(found.alpha - found.score) * free
        weights = torch.where(free, prior / torch.where(free, precisions, 1), self.centre)
        size = float(prior.norm() + (prior - gradient).norm())
        ratio = float(gradient.norm()) / max(size, 1e-300)
        return TangentOptimum(weights, found.loglik, ratio, _gap(gradient, precisions), self.passes - first)

    def _vjp(self, values: Tensor) -> Tensor:
        """Jᵀu for values [N, K], [P]. One pass."""

        def work() -> Tensor:
            total, done = torch.zeros_like(self.centre), 0
            for piece in self._pieces():
                total = total + piece.vjp(values[done : done + len(piece.outputs)])
                done += len(piece.outputs)
            return total

        return self._halved(work)

    def newton(
        self,
        precisions: Tensor,
        start: Tensor,
        tolerance: float,
        max_passes: int,
        guess: WeightGaussian | None = None,
    ) -> TangentOptimum:
        """v* by Newton steps, each by preconditioned conjugate gradients.

        With the full curvature and Gaussian noise it takes one step, which is the closed form
        (H + Λ)⁻¹JᵀB(y − f + Jw*).

        Args:
            precisions: the diagonal of Λ, [P]; a weight where it is 0 is held.
            start: first v [P].
            tolerance: stop where ‖∇L_h‖ is this fraction of the sum of its parts' norms (data, prior).
            max_passes: most passes over the data.
            guess: the preconditioner Σ ≈ (H + Λ)⁻¹; None is Λ⁻¹. The full curvature is a good one. Kronecker factors
                and diagonals are not: on trained networks they needed more steps than the prior.
        """
        spent, v, self._last_pass = self.passes, start, self.passes + max_passes
        at = self.state(v, precisions)
        while at.ratio > tolerance and self.passes - spent < max_passes:
            step = self._newton_step(at, precisions, guess, min(0.1, math.sqrt(at.ratio)), spent + max_passes)
            length = 1.0
            while True:
                moved = self.state(v + length * step, precisions)
                enough = moved.value <= at.value + 1e-4 * length * float(at.gradient @ step) + 1e-12 * abs(at.value)
                if enough or length < 1e-6 or self.passes - spent >= max_passes:
                    break
                length /= 2
            if not enough:
                break
            v, at = v + length * step, moved
        return TangentOptimum(v, at.loglik, at.ratio, _gap(at.gradient, precisions), self.passes - spent)

    def _newton_step(
        self, at: _State, precisions: Tensor, guess: WeightGaussian | None, tolerance: float, last: int
    ) -> Tensor:
        """−(JᵀBJ + Λ)⁻¹ g at h, to a relative residual of `tolerance` in the preconditioned norm."""
        free = precisions > 0

        def applied(vector: Tensor) -> Tensor:
            made = vector / precisions if guess is None else guess.product(vector.unsqueeze(0))[0]
            return torch.where(free, made, 0)

        solution, residual = torch.zeros_like(at.gradient), -at.gradient
        preconditioned = applied(residual)
        direction, size = preconditioned, float(residual @ preconditioned)
        first = size
        while size > tolerance**2 * first and (self.passes < last or not bool(solution.any())):
            product = self.curvature_product(at.outputs, direction, precisions)
            alpha = size / float(direction @ product)
            solution, residual = solution + alpha * direction, residual - alpha * product
            preconditioned = applied(residual)
            before, size = size, float(residual @ preconditioned)
            direction = preconditioned + (size / before) * direction
        return solution


def _gap(gradient: Tensor, precisions: Tensor) -> float:
    """½ gᵀΛ⁻¹g over the weights that are not held."""
    free = precisions > 0
    return 0.5 * float((gradient[free].square() / precisions[free]).sum())
