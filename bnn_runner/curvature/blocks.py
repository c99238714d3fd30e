"""The curvature of one group of weights, in its eigenbasis: diagonal, Kronecker factors, or a full matrix.

A block stores its eigenvalues, so that the evidence and its gradient in the prior precision cost
O(P), and with a precision λ it is a Gaussian N(0, (H_g + λI)⁻¹).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bnn_runner.curvature.jacobian_forms import OuterProductJacobian, TensorJacobian
from bnn_runner.curvature.weighted_gram import few_at_once, outer, weighted_gram

Precision = float | Tensor
"""One number; for a diagonal block also one a weight [P_g]."""


class Block(Protocol):
    """Curvature of one group of P_g weights in its eigenbasis. Letters: S draws, B points, C output directions."""

    @property
    def spectrum(self) -> Tensor:
        """Eigenvalues [P_g], float64."""
        ...

    def sample(self, z: Tensor, precision: Precision) -> Tensor:
        """Draws of N(0, (H_g + λI)⁻¹) from standard normals z [S, P_g]."""
        ...

    def product(self, vectors: Tensor, precision: Precision) -> Tensor:
        """(H_g + λI)⁻¹ v for vectors [S, P_g]."""
        ...

    def covariance_root(self, jacobian: TensorJacobian, precision: Precision) -> Tensor:
        """R [B, C, P_g] whose products over the last axis are the block's part of J Σ Jᵀ."""
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
        """Whether rotating inputs and derivatives at every position is less work than rotating the Jacobian."""
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
    """The full H_g in its eigenbasis; for small tensors (biases, norm scales and shifts)."""

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
