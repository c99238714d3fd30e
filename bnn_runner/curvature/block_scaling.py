"""Blocks of curvature scaled by their own diagonals (see `diagonal_scaling`), each in its eigenbasis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.curvature.blocks import Block, DiagonalBlock, FullBlock, KroneckerBlock, Precision
from bnn_runner.curvature.diagonal_scaling import information_per_point, inverse_root
from bnn_runner.curvature.jacobian_forms import DenseJacobian, OuterProductJacobian, TensorJacobian
from bnn_runner.curvature.psd import Repairs, eigh
from bnn_runner.errors import RunFailed


@dataclass(frozen=True)
class ScaledBlock:
    """`inner` is the block of the scaled weights; D = `rows` [o] ⊗ `columns` [d] (columns [1] for a vector)."""

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


def scaled_block(block: Block, num_points: int, name: str, repairs: Repairs) -> tuple[Block, Tensor]:
    """The block of the scaled weights, and s [P_g] in the group's order. Raises `RunFailed` for a block of EKFAC."""
    if isinstance(block, DiagonalBlock):
        shape = information_per_point(block.diagonal, num_points)
        return ScaledDiagonal(block.diagonal, shape), shape
    if isinstance(block, FullBlock):
        shape = information_per_point(block.vectors.square() @ block.values, num_points)
        root = inverse_root(shape)
        values, vectors = _eigen(block.vectors * block.values.sqrt(), root, name, repairs)
        return ScaledBlock(FullBlock(values, vectors), root, torch.ones_like(root[:1])), shape
    assert isinstance(block, KroneckerBlock)
    values_g, values_a = _factors(block, name)
    shape_g = information_per_point(block.vectors_g.square() @ values_g, 1)
    shape_a = information_per_point(block.vectors_a.square() @ values_a, num_points)
    rows, columns = inverse_root(shape_g), inverse_root(shape_a)
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
            f"method.structure=ekfac does not support hyper.family=g: the corrected eigenvalues of {name} are no "
            "Kronecker product, so that scaling by the diagonal loses the eigenbasis. Use method.structure=kfac, or "
            "another hyper.family."
        )
    return values_g, values_a
