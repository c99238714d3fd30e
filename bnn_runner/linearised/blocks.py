"""Block-diagonal curvature: one block for each parameter tensor (KFAC, diagonal).

A block knows its eigenvalues, so that the evidence and its gradient in the prior precision cost
O(P), and with a precision λ it is a Gaussian N(0, (H_t + λI)⁻¹).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from bnn_runner.linearised.algebra import Repairs, checked, eigh, wide
from bnn_runner.linearised.jacobians import BatchJacobians, Factored, Jacobians, TensorJacobian
from bnn_runner.streams import generator


class Block(Protocol):
    """Curvature of one tensor in its eigenbasis."""

    @property
    def spectrum(self) -> Tensor:
        """Eigenvalues [P_t], float64."""
        ...

    def sample(self, z: Tensor, precision: float) -> Tensor:
        """Standard normals [S, P_t] to draws of N(0, (H_t + λI)⁻¹)."""
        ...

    def half(self, jacobian: TensorJacobian, precision: float) -> Tensor:
        """[B, C, P_t] whose products over the last axis are the block's part of J Σ Jᵀ."""
        ...

    def covariance(self, jacobian: TensorJacobian, precision: float) -> Tensor:
        """The block's part of J Σ Jᵀ at each point, [B, C, C]."""
        ...


def outer(half: Tensor) -> Tensor:
    """[B, C, P] to [B, C, C], a product over P at each point."""
    return half @ half.mT


def _one_position(jacobian: TensorJacobian) -> tuple[Tensor, Tensor] | None:
    """Inputs [B, d] and derivatives [B, C, o] of a factored Jacobian with T = 1; None for any other."""
    if isinstance(jacobian, Factored) and jacobian.inputs.shape[-1] == 1:
        return jacobian.inputs[..., 0], jacobian.grads[..., 0]
    return None


def _weighted(grads: Tensor, weight: Tensor) -> Tensor:
    """Σ_o g_co g_ko w_o at each point: grads [B, C, o], weight [B, o] to [B, C, C]."""
    return (grads * weight.unsqueeze(1)) @ grads.mT


@dataclass(frozen=True)
class DiagonalBlock:
    """H_t = diag(h)."""

    diagonal: Tensor

    @property
    def spectrum(self) -> Tensor:
        return self.diagonal

    def sample(self, z: Tensor, precision: float) -> Tensor:
        return z * (self.diagonal + precision).rsqrt().to(z)

    def half(self, jacobian: TensorJacobian, precision: float) -> Tensor:
        dense = jacobian.dense()
        return dense * (self.diagonal + precision).rsqrt().to(dense)

    def covariance(self, jacobian: TensorJacobian, precision: float) -> Tensor:
        if (pair := _one_position(jacobian)) is not None:
            a, g = pair
            variance = (self.diagonal + precision).reciprocal().to(a).reshape(g.shape[-1], -1)
            return _weighted(g, a.square() @ variance.T)
        return outer(self.half(jacobian, precision))


