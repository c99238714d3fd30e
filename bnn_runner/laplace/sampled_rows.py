"""An approximate inverse of H + Λ from a few sampled rows of the curvature: a preconditioner.

H = Σ_n J_nᵀ B_n J_n is a sum over rows r_nc = R_ncᵀ J_n with B_n = R_n R_nᵀ. Row (n, c) is drawn with probability
π_nc = min(1, κ ‖R_nc‖²) and gets the weight 1/π_nc (Horvitz & Thompson 1952), so that the sum over the drawn
rows has the mean H. A trained network is sure of most points, whose curvature is nearly zero; few rows then hold most
of it. With A the weighted rows and Λ' = `DAMPING`·Λ the inverse of AᵀA + Λ' is applied by the Woodbury identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.psd import Repairs, cholesky, wide
from bnn_runner.rng import generator
from bnn_runner.runtime.memory import memory_limit
from bnn_runner.tasks import Split

MOST_ROWS = 1024
"""Rows at most: their Gram matrix takes about as long as a pass over ten thousand points."""
ROWS_PER_ROOT = 16
"""Rows for each square root of the number of points, so that they cost no more than a pass."""
FEWEST_ROWS = 8
DAMPING = 2.0
"""Λ' is this multiple of Λ where rows are left out: it stands for what they would add."""
_COLUMNS = 8192


@dataclass(frozen=True)
class SampledRows:
    """(AᵀA + Λ')⁻¹ for the weighted rows A [r, P]; `variances` [P] is the diagonal of Λ'⁻¹, 0 where a weight is held.

    `factor` is the Cholesky factor of I + A Λ'⁻¹ Aᵀ.
    """

    rows: Tensor
    variances: Tensor
    factor: Tensor

    def product(self, vector: Tensor) -> Tensor:
        """(AᵀA + Λ')⁻¹ v for v [P]."""
        scaled = self.variances * vector
        inner = torch.cholesky_solve((self.rows @ scaled).unsqueeze(1), self.factor).squeeze(1)
        return scaled - self.variances * (self.rows.T @ inner)

    def leading(self, count: int) -> tuple[Tensor, Tensor]:
        """The largest eigenvalues [k] of Λ'^{-½}AᵀAΛ'^{-½}, descending, and their eigenvectors [P, k]."""
        gram = self.factor @ self.factor.T
        values, vectors = torch.linalg.eigh(gram)
        values, vectors = values.flip(0)[:count] - 1, vectors.flip(1)[:, :count]
        known = values > 1e-6 * values[0]
        values, vectors = values[known], vectors[:, known]
        return values, self.variances.sqrt()[:, None] * (self.rows.T @ (vectors / values.sqrt()))


def most_rows(points: int, weights: int) -> int:
    """How many rows are worth their cost for N points, and fit into half of what a fit may keep."""
    fitting = memory_limit().kept_bytes // (2 * 8 * max(weights, 1))
    return min(MOST_ROWS, int(ROWS_PER_ROOT * points**0.5), fitting)


def sampled_rows(
    split: Split, jacobians: Jacobians, roots: Tensor, precisions: Tensor, seed: int, most: int = MOST_ROWS
) -> SampledRows | None:
    """The preconditioner at output curvatures B = RRᵀ; None where fewer than `FEWEST_ROWS` rows are affordable.

    Args:
        split: the training points.
        jacobians: at w*.
        roots: R [N, K, C] at the present outputs.
        precisions: the diagonal of Λ [P]; a weight where it is 0 is held.
        seed: of the draw.
        most: rows at most.
    """
    sizes = roots.square().sum(1)  # ‖R_nc‖², [N, C]
    total, columns = sizes.numel(), sizes.shape[1]
    count = min(most_rows(len(split), len(precisions)), most, total)
    if count < FEWEST_ROWS or not bool((sizes > 0).any()):
        return None
    chances = _inclusion(sizes.flatten(), count)
    uniform = torch.rand(total, generator=generator(seed, "sampled rows"), dtype=torch.float64).to(chances)
    drawn = (uniform < chances).nonzero().flatten()
    rows = precisions.new_empty(len(drawn), len(precisions))
    for places in torch.arange(len(drawn)).split(jacobians.batch_size(1)):
        pairs = drawn[places]
        points, column = pairs // columns, pairs % columns
        x, _ = split.gather(points)
        weighted = roots[points, :, column] / chances[pairs].sqrt().unsqueeze(1)

        def direction(outputs: Tensor, weighted: Tensor = weighted) -> Tensor:
            return weighted.to(outputs).unsqueeze(-1)

        rows[places] = wide(jacobians(x, direction).dense()[:, 0])
    damping = 1.0 if len(drawn) == int((sizes > 0).sum()) else DAMPING
    variances = torch.where(precisions > 0, 1 / (damping * precisions), 0)
    gram = torch.eye(len(rows), dtype=rows.dtype, device=rows.device)
    for first in range(0, rows.shape[1], _COLUMNS):
        part = rows[:, first : first + _COLUMNS] * variances[first : first + _COLUMNS].sqrt()
        gram.addmm_(part, part.T)
    return SampledRows(rows, variances, cholesky(gram, "the sampled curvature", Repairs()))


def _inclusion(sizes: Tensor, count: int) -> Tensor:
    """Probabilities min(1, κ s) with the sum `count`, or 1 for every positive size where no more are positive."""
    positive = sizes > 0
    if int(positive.sum()) <= count:
        return positive.to(sizes)
    certain, chances = torch.zeros_like(positive), sizes
    while True:
        rest = torch.where(certain, 0, sizes)
        chances = torch.where(certain, 1, rest * ((count - int(certain.sum())) / rest.sum()))
        more = chances > 1
        if not bool(more.any()):
            return chances
        certain = certain | more
