"""The neural g-prior Λ = λ diag(H)/N (Zellner 1986; Antorán et al. 2022, with the mean in place of the sum over data).

At λ = 1 each weight's prior holds the information that one data point has of it. Everything is said in scaled weights
w̃ = s^{1/2} w with s = diag(H)/N, whose prior is isotropic: the curvature becomes D H D with D = s^{-1/2},
so one spectrum serves every λ. diag(H) is that of the curvature as fitted: exact for full, block and
diag, a probe of it under method.curvature=mc_fisher, and diag(G) ⊗ diag(A) for Kronecker factors, which
D H D then still is; for a sampled curvature it is exact where its rows are kept, else probed in one pass.
Weights without curvature (of pixels that never vary) would have an infinite prior variance: they are held at
MAP, which D = 0 does, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnn_runner.curvature.base import Curvature
from bnn_runner.curvature.blocks import Block, BlockCurvature, DiagonalBlock, FullBlock, KroneckerBlock, Precision
from bnn_runner.curvature.full import FullCurvature, FullGaussian
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobian_forms import DenseJacobian, OuterProductJacobian, TensorJacobian
from bnn_runner.curvature.psd import Repairs, eigh
from bnn_runner.errors import RunFailed
from bnn_runner.laplace.sampled import SampledCurvature

PROBES = 4
"""Of the diagonal of a curvature that is known by its products alone, a point."""
NO_CURVATURE = 1e-13
"""Of a tensor's largest diagonal entry: less is what rounding leaves of zero."""


@dataclass(frozen=True)
class GPrior:
    """`curvature` is that of the scaled weights (its draws are of the weights); `shape` s [P], 0 where held."""

    curvature: Curvature
    shape: Tensor


def g_prior(curvature: Curvature, num_points: int, repairs: Repairs) -> GPrior:
    """The curvature under the g-prior. Raises `RunFailed` for a structure that has no diagonal to scale by."""
    if isinstance(curvature, FullCurvature):
        return _of_full(curvature, num_points)
    if isinstance(curvature, BlockCurvature):
        return _of_blocks(curvature, num_points, repairs)
    if isinstance(curvature, SampledCurvature):
        return _of_sampled(curvature, num_points)
    raise RunFailed(
        "hyper.family=g needs a curvature whose diagonal scales it, and this structure has none. "
        "Use method.structure=full, block, kfac or diag, or another hyper.family."
    )


def _prior(diagonal: Tensor, num_points: int) -> Tensor:
    """The diagonal over N, with 0 for what is zero up to rounding."""
    return torch.where(diagonal > NO_CURVATURE * diagonal.max(), diagonal, 0.0) / num_points


def _root(shape: Tensor) -> Tensor:
    """s^{-1/2}, 0 where s is."""
    return torch.where(shape > 0, shape.rsqrt(), 0.0)


# ----------------------------------------------------------------------------------------- full


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


def _of_full(curvature: FullCurvature, num_points: int) -> GPrior:
    rows, gram = curvature.rows, curvature.gram
    if gram is not None:
        diagonal = gram.diagonal()
    else:
        assert rows is not None
        diagonal = rows.square().sum(0)
    shape = torch.cat([_prior(part, num_points) for part in diagonal.split(list(curvature.sizes.values()))])
    root = _root(shape)
    scaled = FullCurvature(
        None if rows is None else rows * root,
        None if gram is None else root[:, None] * gram * root,
        curvature.sizes,
        curvature.dtype,
        curvature.repairs,
    )
    return GPrior(ScaledFull(scaled, root), shape)


# -------------------------------------------------------------------------------------- sampled


def _of_sampled(curvature: SampledCurvature, num_points: int) -> GPrior:
    sizes = list(curvature.rows.jacobians.sizes().values())
    shape = torch.cat(
        [_prior(part, num_points) for part in curvature.rows.diagonal(PROBES, curvature.seed).split(sizes)]
    )
    root, spectrum = _root(shape), curvature.spectrum
    if spectrum is not None:
        spectrum = replace(spectrum, root=root, _isotropic=None)
    scaled = replace(curvature, spectrum=spectrum, root=root, solutions={}, _blocks=[], _found={})
    return GPrior(scaled, shape)


# --------------------------------------------------------------------------------------- blocks


