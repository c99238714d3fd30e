"""Sampled curvature: draws of N(0, (H + Λ)⁻¹) as solutions of regularised linear problems (sample-then-optimise).

Draw s is the z that minimises ½‖RᵀJ z − ε_s‖² + ½‖z − θ_s‖²_Λ with θ_s = Λ^{-½} n_s, n_s ~ N(0, I) and
ε_s ~ N(0, I), that is (H + Λ) z = Λθ_s + JᵀRε_s, whose right-hand side has covariance H + Λ (Antorán et al.
2023). Softmax's curvature is singular, so its root R stands in for the square root and no inverse is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bnn_runner.curvature.diagonal_scaling import DiagonalScaling, information_per_point, inverse_root
from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.groups import Group, each_tensor
from bnn_runner.curvature.jacobians import BatchJacobians
from bnn_runner.curvature.psd import Repairs, wide
from bnn_runner.laplace.log_det import Bracket, ExactSpectrum, Spectrum
from bnn_runner.laplace.solvers import Right, Solution, Solver, Whitened
from bnn_runner.rng import generator
from bnn_runner.runtime.torch_state import true_float32

PROBES = 4
"""A point, of the diagonal of a curvature that is known by its products alone."""
KEPT_FLOATS = 2**27
"""Numbers in solved draws that are kept for the next call."""


def draws_at_once(size: int) -> int:
    """Draws that are solved together, for P weights: 64 for small networks, 8 for large ones, fewer above 8 M.

    A dozen arrays of that many weight vectors exist at once: at most 3 GiB in float32.
    """
    return max(1, min(64, max(8, 2**20 // size), 2**26 // size))


def normals(rows: GGNOperator, seed: int, start: int, stop: int) -> Tensor:
    """n_s of draws `start` to `stop`, [S, P]; row s depends on (seed, s) only."""
    drawn = [
        torch.randn(rows.size, generator=generator(seed, "posterior", s), dtype=torch.float64)
        for s in range(start, stop)
    ]
    return torch.stack(drawn).to(rows.device, rows.dtype)


def whitening(rows: GGNOperator, precisions: Tensor, root: Tensor | None = None) -> Tensor:
    """Λ^{-½}, [P], for one precision per tensor [T] or one for all [1]; times the g-prior's D, if `root` is given."""
    sizes = torch.tensor(list(rows.jacobians.sizes().values()))
    each = precisions.detach().cpu().double().expand(len(sizes)).repeat_interleave(sizes)
    scale = each.to(rows.device, rows.dtype).rsqrt()
    return scale if root is None else scale * root.to(scale)