@dataclass(frozen=True)
class KroneckerBlock:
    """H_t = G ⊗ A for a weight [o, d]: eigenvalues g_i a_j in the basis Q_G ⊗ Q_A."""

    values_a: Tensor
    vectors_a: Tensor
    values_g: Tensor
    vectors_g: Tensor

    @cached_property
    def spectrum(self) -> Tensor:
        return torch.outer(self.values_g, self.values_a).reshape(-1)

    def _scale(self, precision: float) -> Tensor:
        return (self.spectrum + precision).rsqrt().reshape(len(self.values_g), -1)

    def sample(self, z: Tensor, precision: float) -> Tensor:
        o, d = len(self.values_g), len(self.values_a)
        scaled = z.reshape(-1, o, d) * self._scale(precision).to(z)
        return (self.vectors_g.to(z) @ scaled @ self.vectors_a.to(z).T).reshape(len(z), -1)

    def half(self, jacobian: TensorJacobian, precision: float) -> Tensor:
        assert isinstance(jacobian, Factored), "a Kronecker block belongs to a weight matrix"
        b, c, o, t = jacobian.grads.shape
        if t < len(self.values_a):
            dense = self._rotated(jacobian).dense().reshape(b * c, o, -1)
        else:  # fewer numbers in the Jacobian than in the positions it sums over
            plain = jacobian.dense().reshape(b * c, o, -1)
            dense = self.vectors_g.to(plain).T @ plain @ self.vectors_a.to(plain)
        return (dense * self._scale(precision).to(dense)).reshape(b, c, -1)

    def _rotated(self, jacobian: Factored) -> Factored:
        a, g = jacobian.inputs, jacobian.grads
        return Factored(self.vectors_a.to(a).T @ a, self.vectors_g.to(g).T @ g)

    def covariance(self, jacobian: TensorJacobian, precision: float) -> Tensor:
        if _one_position(jacobian) is not None:
            assert isinstance(jacobian, Factored)
            rotated = self._rotated(jacobian)
            a, g = rotated.inputs[..., 0], rotated.grads[..., 0]
            return _weighted(g, a.square() @ self._scale(precision).square().to(a).T)
        return outer(self.half(jacobian, precision))


@dataclass(frozen=True)
class FullBlock:
    """H_t whole, in its eigenbasis; for the small tensors (biases, norm scales and shifts)."""

    values: Tensor
    vectors: Tensor

    @property
    def spectrum(self) -> Tensor:
        return self.values

    def sample(self, z: Tensor, precision: float) -> Tensor:
        return (z * (self.values + precision).rsqrt().to(z)) @ self.vectors.to(z).T

    def half(self, jacobian: TensorJacobian, precision: float) -> Tensor:
        dense = jacobian.dense()
        return (dense @ self.vectors.to(dense)) * (self.values + precision).rsqrt().to(dense)

    def covariance(self, jacobian: TensorJacobian, precision: float) -> Tensor:
        return outer(self.half(jacobian, precision))


@dataclass(frozen=True)
class BlockGaussian:
    """N(0, Σ) over the weights of the basis, block by block; `precisions` is one λ a tensor."""

    blocks: dict[str, Block]
    sizes: dict[str, int]
    precisions: tuple[float, ...]
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
        parts = z.to(self.device, self.dtype).split(list(self.sizes.values()), dim=1)
        moved = [
            block.sample(part, lam)
            for block, part, lam in zip(self.blocks.values(), parts, self.precisions, strict=True)
        ]
        return torch.cat(moved, dim=1)

    def covariance(self, jacobians: BatchJacobians) -> Tensor:
        """J Σ Jᵀ at each point, [B, C, C]."""
        parts = [
            self.blocks[name].covariance(j, lam)
            for (name, j), lam in zip(jacobians.tensors.items(), self.precisions, strict=True)
        ]
        return torch.stack(parts).sum(0)

    def half(self, jacobians: BatchJacobians) -> Tensor:
        """[B, C, P] whose products over the last axis are J Σ Jᵀ, across points too."""
        parts = [
            self.blocks[name].half(j, lam)
            for (name, j), lam in zip(jacobians.tensors.items(), self.precisions, strict=True)
        ]
        return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class BlockCurvature:
    """H = blockdiag(H_t), fitted."""

    blocks: dict[str, Block]
    sizes: dict[str, int]
    dtype: torch.dtype
    device: torch.device

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        """Log det(H + Λ) − log det Λ for one precision [1] or one a tensor [T], float64, differentiable. O(P)."""
        each = precisions.to(next(iter(self.blocks.values())).spectrum.device).expand(len(self.blocks))
        parts = [torch.log1p(b.spectrum / lam).sum() for b, lam in zip(self.blocks.values(), each, strict=True)]
        return torch.stack(parts).sum()

    def effective_dimension(self, precisions: Tensor) -> float:
        """Tr H (H + Λ)⁻¹."""
        parts = [
            (b.spectrum / (b.spectrum + lam)).sum()
            for b, lam in zip(self.blocks.values(), precisions.tolist(), strict=True)
        ]
        return float(torch.stack(parts).sum())

    def gaussian(self, precisions: Tensor) -> BlockGaussian:
        return BlockGaussian(self.blocks, self.sizes, tuple(precisions.tolist()), self.dtype, self.device)


