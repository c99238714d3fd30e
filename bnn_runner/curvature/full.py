"""The full GGN, on the smaller of two sides: P × P (primal) or M × M with M = N·C rows (dual).

All formulas are in whitened weights u = Λ^{1/2} δ, where the posterior precision is I + H̃ with
H̃ = Λ^{-1/2} H Λ^{-1/2}. On the dual side only the r directions V that the data determine are kept:
Σ̃ = I − V diag(s/(1+s)) Vᵀ. Variances are sums of squares (within V, and off it), so that none
becomes negative by cancellation; where s is small enough for the difference to lose no digit, it is used instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from bnn_runner.curvature.diagonal_scaling import DiagonalScaling, information_per_point, inverse_root
from bnn_runner.curvature.groups import Group, each_tensor
from bnn_runner.curvature.jacobians import BatchJacobians, Jacobians
from bnn_runner.curvature.layer_pairs import PairSums, pays, pieces_of
from bnn_runner.curvature.psd import Repairs, add_gram, checked, cholesky, eigh, gram, log_det, mirrored, singular, wide
from bnn_runner.curvature.weighted_gram import outer
from bnn_runner.rng import generator
from bnn_runner.runtime.memory import memory_limit

CANCELS = 1e7
"""Largest s up to which a variance is computed as a difference from the prior's (1 + s times smaller at most)."""
WEAK = 1e9
"""Trace of H̃ above which singular values of the rows are used: their Gram matrix rounds eigenvalues to 1e-15 of it."""
ROUNDING = 1e-15
"""Of the largest eigenvalue of a Gram matrix: less is no information."""


def side(num_parameters: int, num_rows: int) -> str:
    """The smaller side: primal (P × P) or dual (M × M)."""
    return "primal" if num_parameters <= num_rows else "dual"


def bytes_needed(num_parameters: int, num_rows: int) -> int:
    """Bytes of the matrices that a full fit holds at its peak (float64)."""
    if side(num_parameters, num_rows) == "primal":
        return 3 * 8 * num_parameters**2
    return 8 * (num_rows * num_parameters * 2 + 2 * num_rows**2)


@dataclass(frozen=True)
class FullGaussian:
    """N(0, (H + Λ)⁻¹): `scale` = Λ^{-1/2} [P]; `vectors` [P, r] and `values` [r] of H̃ (all of them if r = P).

    `resolved`: small values are right to the rounding of the rows, not of their Gram matrix.
    """

    scale: Tensor
    values: Tensor
    vectors: Tensor
    dtype: torch.dtype
    resolved: bool = False

    @property
    def rounded_information(self) -> float:
        """The largest eigenvalue of H̃, from whose rounding the small ones suffer; 0 where they don't."""
        resolved = self.resolved and self.dtype == torch.float64
        return 0.0 if resolved or not len(self.values) else float(self.values.max())

    def sample(self, seed: int, start: int, stop: int) -> Tensor:
        """Draws `start` to `stop`, [S, P]; draw s depends on (seed, s) alone."""
        size = len(self.scale)
        z = torch.stack(
            [
                torch.randn(size, generator=generator(seed, "posterior", s), dtype=torch.float64)
                for s in range(start, stop)
            ]
        )
        z = z.to(self.scale.device)
        shrink = torch.rsqrt(1 + self.values) - 1
        u = z + ((z @ self.vectors) * shrink) @ self.vectors.T
        return (u * self.scale).to(self.dtype)

    def product(self, vectors: Tensor) -> Tensor:
        """Σ v for vectors [S, P]."""
        u = wide(vectors) * self.scale
        within = u @ self.vectors
        if bool((self.values > CANCELS).any()):
            u = u - within @ self.vectors.T
            u = u - (u @ self.vectors) @ self.vectors.T + (within / (1 + self.values)) @ self.vectors.T
        else:
            u = u - (within * (self.values / (1 + self.values))) @ self.vectors.T
        return (u * self.scale).to(vectors)

    def covariance_root(self, jacobians: BatchJacobians) -> Tensor:
        """[B, C, r + P] (or [B, C, P] where all directions are kept) whose products are J Σ Jᵀ, float64."""
        rows = wide(jacobians.dense()) * self.scale
        within = rows @ self.vectors
        informed = within * torch.rsqrt(1 + self.values)
        if self.vectors.shape[1] == len(self.scale):
            return informed
        return torch.cat([informed, rows - within @ self.vectors.T], dim=-1)

    def covariance(self, jacobians: BatchJacobians) -> Tensor:
        """J Σ Jᵀ at each point, [B, C, C]."""
        if self.vectors.shape[1] == len(self.scale) or bool((self.values > CANCELS).any()):
            return outer(self.covariance_root(jacobians)).to(self.dtype)
        rows = wide(jacobians.dense()) * self.scale
        taken = (rows @ self.vectors) * (self.values / (1 + self.values)).sqrt()
        return (outer(rows) - outer(taken)).to(self.dtype)