@dataclass(frozen=True)
class SampledGaussian:
    """N(0, (H + Λ)⁻¹) given by its draws, which are solved when needed.

    They are solved in blocks that always contain the same draws, so that a draw is the same to the
    last bit in every slice. `moments_from` = (seed, S) are the draws that covariances are
    averaged over. `root` [P] is D of the g-prior (see `g_prior`).
    """

    rows: GGNOperator
    solver: Solver
    precisions: tuple[float, ...]
    moments_from: tuple[int, int]
    dtype: torch.dtype
    root: Tensor | None = None
    _solved: dict[tuple[int, int], Tensor] = field(default_factory=dict, repr=False, compare=False)

    def _matrix(self) -> Whitened:
        precisions = torch.tensor(self.precisions, dtype=torch.float64)
        return Whitened(self.rows, whitening(self.rows, precisions, self.root))

    def sample(self, seed: int, start: int, stop: int) -> Tensor:
        """Draws `start` to `stop`, [S, P]; draw s depends on (seed, s) alone."""
        size = draws_at_once(self.rows.size)
        parts = []
        for block in range(start // size, -(-stop // size)):
            first = block * size
            parts.append(self._block(seed, block, size)[max(start - first, 0) : stop - first])
        return torch.cat(parts)

    def _block(self, seed: int, block: int, size: int) -> Tensor:
        if (seed, block) not in self._solved:
            first, last = block * size, (block + 1) * size
            with true_float32(), torch.no_grad():
                matrix, n = self._matrix(), normals(self.rows, seed, first, last)
                epsilon = self.rows.targets(seed, first, last)
                right = Right(n, matrix.scale * self.rows.vjp(epsilon), epsilon)
                made = (matrix.scale * self.solver(matrix, right, n).values).to(self.dtype)
            while self._solved and made.numel() * (len(self._solved) + 1) > KEPT_FLOATS:
                self._solved.pop(next(iter(self._solved)))
            self._solved[seed, block] = made
        return self._solved[seed, block]

    def product(self, vectors: Tensor) -> Tensor:
        """Σ v for vectors [S, P], to the solver's accuracy (for ‖Λ^{-½} v‖ < 1, that of unit length)."""
        with true_float32(), torch.no_grad():
            matrix = self._matrix()
            fixed = matrix.scale * vectors.to(matrix.scale)
            size = fixed.norm(dim=1, keepdim=True).clamp(torch.finfo(fixed.dtype).tiny, 1)
            zero = torch.zeros_like(fixed)
            solution = self.solver(matrix, Right(fixed / size, zero), zero)
            return (matrix.scale * solution.values * size).to(vectors)

    def covariance_root(self, jacobians: BatchJacobians) -> Tensor:
        """[B, C, S] whose products over S are the mean of (J z)(J z)ᵀ over the sampled z."""
        seed, count = self.moments_from
        tensors = jacobians.tensors.values()
        parts = self.sample(seed, 0, count).split([j.size for j in tensors], dim=1)
        moved = [j.apply(part.contiguous()) for j, part in zip(tensors, parts, strict=True)]
        return sum(moved[1:], moved[0]) / count**0.5

    def covariance(self, jacobians: BatchJacobians) -> Tensor:
        """The mean of (J z)(J z)ᵀ at each point, [B, C, C]."""
        root = self.covariance_root(jacobians)
        return root @ root.mT


@dataclass
class _Block:
    """Some of the samples: their n, JᵀRε and ε, and the last solution u = Λ^½ z."""

    normals: Tensor
    noise: Tensor
    epsilon: Tensor
    solved: Tensor


@dataclass
class SampledCurvature:
    """H given by solved draws and a stochastic spectrum; the random numbers are the same at every precision.

    `samples` draws (0 to S − 1 of `seed`) give effective dimensions, warm-started from the last precision;
    `spectrum` gives log determinants, between bounds. `root` [P] is D of the g-prior, the same as the spectrum's.
    """

    rows: GGNOperator
    solver: Solver
    seed: int
    samples: int
    spectrum: Spectrum | ExactSpectrum | None
    dtype: torch.dtype
    root: Tensor | None = None
    solutions: dict[tuple[float, ...], tuple[float, float]] = field(default_factory=dict)
    _blocks: list[_Block] = field(default_factory=list, repr=False)
    _found: dict[tuple[float, ...], Tensor] = field(default_factory=dict, repr=False)
    _brackets: dict[tuple[float, ...], Bracket] = field(default_factory=dict, repr=False)

    @property
    def groups(self) -> tuple[Group, ...]:
        return each_tensor(self.rows.jacobians.names)

    def _key(self, precisions: Tensor) -> tuple[float, ...]:
        return tuple(precisions.detach().cpu().expand(len(self.groups)).tolist())

    def dimension_samples(self, precisions: Tensor) -> Tensor:
        """n_g · (n_g − Λ^½ z_g) of each draw z, [S, T]; its mean is γ_g = Tr_g H (H + Λ)⁻¹.

        E n (Λ^½ z)ᵀ = Λ^½ (H + Λ)⁻¹ Λ^½ = I − M, so the mean is Tr_g M = γ_g, and the variance is at most
        γ_g + Tr_g M² ≤ 2 γ_g. z_g · (H z)_g has the same mean, but a variance that grows without bound as Λ becomes
        small compared with H.
        """
        at = self._key(precisions)
        if at not in self._found:
            matrix = Whitened(self.rows, whitening(self.rows, precisions, self.root))
            sizes, parts, made = list(self.rows.jacobians.sizes().values()), [], []
            with true_float32(), torch.no_grad():
                for block in self._started():
                    right = Right(block.normals, matrix.scale * block.noise, block.epsilon)
                    made.append(self.solver(matrix, right, block.solved))
                    block.solved = made[-1].values
                    each = (block.normals * (block.normals - block.solved)).split(sizes, dim=1)
                    parts.append(torch.stack([wide(part).sum(1) for part in each], dim=1).cpu())
            self._found[at] = torch.cat(parts)
            self.solutions[at] = _worst(made)
        return self._found[at]

    def _started(self) -> list[_Block]:
        """Every block, starting with u = n: exact where data have no influence, at every precision."""
        size = draws_at_once(self.rows.size)
        for first in range(0, 0 if self._blocks else self.samples, size):
            last = min(first + size, self.samples)
            n, epsilon = normals(self.rows, self.seed, first, last), self.rows.targets(self.seed, first, last)
            self._blocks.append(_Block(n, self.rows.vjp(epsilon), epsilon, n))
        return self._blocks

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        """Tr_g H (H + Λ)⁻¹, [T], the mean over the samples."""
        return self.dimension_samples(precisions).mean(0)

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        """Log det(H + Λ) − log det Λ, exact or by quadrature; differentiable in one precision [1]; NaN if left out."""
        if self.spectrum is None:
            return torch.full((), torch.nan, dtype=torch.float64)
        return self.log_det_samples(precisions).mean()

    def log_det_samples(self, precisions: Tensor) -> Tensor:
        """One estimate a probe, [Q] float64; of an exact spectrum the one value [1]."""
        return self.bracket(precisions).samples

    def bracket(self, precisions: Tensor) -> Bracket:
        """Bounds on the log determinant."""
        assert self.spectrum is not None
        key = self._key(precisions)
        if precisions.requires_grad:
            return self._bracket(precisions)
        if key not in self._brackets:
            self._brackets[key] = self._bracket(precisions)
        return self._brackets[key]

    def _bracket(self, precisions: Tensor) -> Bracket:
        assert self.spectrum is not None
        with true_float32():
            return self.spectrum.bracket(precisions, Whitened(self.rows, whitening(self.rows, precisions, self.root)))

    def gaussian(self, precisions: Tensor) -> SampledGaussian:
        key, moments_from = self._key(precisions), (self.seed, self.samples)
        return SampledGaussian(self.rows, self.solver, key, moments_from, self.dtype, self.root)

    def scaled_by_diagonal(self, num_points: int, repairs: Repairs) -> DiagonalScaling:
        """With the diagonal exact where the rows are kept, else probed in one pass."""
        parts = self.rows.diagonal(PROBES, self.seed).split(list(self.rows.jacobians.sizes().values()))
        shape = torch.cat([information_per_point(part, num_points) for part in parts])
        root, spectrum = inverse_root(shape), self.spectrum
        if spectrum is not None:
            spectrum = spectrum.scaled(root)
        scaled = replace(self, spectrum=spectrum, root=root, solutions={}, _blocks=[], _found={}, _brackets={})
        return DiagonalScaling(scaled, shape)

    def facts(self, precisions: Tensor) -> Mapping[str, float]:
        """Largest error bound and relative residual of the samples at these precisions."""
        self.dimension_samples(precisions)
        error, residual = self.solutions[self._key(precisions)]
        return {"sample_error_sd": error, "sample_residual": residual}


def _worst(solutions: list[Solution]) -> tuple[float, float]:
    return max(float(s.error.max()) for s in solutions), max(float(s.residual.max()) for s in solutions)
