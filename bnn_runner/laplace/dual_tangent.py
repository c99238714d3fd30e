"""The tangent model's optimum in function space, for few points: exact for any number of weights.

At v* the gradient −Jᵀs + Λv vanishes, with s = ∂ log p / ∂h the score of the outputs. So v* = Λ⁻¹Jᵀα with
α = s [N·K], and h = f − J w* + Gα with the Gram matrix G = J Λ⁻¹ Jᵀ: the mode of a Gaussian process with
that kernel (Rasmussen & Williams 2006, §3.4), found by Newton steps without evaluating the network again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnn_runner.base import Likelihood
from bnn_runner.curvature.jacobian_forms import DenseJacobian, TensorJacobian
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.psd import Repairs, cholesky, wide
from bnn_runner.curvature.weighted_gram import one_position
from bnn_runner.runtime.console import Progress
from bnn_runner.runtime.memory import halving, memory_limit
from bnn_runner.tasks import Task

MOST_ROWS = 4000
"""Outputs N·K up to which the Gram matrix is factorised (a few seconds each)."""
ROWS_BYTES = 2**30
"""Memory for rows of some tensors at once; a tensor with more is too large for this solution."""
MOST_PASSES = 12
GRAM_BYTES = 2**30
"""Gram matrices of single tensors are kept up to this size, so that each may have its own precision."""
NEWTON_STEPS = 50
_COLUMNS, _BLOCK = 8192, 512


def affordable(task: Task, jacobians: Jacobians) -> bool:
    """Whether there are more weights than outputs of the training set, and few enough of these."""
    rows = len(task.train) * task.spec.num_outputs
    sizes = jacobians.sizes()
    if rows > MOST_ROWS or rows >= sum(sizes.values()):
        return False
    parts = _parts(jacobians, rows)
    return len(parts) <= MOST_PASSES and rows * max(sizes.values()) * _item(jacobians) <= _rows_bytes()


def _rows_bytes() -> int:
    return min(ROWS_BYTES, memory_limit().kept_bytes)


def _item(jacobians: Jacobians) -> int:
    return jacobians.network.parameters[jacobians.names[0]].element_size()


def _parts(jacobians: Jacobians, rows: int) -> list[list[str]]:
    """The tensors in order, in parts whose rows fit in memory; each part costs a pass over the data."""
    parts: list[list[str]] = []
    held, most = _rows_bytes() + 1, _rows_bytes()
    for name, size in jacobians.sizes().items():
        needed = rows * size * _item(jacobians)
        if held + needed > most:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += needed
    return parts


@dataclass
class Grams:
    """G = J Λ⁻¹ Jᵀ [N·K, N·K] for one diagonal Λ after another.

    The first Λ costs passes over the data; another one that is a multiple of it costs none (a multiple tensor by
    tensor, where there is memory for one matrix per tensor).
    """

    task: Task
    jacobians: Jacobians
    progress: Progress
    repairs: Repairs = field(default_factory=Repairs, repr=False)
    passes: int = 0
    made: int = 0
    _made_for: Tensor | None = field(default=None, repr=False)
    _kept: list[tuple[slice, Tensor]] = field(default_factory=list, repr=False)
    centre_outputs: Tensor | None = field(default=None, repr=False)
    """J w*, [N·K]."""

    @property
    def rows(self) -> int:
        return len(self.task.train) * self.task.spec.num_outputs

    def __call__(self, precisions: Tensor) -> Tensor:
        """G at the diagonal `precisions` [P] of Λ; a weight whose precision is 0 is held and does not contribute."""
        factors = self._multiples(precisions)
        if factors is None:
            halving(lambda: self._make(precisions), lambda: self.jacobians.halve(self.repairs))
            self.made += 1
            factors = [1.0] * len(self._kept)
        total = torch.zeros_like(self._kept[0][1])
        for factor, (_, gram) in zip(factors, self._kept, strict=True):
            total.add_(gram, alpha=1 / factor)
        return total.tril() + total.tril(-1).T

    def _multiples(self, precisions: Tensor) -> list[float] | None:
        """The factor of Λ for each kept matrix; None where Λ is no multiple of the earlier one."""
        if self._made_for is None:
            return None
        factors = []
        for where, _ in self._kept:
            before, now = self._made_for[where], precisions[where]
            held = before == 0
            ratio = (now / before)[~held]
            if not torch.equal(held, now == 0):
                return None
            factors.append(float(ratio[0]) if len(ratio) else 1.0)
            if len(ratio) and not torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-12, atol=0):
                return None
        return factors

    def _make(self, precisions: Tensor) -> None:
        sizes, dtype = self.jacobians.sizes(), self.jacobians.network.parameters[self.jacobians.names[0]].dtype
        single = 8 * len(sizes) * self.rows**2 <= min(GRAM_BYTES, memory_limit().kept_bytes)
        self._made_for, self._kept = precisions, []
        self.centre_outputs = torch.zeros(self.rows, dtype=precisions.dtype, device=precisions.device)
        start = 0
        for name, pieces in self._tensors():
            where = slice(start, start + sizes[name])
            if single or not self._kept:
                self._kept.append((where, precisions.new_zeros(self.rows, self.rows)))
            else:
                self._kept[0] = (slice(0, where.stop), self._kept[0][1])
            variances = torch.where(precisions[where] > 0, 1 / precisions[where], 0)
            weights = self.jacobians.part(name, wide(self.jacobians.network.parameters[name])) * (precisions[where] > 0)
            at_centre = [wide(j.apply(weights.to(dtype).unsqueeze(0))) for j in pieces]
            self.centre_outputs += torch.cat(at_centre).flatten()
            _add(self._kept[-1][1], pieces, variances)
            start = where.stop

    def _tensors(self) -> Iterator[tuple[str, list[TensorJacobian]]]:
        """The Jacobian of each tensor in order, batch by batch."""
        outputs = self.task.spec.num_outputs
        parts, done = _parts(self.jacobians, self.rows), 0
        for names in parts:
            self.passes += 1
            jacobians = self.jacobians.of(tuple(names))
            jacobians.learn_shapes(self.task.train.gather(torch.arange(min(2, len(self.task.train))))[0])
            pieces: dict[str, list[TensorJacobian]] = {name: [] for name in names}
            for x, _ in self.task.train.batches(jacobians.batch_size(outputs)):
                self.progress("tangent model in function space", done, len(parts) * len(self.task.train))
                done += len(x)
                for name, j in jacobians(x).tensors.items():
                    pieces[name].append(j if one_position(j) is not None else DenseJacobian(j.dense()))
            for name in names:
                yield name, pieces.pop(name)


def _add(gram: Tensor, pieces: list[TensorJacobian], variances: Tensor) -> None:
    """Add J diag(variances) Jᵀ of one tensor to the lower triangle of `gram` (and to parts of the upper one).

    A weight matrix at one position has Jacobians g ⊗ a, whose products are (g·g')(a·a').
    """
    pairs = [one_position(j) for j in pieces]
    if all(pair is not None for pair in pairs) and bool((variances == variances[0]).all()):
        inputs = torch.cat([wide(pair[0]) for pair in pairs if pair is not None])  # [N, d]
        grads = torch.cat([wide(pair[1]) for pair in pairs if pair is not None])  # [N, K, o]
        points, outputs = grads.shape[:2]
        between = (grads.flatten(0, 1) @ grads.flatten(0, 1).T).view(points, outputs, points, outputs)
        between *= (variances[0] * inputs @ inputs.T)[:, None, :, None]
        gram += between.view_as(gram)
        return
    rows = torch.cat([j.dense().flatten(0, 1) for j in pieces])
    for a in range(0, rows.shape[1], _COLUMNS):
        scaled = wide(rows[:, a : a + _COLUMNS]) * variances[a : a + _COLUMNS].sqrt()
        for i in range(0, len(rows), _BLOCK):
            end = i + _BLOCK
            gram[i:end, :end].addmm_(scaled[i:end], scaled[:end].T)


@dataclass(frozen=True)
class FunctionSpaceOptimum:
    """The optimum in function space: α [N, K], outputs h [N, K], their score s [N, K], and Σ log p(y | h)."""

    alpha: Tensor
    outputs: Tensor
    score: Tensor
    loglik: float


def mode(
    gram: Tensor, offset: Tensor, targets: Tensor, likelihood: Likelihood, start: Tensor, tolerance: float
) -> FunctionSpaceOptimum:
    """The α that maximises Σ log p(y | o + Gα) − ½ αᵀGα.

    Found by Newton steps with a line search, until ‖Jᵀ(α − s)‖ in the norm of Λ⁻¹ is `tolerance` times the sum of
    its two parts' norms, or no step improves.

    Args:
        gram: G [N·K, N·K].
        offset: o = f − J w*, [N, K].
        targets: y.
        likelihood: p(y | h).
        start: first α [N, K].
        tolerance: relative gradient to stop at.
    """
    shape, alpha, at = offset.shape, start, None
    moved = (gram @ alpha.flatten()).view(shape)  # G α

    def value(alpha: Tensor, moved: Tensor) -> tuple[float, FunctionSpaceOptimum]:
        h = offset + moved
        with torch.enable_grad():
            leaf = h.detach().requires_grad_()
            log_prob = likelihood.log_prob(leaf, targets).sum()
            (score,) = torch.autograd.grad(log_prob, leaf)
        found = FunctionSpaceOptimum(alpha, h, score, float(log_prob.detach()))
        return found.loglik - 0.5 * float((alpha * moved).sum()), found

    best, at = value(alpha, moved)
    for _ in range(NEWTON_STEPS):
        left, data = at.alpha - at.score, (gram @ at.score.flatten()).view(shape)
        size = _root((at.score * data).sum()) + _root((at.alpha * moved).sum())
        if _root((left * (moved - data)).sum()) <= tolerance * max(size, 1e-300):
            break
        target = _newton(gram, at, likelihood)
        ahead = (gram @ target.flatten()).view(shape)
        length = 1.0
        while length > 1e-8:
            step = alpha + length * (target - alpha), moved + length * (ahead - moved)
            reached, found = value(*step)
            if reached >= best - 1e-13 * abs(best):
                break
            length /= 2
        else:
            break
        (alpha, moved), best, at = step, reached, found
    return at


def _root(value: Tensor) -> float:
    return float(value.clamp_min(0).sqrt())


def _newton(gram: Tensor, at: FunctionSpaceOptimum, likelihood: Likelihood) -> Tensor:
    """The α of the full Newton step: α + r − R (I + RᵀGR)⁻¹ RᵀG r with r = s − α and B = RRᵀ at h, [N, K].

    (I + BG)⁻¹ r is added, so that rounding is relative to the remaining step.
    """
    points, outputs = at.outputs.shape
    root = likelihood.curvature_root(at.outputs)  # [N, K, C]
    left = at.score - at.alpha
    right = torch.bmm(gram.view(-1, points, outputs).transpose(0, 1), root)  # [N, N·K, C]
    right = right.transpose(0, 1).reshape(points, outputs, -1)  # [N, K, N·C]
    inner = torch.bmm(root.mT, right).reshape(-1, right.shape[-1])  # [N·C, N·C]
    inner.diagonal().add_(1)
    factor = cholesky(inner, "the tangent model in function space", Repairs())
    rotated = torch.einsum("nkc,nk->nc", root, (gram @ left.flatten()).view_as(left)).reshape(-1, 1)
    solved = torch.cholesky_solve(rotated, factor).view(points, -1)
    return at.score - torch.einsum("nkc,nc->nk", root, solved)
