"""The tangent model h(x, v) = f(x, w*) + J(x)(v − w*) and its own optimum v*.

v* = argmin_v  L_h(v) = Σ_n −log p(y_n | h(x_n, v)) + ½ vᵀΛv, which is convex. For a network with
normalisation layers, or one whose training stopped early, w* is not a stationary point of L_f; the
evidence of the tangent model is then to be taken at v* (Antorán et al. 2022). Weights held at MAP
stay at w* and are not part of the penalty.

How v* is found:

- where the training set has few outputs, in function space (`dual_tangent`);
- else by Newton steps (`tangent_newton`) within a number of passes over the data, from the last v* found;
- where passes differentiate the network again and have many minibatches, the first search starts with stochastic
  gradient descent (`tangent_sgd`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from bnn_runner.curvature.base import WeightGaussian
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.products import Differentiated
from bnn_runner.curvature.psd import Repairs, wide
from bnn_runner.laplace import dual_tangent, tangent_newton, tangent_sgd
from bnn_runner.laplace import sampled_rows as sampling
from bnn_runner.laplace.tangent_state import State, TangentOptimum, gradient_gap
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
class Piece:
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
    passes: float = 0
    _last_pass: int = field(default=0, repr=False)
    _fits: bool = field(default=True, repr=False)
    _kept: list[Piece] | None = field(default=None, repr=False)
    _grams: dual_tangent.Grams | None = field(default=None, repr=False)
    _alpha: Tensor | None = field(default=None, repr=False)
    _draws: int = field(default=0, repr=False)
    _searched: bool = field(default=False, repr=False)

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

    @property
    def rounding(self) -> float:
        """Relative error of L_h, by rounding of the network's outputs; kept Jacobians are an exact float64 model."""
        own = self.jacobians.network.parameters[self.jacobians.names[0]].dtype
        return torch.finfo(torch.float64 if self.keeps else own).eps

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

    def _pieces(self) -> Iterator[Piece]:
        """One pass over the training set, in order."""
        self.passes += 1
        for piece in self._made() if self._kept is None else self._kept:
            if self._last_pass:
                self.progress("tangent optimum", min(int(self.passes), self._last_pass) - 1, self._last_pass)
            yield piece

    def _made(self) -> Iterator[Piece]:
        outputs = self.task.spec.num_outputs
        made = []
        keeps = self.keeps
        points = self.jacobians.batch_size(outputs) if keeps else self.jacobians.points_at_once(POINTS)
        for x, y in self.task.train.batches(points):
            assert y is not None
            if keeps:
                batch = self.jacobians(x)
                piece = Piece(wide(batch.outputs), y, wide(batch.dense()), None)
                made.append(piece)
            else:
                products = Differentiated(self.jacobians, x)
                piece = Piece(wide(products.outputs), y, None, products)
            yield piece
        if keeps:
            self._kept = made

    def state(self, v: Tensor, precisions: Tensor) -> State:
        """L_h at v, with its gradient. One pass."""
        return self._halved(lambda: self._state(v, precisions))

    def _state(self, v: Tensor, precisions: Tensor) -> State:
        loglik, data, outputs = 0.0, torch.zeros_like(v), []
        for piece in self._pieces():
            at, score, log_prob = self._scores(piece, v)
            loglik += log_prob
            data -= piece.vjp(score)
            outputs.append(at)
        data, prior = data * (precisions > 0), precisions * v
        value = -loglik + 0.5 * float(prior @ v)
        return State(value, data + prior, loglik, float(data.norm() + prior.norm()), torch.cat(outputs))

    def _scores(self, piece: Piece, v: Tensor) -> tuple[Tensor, Tensor, float]:
        """h(v) [B, K], ∂ log p/∂h [B, K], and Σ log p of a batch."""
        with torch.enable_grad():
            at = (piece.outputs + piece.jvp(v - self.centre)).requires_grad_()
            log_prob = self.likelihood.log_prob(at, piece.targets).sum()
            (score,) = torch.autograd.grad(log_prob, at)
        return at.detach(), score, float(log_prob.detach())

    def curvature_product(self, outputs: Tensor, direction: Tensor, precisions: Tensor) -> tuple[Tensor, Tensor]:
        """(Σ_n JᵀB(h_n)J + Λ) d, [P], at outputs h [N, K], and J d [N, K]; d is 0 where weights are held. One pass."""
        total, moved = self._halved(lambda: self._data_product(outputs, direction))
        return total * (precisions > 0) + precisions * direction, moved

    def _data_product(self, outputs: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        total, done, every = torch.zeros_like(direction), 0, []
        for piece in self._pieces():
            root = self.likelihood.curvature_root(outputs[done : done + len(piece.outputs)])
            done += len(piece.outputs)
            every.append(piece.jvp(direction))
            inside = torch.einsum("bkc,bk->bc", root, every[-1])
            total = total + piece.vjp(torch.einsum("bkc,bc->bk", root, inside))
        return total, torch.cat(every)

    def optimum(
        self,
        precisions: Tensor,
        start: Tensor,
        tolerance: float,
        max_passes: int,
        guess: WeightGaussian | None = None,
        enough: float = 0.0,
    ) -> TangentOptimum:
        """v* by the rule at the top of this file; never in function space or by descent where there is a `guess`.

        The arguments are those of `newton`.
        """
        cold, self._searched = not self._searched, True
        if guess is None and self.in_function_space:
            found = self.dual_optimum(precisions, tolerance)
            if found.gradient <= tolerance or found.gap <= GAP_NATS:
                return found
            start = found.weights  # under a weak prior rounding limits it
        elif guess is None and cold and self.descends and max_passes >= 3 * tangent_sgd.PASSES:
            return self._descent_and_newton(precisions, start, tolerance, max_passes, enough)
        return self.newton(precisions, start, tolerance, max_passes, guess, enough)

    @property
    def descends(self) -> bool:
        """Whether a first search starts with stochastic descent: passes are expensive, and have many minibatches."""
        return not self.keeps and self.points >= tangent_sgd.FEWEST_POINTS

    def _descent_and_newton(
        self, precisions: Tensor, start: Tensor, tolerance: float, max_passes: int, enough: float
    ) -> TangentOptimum:
        """Descent from `start`, and Newton steps from where it ended (from `start` if that is better)."""
        first, self._last_pass = self.passes, round(self.passes + max_passes)
        at = self.state(start, precisions)
        reached = self._halved(lambda: tangent_sgd.descend(self, precisions, start, at))
        ended = self.state(reached, precisions)
        begin = reached if ended.value < at.value else start
        found = self.newton(precisions, begin, tolerance, max_passes - (self.passes - first), enough=enough)
        return replace(found, passes=self.passes - first, route="sgd and newton")

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
        return TangentOptimum(
            weights, found.loglik, ratio, gradient_gap(gradient, precisions), self.passes - first, "function space"
        )

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
        max_passes: float,
        guess: WeightGaussian | None = None,
        enough: float = 0.0,
    ) -> TangentOptimum:
        """v* by Newton steps (see `tangent_newton.newton`)."""
        self._last_pass = round(self.passes + max_passes)
        return tangent_newton.newton(self, precisions, start, tolerance, max_passes, guess, enough)

    def preconditioner(
        self, outputs: Tensor, precisions: Tensor, most: int = sampling.MOST_ROWS
    ) -> sampling.SampledRows | None:
        """At most so many sampled rows of the curvature at outputs h [N, K] (see `sampled_rows`)."""
        roots = self.likelihood.curvature_root(outputs)
        self._draws += 1
        return self._halved(
            lambda: sampling.sampled_rows(self.task.train, self.jacobians, roots, precisions, self._draws, most)
        )

    @property
    def points(self) -> int:
        """N."""
        return len(self.task.train)

    def minibatch_gradient(self, indices: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """−Σ JᵀS of the scores at h(v) over the points `indices`, [P], and these h [B, K]."""
        self.passes += len(indices) / self.points
        piece = self._minibatch(indices)
        at, score, _ = self._scores(piece, v)
        return -piece.vjp(score), at

    def minibatch_product(self, indices: Tensor, outputs: Tensor, direction: Tensor) -> Tensor:
        """Σ JᵀB(h)J d over the points `indices` at outputs h [B, K]: [P]."""
        self.passes += len(indices) / self.points
        piece = self._minibatch(indices)
        root = self.likelihood.curvature_root(outputs)
        inside = torch.einsum("bkc,bk->bc", root, piece.jvp(direction))
        return piece.vjp(torch.einsum("bkc,bc->bk", root, inside))

    def _minibatch(self, indices: Tensor) -> Piece:
        x, y = self.task.train.gather(indices)
        assert y is not None
        products = Differentiated(self.jacobians, x)
        return Piece(wide(products.outputs), y, None, products)
