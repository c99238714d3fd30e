"""(I + H̃) u = b in the space of the outputs: exact where the rows of the curvature are few, for any number of weights.

H̃ = AᵀA with the M = N·C rows A = RᵀJΛ^{-½}, so (I + H̃)⁻¹b = b − Aᵀ(I + AAᵀ)⁻¹A b, and for draws
z = θ₀ − Λ⁻¹JᵀR (I + RᵀJΛ⁻¹JᵀR)⁻¹ (RᵀJθ₀ + ε). AAᵀ [M, M] is computed tensor by tensor and factorised once; a
solution then takes two passes over the data. In float32 the rows of AAᵀ and those of the passes differ by rounding, so
the solution is refined, in float64, until its own residual is small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.jacobian_forms import TensorJacobian
from bnn_runner.curvature.psd import Repairs, cholesky, wide
from bnn_runner.curvature.row_gram import add_row_gram, kept_floats, smaller
from bnn_runner.laplace.solvers import Right, Solution, Whitened, solution_of
from bnn_runner.runtime.memory import halving, memory_limit

MOST_ROWS = 6000
"""Rows M up to which AAᵀ is factorised: 0.3 GB, and a minute."""
PART_BYTES = 2**30
"""Factors of some tensors that are kept at once; each such part costs a pass."""
ENOUGH_PROGRESS = 0.5


def affordable(rows: GGNOperator) -> bool:
    """Whether the rows are few, and fewer than the weights, and their Gram matrix fits into the memory limit."""
    count = len(rows) * rows.columns
    fits = 4 * 8 * count**2 <= memory_limit().most_bytes
    largest = max(_bytes_per_point(rows, name) for name in rows.jacobians.names) * len(rows)
    return count <= MOST_ROWS and count < rows.size and fits and largest <= _part_bytes()


def _part_bytes() -> int:
    return min(PART_BYTES, memory_limit().most_bytes // 4)


def _bytes_per_point(rows: GGNOperator, name: str) -> int:
    """Of the smaller form of a tensor's Jacobian."""
    jacobians = rows.jacobians
    whole = jacobians.network.parameters[name]
    size, positions = jacobians.sizes()[name], 0
    if jacobians.rule(name) == "matrix" and name not in jacobians.chosen:
        positions = jacobians.positions(name)
    outputs = whole.shape[0] if positions else 1
    return whole.element_size() * kept_floats(outputs, size // outputs, positions, rows.columns)


@dataclass(frozen=True)
class DualSolver:
    """Solves by the Gram matrix of the rows, which is kept for all multiples of the first Λ.

    Attributes:
        tolerance: refined until every error is within it, in posterior standard deviations, or no step helps.
        steps: most refinements, three passes each.
    """

    tolerance: float
    steps: int = 10
    _kept: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, matrix: Whitened, right: Right, start: Tensor) -> Solution:
        factor = self._factor(matrix)
        b = wide(right.total)
        u = torch.zeros_like(b)
        residual, error = b, b.norm(dim=1)
        for _ in range(self.steps):
            moved = u + _inverse(matrix, factor, residual)
            left = b - moved - _vjp(matrix, _jvp(matrix, moved))
            size = left.norm(dim=1)
            better = (size < error).unsqueeze(1)  # rounding can make it worse; then the old one is kept
            progress = float(size.max()) <= ENOUGH_PROGRESS * float(error.max())
            u, residual = torch.where(better, moved, u), torch.where(better, left, residual)
            error = residual.norm(dim=1)
            if not progress or not bool((error > self.tolerance).any()):
                break
        return solution_of(u.to(right.total), residual, b)

    def _factor(self, matrix: Whitened) -> Tensor:
        """The Cholesky factor of I + AAᵀ."""
        scale = wide(matrix.scale)
        if self._kept:
            before, gram = self._kept[0]
            ratio = (scale / before).square()
            even = torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-6, atol=0)
        if not self._kept or not even:
            rows = matrix.rows
            gram = halving(lambda: _gram(rows, scale.square()), rows.halve)
            self._kept[:] = [(scale, gram)]
            ratio = torch.ones_like(scale)
        inner = ratio[0] * gram
        inner.diagonal().add_(1)
        return cholesky(inner, "the curvature's rows", Repairs())


def _gram(rows: GGNOperator, variances: Tensor) -> Tensor:
    """RᵀJ V JᵀR [M, M] for the diagonal V [P]."""
    count = len(rows) * rows.columns
    total = variances.new_zeros(count, count)
    of = dict(zip(rows.jacobians.names, variances.split(list(rows.jacobians.sizes().values())), strict=True))
    for name, pieces in _tensors(rows):
        add_row_gram(total, pieces, of[name])
    return total.tril() + total.tril(-1).T


def _tensors(rows: GGNOperator) -> Iterator[tuple[str, list[TensorJacobian]]]:
    """The Jacobian of each tensor, batch by batch, in as many passes as memory needs."""
    parts: list[list[str]] = []
    held = most = _part_bytes()
    for name in rows.jacobians.names:
        needed = _bytes_per_point(rows, name) * len(rows)
        if held + needed > most:
            parts.append([])
            held = 0
        parts[-1].append(name)
        held += needed
    for names in parts:
        jacobians = rows.jacobians.of(tuple(names))
        pieces: dict[str, list[TensorJacobian]] = {name: [] for name in names}
        for _, batch in rows.derived(jacobians):
            for name, j in batch.tensors.items():
                pieces[name].append(smaller(j))
        for name in names:
            yield name, pieces.pop(name)


def _inverse(matrix: Whitened, factor: Tensor, vectors: Tensor) -> Tensor:
    """B − Aᵀ(I + AAᵀ)⁻¹A b for vectors b [S, P]. Two passes."""
    moved = _jvp(matrix, vectors)
    solved = torch.cholesky_solve(moved.flatten(0, 1), factor).view_as(moved)
    return vectors - _vjp(matrix, solved)


def _jvp(matrix: Whitened, vectors: Tensor) -> Tensor:
    """A v for vectors [S, P] in float64: [N, C, S]. One pass."""
    scaled = wide(matrix.scale) * vectors

    def work() -> Tensor:
        return torch.cat([rows.like(scaled).jvp(scaled) for _, rows in matrix.rows.batches(len(vectors))])

    return halving(work, matrix.rows.halve)


def _vjp(matrix: Whitened, values: Tensor) -> Tensor:
    """Aᵀu for values [N, C, S] in float64: [S, P]. One pass."""

    def work() -> Tensor:
        total = values.new_zeros(values.shape[-1], matrix.rows.size)
        for part, rows in matrix.rows.batches(len(total)):
            total += rows.like(total).vjp(values[part])
        return total

    return wide(matrix.scale) * halving(work, matrix.rows.halve)
