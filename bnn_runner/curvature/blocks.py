"""Block-diagonal curvature: a block for each group of parameter tensors (KFAC, diagonal, block by layer).

A block knows its eigenvalues, so that the evidence and its gradient in the prior precision cost
O(P), and with a precision λ it is a Gaussian N(0, (H_g + λI)⁻¹).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobian_forms import OuterProductJacobian, TensorJacobian
from bnn_runner.curvature.jacobians import BatchJacobians
from bnn_runner.curvature.weighted_gram import few_at_once, outer, weighted_gram
from bnn_runner.rng import generator

Precision = float | Tensor
"""One number; for a diagonal block also one a weight [P_g]."""


class Block(Protocol):
    """Curvature of one group of weights in its eigenbasis."""

    @property
    def spectrum(self) -> Tensor:
        """Eigenvalues [P_g], float64."""
        ...

    def sample(self, z: Tensor, precision: Precision) -> Tensor:
        """Standard normals [S, P_g] to draws of N(0, (H_g + λI)⁻¹)."""
        ...

    def product(self, vectors: Tensor, precision: Precision) -> Tensor:
        """(H_g + λI)⁻¹ v for vectors [S, P_g]."""
        ...

    def covariance_root(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        """[B, C, P_g] whose products over the last axis are the block's part of J Σ Jᵀ."""
        ...

    def covariance(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        """The block's part of J Σ Jᵀ at each point, [B, C, C]."""
        ...


@dataclass(frozen=True)
class DiagonalBlock:
    """H_g = diag(h)."""

    diagonal: Tensor

    @property
    def spectrum(self) -> Tensor:
        return self.diagonal

    def sample(self, z: Tensor, precision: Precision) -> Tensor:
        return z * (self.diagonal + precision).rsqrt().to(z)

    def product(self, vectors: Tensor, precision: Precision) -> Tensor:
        return vectors / (self.diagonal + precision).to(vectors)

    def covariance_root(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        dense = jacobian.dense()
        return dense * (self.diagonal + precision).rsqrt().to(dense)

    def covariance(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        if isinstance(jacobian, OuterProductJacobian):
            scale = (self.diagonal + precision).rsqrt().to(jacobian.grads)
            return weighted_gram(jacobian, scale.reshape(jacobian.grads.shape[2], -1))
        return outer(self.covariance_root(jacobian, precision))


@dataclass(frozen=True)
class KroneckerBlock:
    """Curvature of a weight [o, d] in the basis Q_G ⊗ Q_A; eigenvalues `spectrum` [o·d], those of G ⊗ A in KFAC."""

    vectors_a: Tensor
    vectors_g: Tensor
    spectrum: Tensor

    def _scale(self, precision: Precision) -> Tensor:
        return (self.spectrum + precision).rsqrt().reshape(len(self.vectors_g), -1)

    def sample(self, z: Tensor, precision: Precision) -> Tensor:
        o, d = len(self.vectors_g), len(self.vectors_a)
        scaled = z.reshape(-1, o, d) * self._scale(precision).to(z)
        return (self.vectors_g.to(z) @ scaled @ self.vectors_a.to(z).T).reshape(len(z), -1)

    def product(self, vectors: Tensor, precision: Precision) -> Tensor:
        o, d = len(self.vectors_g), len(self.vectors_a)
        q_g, q_a = self.vectors_g.to(vectors), self.vectors_a.to(vectors)
        inside = q_g.T @ vectors.reshape(-1, o, d) @ q_a * self._scale(precision).square().to(vectors)
        return (q_g @ inside @ q_a.T).reshape(len(vectors), -1)

    def covariance_root(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        assert isinstance(jacobian, OuterProductJacobian), "a Kronecker block belongs to a weight matrix"
        b, c, o, _ = jacobian.grads.shape
        if self._rotates_first(jacobian):
            dense = self.rotated(jacobian).dense().reshape(b * c, o, -1)
        else:
            plain = jacobian.dense().reshape(b * c, o, -1)
            dense = self.vectors_g.to(plain).T @ plain @ self.vectors_a.to(plain)
        return (dense * self._scale(precision).to(dense)).reshape(b, c, -1)

    def _rotates_first(self, jacobian: OuterProductJacobian) -> bool:
        """Whether inputs and derivatives are rotated at every position, or the Jacobian, where that is less work."""
        c, o, t = jacobian.grads.shape[1:]
        d = len(self.vectors_a)
        return t * (d * d + c * o * o) <= c * o * d * (o + d)

    def rotated(self, jacobian: OuterProductJacobian) -> OuterProductJacobian:
        """The Jacobian in the block's basis."""
        a, g = jacobian.inputs, jacobian.grads
        return OuterProductJacobian(self.vectors_a.to(a).T @ a, self.vectors_g.to(g).T @ g)

    def covariance(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        assert isinstance(jacobian, OuterProductJacobian), "a Kronecker block belongs to a weight matrix"
        if self._rotates_first(jacobian):
            return weighted_gram(self.rotated(jacobian), self._scale(precision).to(jacobian.grads))
        return torch.cat([outer(self.covariance_root(piece, precision)) for piece in few_at_once(jacobian)])


@dataclass(frozen=True)
class FullBlock:
    """H_g whole, in its eigenbasis; for the small tensors (biases, norm scales and shifts)."""

    values: Tensor
    vectors: Tensor

    @property
    def spectrum(self) -> Tensor:
        return self.values

    def sample(self, z: Tensor, precision: Precision) -> Tensor:
        return (z * (self.values + precision).rsqrt().to(z)) @ self.vectors.to(z).T

    def product(self, vectors: Tensor, precision: Precision) -> Tensor:
        basis = self.vectors.to(vectors)
        return ((vectors @ basis) / (self.values + precision).to(vectors)) @ basis.T

    def covariance_root(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        dense = jacobian.dense()
        return (dense @ self.vectors.to(dense)) * (self.values + precision).rsqrt().to(dense)

    def covariance(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        return outer(self.covariance_root(jacobian, precision))


@dataclass(frozen=True)
class BlockGaussian:
    """N(0, Σ) over the weights of the basis, block by block.

    `precisions` is one λ a group, or for diagonal blocks one a weight [P_g].
    """

    groups: tuple[Group, ...]
    blocks: tuple[Block, ...]
    sizes: Mapping[str, int]
    precisions: tuple[Precision, ...]
    dtype: torch.dtype
    device: torch.device

    def sample(self, seed: int, start: int, stop: int) -> Tensor:
        """Draws `start` to `stop`, [S, P]; draw s depends on (seed, s) alone."""
        total = sum(self.sizes.values())
        z = torch.stack(
            [
                torch.randn(total, generator=generator(seed, "posterior", s), dtype=torch.float64)
                for s in range(start, stop)
            ]
        )
        parts = z.to(self.device, self.dtype).split([g.size(self.sizes) for g in self.groups], dim=1)
        moved = [
            group.unpacked(block.sample(part, lam), self.sizes)
            for group, block, part, lam in zip(self.groups, self.blocks, parts, self.precisions, strict=True)
        ]
        return torch.cat(moved, dim=1)

    def product(self, vectors: Tensor) -> Tensor:
        """Σ v for vectors [S, P]."""
        parts = vectors.split([g.size(self.sizes) for g in self.groups], dim=1)
        moved = [
            group.unpacked(block.product(group.packed(part, self.sizes), lam), self.sizes)
            for group, block, part, lam in zip(self.groups, self.blocks, parts, self.precisions, strict=True)
        ]
        return torch.cat(moved, dim=1)

    def covariance(self, jacobians: BatchJacobians) -> Tensor:
        """J Σ Jᵀ at each point, [B, C, C]."""
        parts = [
            block.covariance(group.jacobian(jacobians.tensors), lam)
            for group, block, lam in zip(self.groups, self.blocks, self.precisions, strict=True)
        ]
        return torch.stack(parts).sum(0)

    def covariance_root(self, jacobians: BatchJacobians) -> Tensor:
        """[B, C, P] whose products over the last axis are J Σ Jᵀ, across points too."""
        parts = [
            block.covariance_root(group.jacobian(jacobians.tensors), lam)
            for group, block, lam in zip(self.groups, self.blocks, self.precisions, strict=True)
        ]
        return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class BlockCurvature:
    """H = blockdiag(H_g), fitted; one block for each group [T]."""

    groups: tuple[Group, ...]
    blocks: tuple[Block, ...]
    sizes: Mapping[str, int]
    dtype: torch.dtype
    device: torch.device

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        """Log det(H + Λ) − log det Λ for precisions as in `_each`, float64, differentiable. O(P)."""
        each = self._each(precisions.to(self.blocks[0].spectrum.device))
        parts = [torch.log1p(b.spectrum / lam).sum() for b, lam in zip(self.blocks, each, strict=True)]
        return torch.stack(parts).sum()

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        """Tr_g H (H + Λ)⁻¹ of each group, [T]; of each weight, [P], for one precision a weight."""
        each = self._each(precisions.to(self.blocks[0].spectrum.device))
        parts = [b.spectrum / (b.spectrum + lam) for b, lam in zip(self.blocks, each, strict=True)]
        return torch.cat(parts).cpu() if self._one_a_weight(precisions) else torch.stack([p.sum() for p in parts]).cpu()

    def gaussian(self, precisions: Tensor) -> BlockGaussian:
        kept: tuple[Precision, ...] = tuple(self._each(precisions.to(self.blocks[0].spectrum.device)))
        if not self._one_a_weight(precisions):
            kept = tuple(float(lam) for lam in kept)
        return BlockGaussian(self.groups, self.blocks, self.sizes, kept, self.dtype, self.device)

    @property
    def diagonal(self) -> Tensor | None:
        """H itself, [P], if every block is a diagonal: then a precision a weight [P] will do everywhere."""
        if all(isinstance(b, DiagonalBlock) for b in self.blocks):
            return torch.cat([b.spectrum for b in self.blocks])
        return None

    def _one_a_weight(self, precisions: Tensor) -> bool:
        return len(precisions) == sum(self.sizes.values()) != len(self.blocks)

    def _each(self, precisions: Tensor) -> Sequence[Tensor]:
        """What each block has of one precision [1], one a group [T], or one a weight [P] (diagonal blocks)."""
        if self._one_a_weight(precisions):
            return precisions.split([g.size(self.sizes) for g in self.groups])
        return precisions.expand(len(self.blocks)).unbind()