@dataclass(frozen=True)
class ScaledBlock:
    """`inner` is the block of scaled weights; D is `rows` [o] ⊗ `columns` [d] (columns [1] for a vector of weights)."""

    inner: Block
    rows: Tensor
    columns: Tensor

    @property
    def spectrum(self) -> Tensor:
        return self.inner.spectrum

    def _scale(self, like: Tensor) -> Tensor:
        return torch.outer(self.rows, self.columns).reshape(-1).to(like)

    def sample(self, z: Tensor, precision: Precision) -> Tensor:
        return self.inner.sample(z, precision) * self._scale(z)

    def product(self, vectors: Tensor, precision: Precision) -> Tensor:
        scale = self._scale(vectors)
        return self.inner.product(vectors * scale, precision) * scale

    def covariance_root(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        return self.inner.covariance_root(self._scaled(jacobian), precision)

    def covariance(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        return self.inner.covariance(self._scaled(jacobian), precision)

    def _scaled(self, jacobian: TensorJacobian) -> TensorJacobian:
        """J D."""
        if isinstance(jacobian, OuterProductJacobian) and len(self.columns) == jacobian.read.shape[1]:
            a, g = jacobian.inputs, jacobian.grads
            return OuterProductJacobian(a * self.columns.to(a).unsqueeze(-1), g * self.rows.to(g).unsqueeze(-1))
        dense = jacobian.dense()
        return DenseJacobian(dense * self._scale(dense))


@dataclass(frozen=True)
class ScaledDiagonal:
    """diag(h) under precisions λ s: the curvature of the scaled weights is N, or 0 where a weight is held (s = 0)."""

    diagonal: Tensor
    shape: Tensor

    @property
    def spectrum(self) -> Tensor:
        return torch.where(self.shape > 0, self.diagonal / self.shape, 0.0)

    def _plain(self, precision: Precision) -> tuple[DiagonalBlock, Tensor]:
        """The block and the precision of each weight: infinite for one that is held."""
        return DiagonalBlock(self.diagonal), torch.where(self.shape > 0, precision * self.shape, torch.inf)

    def sample(self, z: Tensor, precision: Precision) -> Tensor:
        block, each = self._plain(precision)
        return block.sample(z, each)

    def product(self, vectors: Tensor, precision: Precision) -> Tensor:
        block, each = self._plain(precision)
        return block.product(vectors, each)

    def covariance_root(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        block, each = self._plain(precision)
        return block.covariance_root(jacobian, each)

    def covariance(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        block, each = self._plain(precision)
        return block.covariance(jacobian, each)


def _of_blocks(curvature: BlockCurvature, num_points: int, repairs: Repairs) -> GPrior:
    blocks: list[Block] = []
    shapes: list[Tensor] = []
    for group, block in zip(curvature.groups, curvature.blocks, strict=True):
        scaled, shape = _of_block(block, num_points, group.name, repairs)
        blocks.append(scaled)
        shapes.append(group.unpacked(shape.unsqueeze(0), curvature.sizes)[0])
    return GPrior(replace(curvature, blocks=tuple(blocks)), torch.cat(shapes))


def _of_block(block: Block, num_points: int, name: str, repairs: Repairs) -> tuple[Block, Tensor]:
    """The block of the scaled weights, and s [P_g] in the group's order."""
    if isinstance(block, DiagonalBlock):
        shape = _prior(block.diagonal, num_points)
        return ScaledDiagonal(block.diagonal, shape), shape
    if isinstance(block, FullBlock):
        shape = _prior(block.vectors.square() @ block.values, num_points)
        root = _root(shape)
        values, vectors = _eigen(block.vectors * block.values.sqrt(), root, name, repairs)
        return ScaledBlock(FullBlock(values, vectors), root, torch.ones_like(root[:1])), shape
    assert isinstance(block, KroneckerBlock)
    values_g, values_a = _factors(block, name)
    shape_g = _prior(block.vectors_g.square() @ values_g, 1)
    shape_a = _prior(block.vectors_a.square() @ values_a, num_points)
    rows, columns = _root(shape_g), _root(shape_a)
    scaled_g, vectors_g = _eigen(block.vectors_g * values_g.sqrt(), rows, name, repairs)
    scaled_a, vectors_a = _eigen(block.vectors_a * values_a.sqrt(), columns, name, repairs)
    inner = KroneckerBlock(vectors_a, vectors_g, torch.outer(scaled_g, scaled_a).reshape(-1))
    return ScaledBlock(inner, rows, columns), torch.outer(shape_g, shape_a).reshape(-1)


def _eigen(half: Tensor, root: Tensor, name: str, repairs: Repairs) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of D M D for M = half halfᵀ."""
    scaled = root[:, None] * half
    return eigh(scaled @ scaled.T, name, repairs)


def _factors(block: KroneckerBlock, name: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues of G [o] and A [d], of which the spectrum is the outer product. Raises `RunFailed` for EKFAC's."""
    spectrum = block.spectrum.reshape(len(block.vectors_g), -1)
    total = float(spectrum.sum())
    values_g, values_a = spectrum.sum(1), spectrum.sum(0) / max(total, 1e-300)
    if float((torch.outer(values_g, values_a) - spectrum).norm()) > 1e-6 * float(spectrum.norm()):
        raise RunFailed(
            f"hyper.family=g under EKFAC: the corrected eigenvalues of {name} are no Kronecker product, and scaled by "
            "their diagonal they keep no eigenbasis. Use method.structure=kfac, or another hyper.family."
        )
    return values_g, values_a