@dataclass
class FullCurvature:
    """H = JᵀJ with J [M, P] the rows Rᵀ∂f: either `gram` is H itself (primal), or `rows` is J (dual)."""

    rows: Tensor | None
    gram: Tensor | None
    sizes: dict[str, int]
    dtype: torch.dtype
    repairs: Repairs
    preconditions: ClassVar[bool] = True
    _spectrum: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _isotropic: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    _grams: Tensor | None = field(default=None, repr=False)
    _traces: Tensor | None = field(default=None, repr=False)
    _resolved: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def weak(self, precisions: Tensor) -> bool:
        """Whether the prior is so weak that the rows' Gram matrix rounds off what the data say; for [1] or [T]."""
        if self.rows is None:
            return False
        if self._traces is None:
            each = self.rows.square().sum(0).split(list(self.sizes.values()))
            self._traces = torch.stack([part.sum() for part in each]).cpu()
        return float((self._traces / precisions.detach().cpu()).sum()) > WEAK

    def _expand(self, precisions: Tensor) -> Tensor:
        """One precision a tensor [T] to one a weight [P]."""
        counts = torch.tensor(list(self.sizes.values()))
        return precisions.cpu().repeat_interleave(counts).to((self.rows if self.rows is not None else self.gram).device)  # type: ignore[union-attr]

    def _resolved_eigen(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The same as `_eigen` by singular values of the rows, made once for H itself."""
        assert self.rows is not None
        if scale is not None:
            return singular(self.rows * scale, "the full curvature (dual side)", self.repairs)
        if self._resolved is None:
            self._resolved = singular(self.rows, "the full curvature (dual side)", self.repairs)
        return self._resolved

    def _eigen(self, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Non-zero eigenvalues [r] and eigenvectors [P, r] of diag(scale) H diag(scale)."""
        if self.gram is not None:
            matrix = self.gram if scale is None else scale[:, None] * self.gram * scale
            return eigh(matrix, "the full curvature", self.repairs)
        assert self.rows is not None
        rows = self.rows if scale is None else self.rows * scale
        values, left = self._dual_eigen(rows) if scale is not None else self._isotropic_spectrum()
        return values, (rows.T @ left) * values.rsqrt()

    def _dual_eigen(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Non-zero eigenvalues [r] and eigenvectors [M, r] of the dual side."""
        values, left = eigh(gram(rows.T), "the full curvature (dual side)", self.repairs)
        keep = values > values[-1].clamp_min(1e-300) * ROUNDING
        return values[keep], left[:, keep]

    def _isotropic_spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of H and eigenvectors of its smaller side, which is all that the evidence needs."""
        if self._spectrum is None:
            self._spectrum = self._eigen(None) if self.rows is None else self._dual_eigen(self.rows)
        return self._spectrum

    def isotropic_eigen(self) -> tuple[Tensor, Tensor]:
        """The eigendecomposition of H itself, computed once for all isotropic precisions."""
        if self._isotropic is None:
            self._isotropic = self._isotropic_spectrum() if self.rows is None else self._eigen(None)
        return self._isotropic

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        """Log det(H + Λ) − log det Λ for one precision [1] or one a tensor [T], float64, differentiable.

        A single one costs O(P) after one eigendecomposition. Several cost a Cholesky factor
        of the smaller side each time, and its inverse for the derivatives.
        """
        if len(precisions) == 1:
            weak = self.weak(precisions)
            values, _ = self._resolved_eigen(None) if weak else self._isotropic_spectrum()
            return torch.log1p(values / precisions[0].to(values.device)).sum()
        if self.weak(precisions):
            with torch.no_grad():
                gaussian = self.gaussian(precisions)
                value, slope = torch.log1p(gaussian.values).sum().cpu(), -self._dimensions(gaussian) / precisions.cpu()
            moved = (slope * precisions.cpu()).sum()  # the derivative −γ_g/λ_g, and the value
            return value + moved - moved.detach()
        return log_det(self._system(precisions), "the full curvature", self.repairs)

    def _system(self, precisions: Tensor) -> Tensor:
        """I + H̃ on the smaller side, differentiable; on the dual side from cached Gram matrices of the tensors."""
        if self.gram is not None:
            scale = self._expand(precisions).rsqrt()
            matrix = scale[:, None] * self.gram * scale
        else:
            if self._grams is None:
                assert self.rows is not None
                parts = self.rows.split(list(self.sizes.values()), dim=1)
                self._grams = torch.stack([gram(p.T) for p in parts])
            matrix = torch.tensordot(precisions.to(self._grams.device).reciprocal(), self._grams, dims=1)
        identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        return matrix + identity

    @property
    def groups(self) -> tuple[Group, ...]:
        return each_tensor(tuple(self.sizes))

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        """Tr_g H (H + Λ)⁻¹ of each tensor, [T].

        One precision for all: Σ_{j in g} Σ_i V_ji² s_i/(1 + s_i) with V, s of H̃, from the one spectrum. Several:
        the diagonal of I − (I + H̃)⁻¹ (primal), or the trace of (I + H̃)⁻¹ times the group's Gram matrix over λ_g (dual).
        """
        parts = list(self.sizes.values())
        if bool((precisions == precisions[0]).all()) or self.weak(precisions):
            return self._dimensions(self.gaussian(precisions.expand(len(parts))))
        inverse = torch.cholesky_inverse(cholesky(self._system(precisions), "the full curvature", self.repairs))
        if self.gram is not None:
            return torch.stack([part.sum() for part in (1 - inverse.diagonal()).split(parts)]).cpu()
        assert self._grams is not None
        return torch.einsum("tij,ij->t", self._grams, inverse).cpu() / precisions.cpu()

    def _dimensions(self, gaussian: FullGaussian) -> Tensor:
        """Σ_{j in g} Σ_i V_ji² s_i/(1 + s_i) of each tensor, [T]."""
        each = gaussian.vectors.square() @ (gaussian.values / (1 + gaussian.values))
        return torch.stack([part.sum() for part in each.split(list(self.sizes.values()))]).cpu()

    def gaussian(self, precisions: Tensor) -> FullGaussian:
        scale, weak = self._expand(precisions).rsqrt(), self.weak(precisions)
        if bool((precisions == precisions[0]).all()):
            values, vectors = self._resolved_eigen(None) if weak else self.isotropic_eigen()
            values = values / float(precisions[0])
        else:
            values, vectors = self._resolved_eigen(scale) if weak else self._eigen(scale)
        return FullGaussian(scale, values, vectors, self.dtype, resolved=weak)

    def scaled_by_diagonal(self, num_points: int, repairs: Repairs) -> DiagonalScaling:
        if self.gram is not None:
            diagonal = self.gram.diagonal()
        else:
            assert self.rows is not None
            diagonal = self.rows.square().sum(0)
        parts = diagonal.split(list(self.sizes.values()))
        shape = torch.cat([information_per_point(part, num_points) for part in parts])
        root = inverse_root(shape)
        scaled = FullCurvature(
            None if self.rows is None else self.rows * root,
            None if self.gram is None else root[:, None] * self.gram * root,
            self.sizes,
            self.dtype,
            self.repairs,
        )
        return DiagonalScaling(ScaledFull(scaled, root), shape)


@dataclass
class ScaledFull:
    """`inner` is the full curvature of the scaled weights, `root` [P] is D."""

    inner: FullCurvature
    root: Tensor

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.inner.groups

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        return self.inner.log_det_ratio(precisions)

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        return self.inner.effective_dimensions(precisions)

    def gaussian(self, precisions: Tensor) -> FullGaussian:
        gaussian = self.inner.gaussian(precisions)
        return replace(gaussian, scale=gaussian.scale * self.root)


def fit_full(jacobians: Jacobians, batches: Iterator[BatchJacobians], num_rows: int, repairs: Repairs) -> FullCurvature:
    """The exact GGN.

    Args:
        jacobians: of the weights of the basis.
        batches: one pass over the training set.
        num_rows: M = N·C.
        repairs: counts numerical repairs.

    Raises:
        RunFailed: it would not fit in memory (checked before anything is allocated), or is not finite.
    """
    sizes = jacobians.sizes()
    total = sum(sizes.values())
    memory_limit().reserve(
        f"the full curvature of {total:,} weights and {num_rows:,} output rows",
        bytes_needed(total, num_rows),
        "Use method.structure=kfac or diag, or method.weights=last_layer.",
    )
    dtype = jacobians.network.parameters[jacobians.names[0]].dtype
    if side(total, num_rows) == "primal":
        total_gram = _gram(batches, total)
        # The diagonal is not finite wherever its row or column is not.
        _check_columns(total_gram.diagonal().unsqueeze(0), sizes)
        return FullCurvature(None, total_gram, sizes, dtype, repairs)
    collected = torch.cat([wide(batch.dense().flatten(0, 1)) for batch in batches])
    _check_columns(collected, sizes)
    return FullCurvature(collected, None, sizes, dtype, repairs)


def _gram(batches: Iterator[BatchJacobians], size: int) -> Tensor:
    """H [P, P] of all batches, layer pair by layer pair where that is less work, else from the Jacobian's rows."""
    pairs, total = PairSums(), None
    for batch in batches:
        if pays(batch.tensors.values()):
            pairs.add(pieces_of(batch.tensors))
            continue
        rows = wide(batch.dense().flatten(0, 1))
        total = rows.new_zeros(size, size) if total is None else total
        add_gram(total, rows)
    assert total is None or pairs.empty, "a tensor has the same form in every batch"
    return pairs.matrix() if total is None else mirrored(total)


def _check_columns(columns: Tensor, sizes: dict[str, int]) -> None:
    """Raise `RunFailed` naming the first tensor whose `columns` [.., P] are not finite."""
    for name, part in zip(sizes, columns.split(list(sizes.values()), dim=1), strict=True):
        checked(part, name)