def fit_diagonal(jacobians: Jacobians, batches: Iterator[BatchJacobians]) -> BlockCurvature:
    """The diagonal of the GGN, H_jj = Σ_n Σ_c (Rᵀ J)²_cj, exact. Cost: a batch of dense Jacobians each."""
    sums: dict[str, Tensor] = {}
    for batch in batches:
        for name, j in batch.tensors.items():
            if (pair := _one_position(j)) is not None:
                a, g = pair
                part = (g.square().sum(1).T @ a.square()).reshape(-1)
            else:
                part = j.dense().square().sum((0, 1))
            sums[name] = sums.get(name, 0) + wide(part)
    blocks: dict[str, Block] = {name: DiagonalBlock(checked(sums[name], name)) for name in jacobians.names}
    return _curvature(jacobians, blocks)


def fit_kfac(jacobians: Jacobians, batches: Iterator[BatchJacobians], repairs: Repairs) -> BlockCurvature:
    """KFAC in its expand form (Martens & Grosse 2015; Grosse & Martens 2016; Eschenhagen et al. 2023).

    A weight at T positions: A = (1/NT) Σ a aᵀ, G = Σ_n Σ_t g B gᵀ over the whole training set, H ≈ G ⊗ A. Its
    bias has the block G. Norm scales and shifts have their exact block; a tensor of any other
    module has its exact diagonal.
    """
    factors_a: dict[str, Tensor] = {}
    factors_g: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for batch in batches:
        for name, j in batch.tensors.items():
            if isinstance(j, Factored):
                factors_a[name] = factors_a.get(name, 0) + wide(_gram(j.inputs))
                factors_g[name] = factors_g.get(name, 0) + wide(_gram(j.grads.flatten(0, 1)))
                counts[name] = counts.get(name, 0) + j.inputs.shape[0] * j.inputs.shape[2]
                continue
            weight = name.removesuffix("bias") + "weight"
            if name.endswith("bias") and weight in factors_g:
                continue  # its block is the weight's output factor
            rows = j.dense().flatten(0, 1)
            if jacobians.rule(name) == "general":
                exact[name] = exact.get(name, 0) + wide(rows.square().sum(0))
            else:
                exact[name] = exact.get(name, 0) + wide(rows.T @ rows)
    blocks: dict[str, Block] = {}
    for name in jacobians.names:
        if name in factors_a:
            eig_a = eigh(factors_a[name] / counts[name], f"{name} (input factor)", repairs)
            eig_g = eigh(factors_g[name], f"{name} (output factor)", repairs)
            blocks[name] = KroneckerBlock(*eig_a, *eig_g)
        elif name.endswith("bias") and (factor := factors_g.get(name.removesuffix("bias") + "weight")) is not None:
            blocks[name] = FullBlock(*eigh(factor, name, repairs))
        elif jacobians.rule(name) == "general":
            blocks[name] = DiagonalBlock(checked(exact[name], name))
        else:
            blocks[name] = FullBlock(*eigh(exact[name], name, repairs))
    return _curvature(jacobians, blocks)


def _gram(values: Tensor) -> Tensor:
    """Σ_b Σ_t v v' of [B, n, T]: [n, n], as one product of long rows."""
    rows = values.transpose(0, 1).flatten(1)
    return rows @ rows.T


def _curvature(jacobians: Jacobians, blocks: dict[str, Block]) -> BlockCurvature:
    sample = jacobians.network.parameters[jacobians.names[0]]
    return BlockCurvature(blocks, jacobians.sizes(), sample.dtype, sample.device)
