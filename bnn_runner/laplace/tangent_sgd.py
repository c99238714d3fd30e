"""A start for v* by stochastic gradient descent on the tangent loss, as the papers on sampled Laplace do.

Minibatch gradients of L_h(v), Nesterov's momentum, a linearly decaying step, and the average of the last iterates
(Antorán et al. 2023, appendix). The data are not augmented. Steps are taken in whitened weights u = Λ^½ v, and
flattened along the leading eigenvectors of sampled rows of the curvature (Frangella et al. 2024, SketchySGD), without
which the step is limited to 1e-6 by a few directions. Its length comes from power iterations on minibatches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bnn_runner.base import Likelihood
from bnn_runner.laplace.sampled_rows import SampledRows
from bnn_runner.laplace.tangent_state import State
from bnn_runner.rng import generator

PASSES = 6
"""Passes of descent; Newton steps take over."""
FEWEST_POINTS = 1000
"""Fewer points have too few minibatches for descent to win against conjugate gradients."""
MOMENTUM, STEP = 0.9, 0.2
"""Nesterov's momentum, and the first step in units of the inverse of the largest curvature of a minibatch."""
CONSTANT, AVERAGED = 0.3, 0.3
"""Share of the steps before the step length decays, and share of the last ones that are averaged."""
FLATTENED = 128
"""Eigenvectors along which the curvature is flattened."""
RENEWED = (0, 1, 3)
"""Passes before which rows are sampled again, at the outputs met since."""
STEEPEST_BATCHES, STEEPEST_STEPS = 3, 6
CLIP = 10.0
"""Gradients longer than this multiple of the first ones' mean are shortened to it."""


class Minibatches(Protocol):
    """A tangent model as descent sees it."""

    passes: float
    likelihood: Likelihood
    centre: Tensor

    @property
    def points(self) -> int: ...

    def preconditioner(self, outputs: Tensor, precisions: Tensor, most: int) -> SampledRows | None: ...

    def minibatch_gradient(self, indices: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...

    def minibatch_product(self, indices: Tensor, outputs: Tensor, direction: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Flattened:
    """P = I + Q (diag(s) − I) Qᵀ in whitened weights, with s the eigenvalues' inverses up to that of the last."""

    vectors: Tensor
    shrink: Tensor

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient + self.vectors @ (self.shrink * (self.vectors.T @ gradient))


def batch_size(points: int) -> int:
    """32 to 256 points, about 64 minibatches a pass."""
    return max(32, min(256, points // 64))


def descend(model: Minibatches, precisions: Tensor, begin: Tensor, at: State, passes: int = PASSES) -> Tensor:
    """The average v [P] of the last iterates from `begin` [P], whose state is `at`; held weights keep their values."""
    points, size = model.points, batch_size(model.points)
    root = torch.where(precisions > 0, precisions.rsqrt(), 0)
    outputs = at.outputs.clone()
    per_pass = -(-points // size)
    total, done = passes * per_pass, 0
    u, velocity = torch.zeros_like(begin), torch.zeros_like(begin)  # v = begin + root · u
    average, averaged, longest = torch.zeros_like(begin), 0, math.inf
    norms: list[float] = []
    flattened: _Flattened | None = None
    step = 0.0
    for number in range(passes):
        if number in RENEWED:
            rows = model.preconditioner(outputs, precisions, 2 * FLATTENED)
            flattened = None if rows is None else _flattened(rows)
            step = STEP / _steepest(model, outputs, root, flattened, size)
            velocity.zero_()
        for indices in torch.randperm(points, generator=generator(number, "tangent descent")).split(size):
            ahead = u + MOMENTUM * velocity
            v = begin + root * ahead
            data, outputs[indices] = model.minibatch_gradient(indices, v)
            gradient = root * (data * (points / len(indices)) + precisions * v)
            norms.append(float(gradient.norm()))
            if len(norms) == per_pass:
                longest = CLIP * sum(norms) / len(norms)
            gradient = gradient * min(1.0, longest / max(norms[-1], 1e-300))
            if flattened is not None:
                gradient = flattened(gradient)
            decay = min(1.0, (1 - done / total) / (1 - CONSTANT))
            velocity = MOMENTUM * velocity - step * decay * gradient
            u, done = u + velocity, done + 1
            if done > (1 - AVERAGED) * total:
                averaged += 1
                average += (u - average) / averaged
    return begin + root * average


def _flattened(rows: SampledRows) -> _Flattened:
    values, vectors = rows.leading(FLATTENED)
    shrink = (values[-1] + 1) / (values + 1) - 1
    return _Flattened(vectors, shrink)


def _steepest(model: Minibatches, outputs: Tensor, root: Tensor, flattened: _Flattened | None, size: int) -> float:
    """The largest eigenvalue of the flattened I + H̃_b over a few minibatches b, each scaled to all N points."""
    stream, largest = generator(0, "tangent descent's step"), 1.0
    for _ in range(STEEPEST_BATCHES):
        chosen = torch.randperm(model.points, generator=stream)[:size]
        v = torch.randn(len(root), generator=stream, dtype=torch.float64).to(root) * (root > 0)
        for _ in range(STEEPEST_STEPS):
            v = v / v.norm()
            scaled = model.minibatch_product(chosen, outputs[chosen], root * v)
            v = v + root * scaled * (model.points / len(chosen))
            v = v if flattened is None else flattened(v)
        largest = max(largest, float(v.norm()))
    return largest
