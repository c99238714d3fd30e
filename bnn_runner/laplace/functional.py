"""Posteriors in function space: exact dual draws from all training rows, and Nyström features (ELLA).

Letters: M = N·C rows G = Rᵀ J Λ^{-½} of the training set in whitened weights u = Λ^½ δ, r features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bnn_runner.base import Likelihood, Network
from bnn_runner.curvature.full import FullCurvature, FullGaussian
from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.groups import Group, each_tensor
from bnn_runner.curvature.jacobians import BatchJacobians, Jacobians
from bnn_runner.curvature.psd import Repairs, cholesky, eigh, wide
from bnn_runner.curvature.weighted_gram import outer
from bnn_runner.laplace.sampled import whitening
from bnn_runner.laplace.solvers import Whitened
from bnn_runner.rng import generator
from bnn_runner.runtime.memory import halving
from bnn_runner.tasks import Split, Task

OVERSAMPLED, ITERATIONS = 10, 8
"""Additional directions, and rounds, of the subspace iteration for the features."""
MEASURED_POINTS = 64
"""Points of each split at which the variance off the features is measured."""


def _normals(size: int, seed: int, name: str, start: int, stop: int, like: Tensor) -> Tensor:
    """Standard normals of draws `start` to `stop` from the named stream, [S, size]; row s of (seed, s) alone."""
    drawn = [torch.randn(size, generator=generator(seed, name, s), dtype=torch.float64) for s in range(start, stop)]
    return torch.stack(drawn).to(like)


def _root_variances(precisions: tuple[float, ...], sizes: Mapping[str, int], like: Tensor) -> Tensor:
    """Λ^{-½} [P] from one precision per tensor."""
    each = torch.tensor(precisions, dtype=torch.float64).repeat_interleave(torch.tensor(list(sizes.values())))
    return each.rsqrt().to(like)


@dataclass(frozen=True)
class PathwiseGaussian:
    """N(0, (H + Λ)⁻¹) by conditioning prior draws on the data (Matheron's rule), exact, on the dual side.

    u = n + Gᵀ(I + GGᵀ)⁻¹(ε − G n) with n ~ N(0, I) [P], ε ~ N(0, I) [M]. `rows` are Rᵀ J [M, P], `factor` is the
    Cholesky factor of I + GGᵀ. Moments come from an eigendecomposition that is computed when first needed.
    """

    rows: Tensor
    factor: Tensor
    precisions: tuple[float, ...]
    sizes: dict[str, int]
    dtype: torch.dtype
    _exact: list[FullGaussian] = field(default_factory=list, repr=False, compare=False)

    def _scale(self) -> Tensor:
        return _root_variances(self.precisions, self.sizes, self.rows)

    def sample(self, seed: int, start: int, stop: int) -> Tensor:
        """Draws `start` to `stop`, [S, P]; draw s depends on (seed, s) alone."""
        scale = self._scale()
        n = _normals(len(scale), seed, "posterior", start, stop, scale)
        epsilon = _normals(len(self.rows), seed, "targets", start, stop, scale)
        solved = torch.cholesky_solve((epsilon - (n * scale) @ self.rows.T).T, self.factor).T
        return ((n + solved @ self.rows * scale) * scale).to(self.dtype)

    def product(self, vectors: Tensor) -> Tensor:
        """Σ v for vectors [S, P]."""
        scale = self._scale()
        w = wide(vectors) * scale
        solved = torch.cholesky_solve(((w * scale) @ self.rows.T).T, self.factor).T
        return ((w - solved @ self.rows * scale) * scale).to(vectors)

    def covariance_root(self, jacobians: BatchJacobians) -> Tensor:
        """[B, C, ·] whose products over the last axis are J Σ Jᵀ, float64."""
        return self._eigen().covariance_root(jacobians)

    def covariance(self, jacobians: BatchJacobians) -> Tensor:
        """J Σ Jᵀ at each point, [B, C, C]."""
        return self._eigen().covariance(jacobians)

    def _eigen(self) -> FullGaussian:
        if not self._exact:
            full = FullCurvature(self.rows, None, self.sizes, self.dtype, Repairs())
            self._exact.append(full.gaussian(torch.tensor(self.precisions, dtype=torch.float64)))
        return self._exact[0]


@dataclass(frozen=True)
class DualCurvature:
    """The exact curvature as its rows; evidence and effective dimensions are those of the full curvature."""

    full: FullCurvature

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.full.groups

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        return self.full.log_det_ratio(precisions)

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        return self.full.effective_dimensions(precisions)

    def gaussian(self, precisions: Tensor) -> PathwiseGaussian | FullGaussian:
        """By Matheron's rule; under a prior so weak that I + GGᵀ rounds off its own I, by singular values of G."""
        full, rows = self.full, self.full.rows
        assert rows is not None
        if full.weak(precisions):
            return full.gaussian(precisions.expand(len(self.groups)))
        at = tuple(precisions.detach().cpu().expand(len(self.groups)).tolist())
        scaled = rows * _root_variances(at, full.sizes, rows)
        system = scaled @ scaled.T
        system.diagonal().add_(1)
        factor = cholesky(system, "the dual side", full.repairs)
        return PathwiseGaussian(rows, factor, at, dict(full.sizes), full.dtype)


# ------------------------------------------------------------------------------------- features


@dataclass(frozen=True)
class PlainOutputs:
    """The root I [K, K]: rows of the Jacobian itself, for the tangent kernel (`output_curvature` has the others)."""

    def columns(self, task: Task, network: Network) -> int:
        x, _ = task.train.gather(torch.arange(1))
        return int(network(x).shape[-1])

    def uniforms(self, task: Task) -> None:
        return None

    def root(self, likelihood: Likelihood, outputs: Tensor, y: Tensor, uniforms: Tensor | None) -> Tensor:
        return torch.eye(outputs.shape[-1]).to(outputs).expand(len(outputs), -1, -1)


@dataclass(frozen=True)
class NystromGaussian:
    """u = V a, a ~ N(0, (I + diag(values))⁻¹) [r]: no variance off the features V [P, r] (ELLA, Deng et al. 2022)."""

    scale: Tensor
    vectors: Tensor
    values: Tensor
    dtype: torch.dtype

    def sample(self, seed: int, start: int, stop: int) -> Tensor:
        """Draws `start` to `stop`, [S, P]; draw s depends on (seed, s) alone."""
        z = _normals(len(self.values), seed, "posterior", start, stop, self.vectors)
        return (((z * torch.rsqrt(1 + self.values)) @ self.vectors.T) * self.scale).to(self.dtype)

    def product(self, vectors: Tensor) -> Tensor:
        """Σ v for vectors [S, P]."""
        inside = (vectors.to(self.scale) * self.scale) @ self.vectors / (1 + self.values)
        return ((inside @ self.vectors.T) * self.scale).to(vectors)

    def covariance_root(self, jacobians: BatchJacobians) -> Tensor:
        """[B, C, r] whose products over the last axis are J Σ Jᵀ."""
        return features_at(jacobians, self.scale, self.vectors) * torch.rsqrt(1 + self.values)

    def covariance(self, jacobians: BatchJacobians) -> Tensor:
        """J Σ Jᵀ at each point, [B, C, C]."""
        return outer(self.covariance_root(jacobians)).to(self.dtype)


def features_at(jacobians: BatchJacobians, scale: Tensor, vectors: Tensor) -> Tensor:
    """J Λ^{-½} V, [B, C, r], in the vectors' dtype."""
    tensors = jacobians.tensors.values()
    parts = (vectors.T * scale).to(jacobians.outputs).split([j.size for j in tensors], dim=1)
    moved = [j.apply(part.contiguous()) for j, part in zip(tensors, parts, strict=True)]
    return sum(moved[1:], moved[0]).to(vectors)


@dataclass
class NystromCurvature:
    """H in the span of r features: the leading right singular vectors V of J Λ^{-½} at the pivots.

    All isotropic precisions share their features; each set of unequal precisions has its own.
    """

    pivots: GGNOperator
    rows: GGNOperator
    features: int
    dtype: torch.dtype
    repairs: Repairs
    _found: dict[tuple[float, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def groups(self) -> tuple[Group, ...]:
        return each_tensor(self.rows.jacobians.names)

    def _features(self, precisions: Tensor) -> tuple[Tensor, Tensor]:
        """V [P, r] in which Vᵀ H̃ V is diagonal, and that diagonal [r], at precisions [T] (or all 1)."""
        at = tuple(precisions.detach().cpu().expand(len(self.groups)).tolist())
        if at not in self._found:
            scale = whitening(self.rows, precisions)
            # Kept rows are float64; those of more points than are kept may not be.
            vectors = _leading(Whitened(self.pivots, scale), self.features, self.repairs).to(scale)
            gram = halving(partial(self._gram, vectors.T * scale), self.rows.halve)
            values, basis = eigh(gram, "the features' curvature", self.repairs)
            self._found[at] = vectors @ basis.to(vectors), values.to(vectors)
        return self._found[at]

    def _gram(self, vectors: Tensor) -> Tensor:
        """Vᵀ H V, [r, r] float64, for vectors [r, P]. One pass."""
        gram = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
        for _, rows in self.rows.batches(len(vectors)):
            inside = wide(rows.jvp(vectors).flatten(0, 1))
            gram += (inside.T @ inside).cpu()
        return gram

    def _at(self, precisions: Tensor) -> tuple[Tensor, Tensor]:
        """V and Vᵀ H̃ V at these precisions."""
        if bool((precisions == precisions[0]).all()):
            vectors, values = self._features(torch.ones(1, dtype=torch.float64))
            return vectors, values / float(precisions[0])
        return self._features(precisions)

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        """Log det(I + Vᵀ H̃ V); differentiable in one precision [1]."""
        if len(precisions) == 1:
            _, values = self._features(torch.ones(1, dtype=torch.float64))
            return torch.log1p(wide(values).cpu() / precisions.cpu()[0]).sum()
        return torch.log1p(wide(self._at(precisions)[1])).sum()

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        """Σ_{j in g} Σ_i V_ji² s_i/(1 + s_i), [T]."""
        vectors, values = self._at(precisions)
        each = wide(vectors.square() @ (values / (1 + values)))
        return torch.stack([p.sum() for p in each.split(list(self.rows.jacobians.sizes().values()))]).cpu()

    def gaussian(self, precisions: Tensor) -> NystromGaussian:
        vectors, values = self._at(precisions)
        return NystromGaussian(whitening(self.rows, precisions), vectors, values, self.dtype)


def _leading(matrix: Whitened, count: int, repairs: Repairs) -> Tensor:
    """The `count` leading eigenvectors [P, r] of the pivots' H̃: from its Gram matrix, or by subspace iteration."""
    rows = matrix.rows
    if rows.keeps:
        (_, kept), *_ = rows.batches(1)
        assert kept.kept is not None
        scaled = kept.kept.flatten(0, 1) * matrix.scale
        primal = scaled.shape[0] > scaled.shape[1]  # of the two Gram matrices with these eigenvalues the smaller one
        values, found = eigh(scaled.T @ scaled if primal else scaled @ scaled.T, "the pivots' kernel", repairs)
        used = values > values[-1].clamp_min(1e-300) * 1e-12 * len(values)
        values, found = values[used][-count:], found[:, used][:, -count:]
        found = found.to(scaled)
        return found if primal else (scaled.T @ found) * values.rsqrt().to(scaled)
    stream = generator(0, "features")
    width = min(count + OVERSAMPLED, rows.size)
    basis = torch.randn(rows.size, width, generator=stream, dtype=torch.float64).to(matrix.scale)
    basis = torch.linalg.qr(basis).Q
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix.product(basis.T.contiguous()).T).Q
    values, inside = eigh(basis.T @ matrix.product(basis.T.contiguous()).T, "the pivots' kernel", repairs)
    return basis @ inside[:, -count:].to(basis)


@torch.no_grad()
def off_the_features(
    jacobians: Jacobians, gaussian: NystromGaussian, splits: Sequence[tuple[str, Split]]
) -> dict[str, tuple[float, float]]:
    """For each split: the mean prior variance off the features, and the mean variance of the draws.

    Draws lack the variance off the features. Where data have little influence it equals the prior's, which is
    measured here, at the split's first points and over all outputs, in the network's output units squared.
    """
    measured = {}
    for name, split in splits:
        missing = kept = 0.0
        points = split.gather(torch.arange(min(MEASURED_POINTS, len(split))))[0]
        for x in points.split(jacobians.batch_size(jacobians.network(points[:1]).shape[-1], use="any")):
            batch = jacobians(x)
            scales = gaussian.scale.split([j.size for j in batch.tensors.values()])
            prior = sum(
                float((j.dense() * s.to(batch.outputs)).square().sum())
                for j, s in zip(batch.tensors.values(), scales, strict=True)
            )
            missing += prior - float(features_at(batch, gaussian.scale, gaussian.vectors).square().sum())
            kept += float(gaussian.covariance_root(batch).square().sum())
        count = len(points) * batch.outputs.shape[-1]
        measured[name] = max(missing, 0.0) / count, kept / count
    return measured
