"""Block-diagonal curvature: one block for each group of parameter tensors (KFAC, diagonal, exact by layer)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from bnn_runner.curvature.block_scaling import ScaledDiagonal, scaled_block
from bnn_runner.curvature.blocks import Block, DiagonalBlock, Precision
from bnn_runner.curvature.diagonal_scaling import DiagonalScaling
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobians import BatchJacobians
from bnn_runner.curvature.psd import Repairs
from bnn_runner.rng import generator


@dataclass(frozen=True)
class BlockGaussian:
    """N(0, Σ) over the weights of the basis, block by block.

    `precisions` holds one λ per group; for diagonal blocks also one per weight [P_g].
    """

    groups: tuple[Group, ...]
    blocks: tuple[Block, ...]
    sizes: Mapping[str, int]
    precisions: tuple[Precision, ...]
    dtype: torch.dtype
    device: torch.device
    uses_factors: ClassVar[bool] = True

    @property
    def rounded_information(self) -> float:
        """The largest eigenvalue of Λ^{-½}HΛ^{-½} in a block that is no diagonal (see `FullGaussian`)."""
        pairs = zip(self.blocks, self.precisions, strict=True)
        dense = [(b, lam) for b, lam in pairs if not isinstance(b, (DiagonalBlock, ScaledDiagonal))]
        return max((float((b.spectrum / lam).max()) for b, lam in dense), default=0.0)

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
        """R [B, C, P] whose products over the last axis are J Σ Jᵀ, within and across points."""
        parts = [
            block.covariance_root(group.jacobian(jacobians.tensors), lam)
            for group, block, lam in zip(self.groups, self.blocks, self.precisions, strict=True)
        ]
        return torch.cat(parts, dim=-1)


@dataclass(frozen=True)
class BlockCurvature:
    """H = blockdiag(H_g), one fitted block for each of the T groups."""

    groups: tuple[Group, ...]
    blocks: tuple[Block, ...]
    sizes: Mapping[str, int]
    dtype: torch.dtype
    device: torch.device

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        """Log det(H + Λ) − log det Λ, float64, differentiable, in O(P)."""
        each = self._each(precisions.to(self.blocks[0].spectrum.device))
        parts = [torch.log1p(b.spectrum / lam).sum() for b, lam in zip(self.blocks, each, strict=True)]
        return torch.stack(parts).sum()

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        """Tr_g H (H + Λ)⁻¹ of each group, [T]; of each weight, [P], for one precision per weight."""
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
        """H itself, [P], if every block is diagonal: then precisions [P] (one per weight) are supported everywhere."""
        if all(isinstance(b, DiagonalBlock) for b in self.blocks):
            return torch.cat([b.spectrum for b in self.blocks])
        return None

    def scaled_by_diagonal(self, num_points: int, repairs: Repairs) -> DiagonalScaling:
        blocks: list[Block] = []
        shapes: list[Tensor] = []
        for group, block in zip(self.groups, self.blocks, strict=True):
            scaled, shape = scaled_block(block, num_points, group.name, repairs)
            blocks.append(scaled)
            shapes.append(group.unpacked(shape.unsqueeze(0), self.sizes)[0])
        return DiagonalScaling(replace(self, blocks=tuple(blocks)), torch.cat(shapes))

    def _one_a_weight(self, precisions: Tensor) -> bool:
        return len(precisions) == sum(self.sizes.values()) != len(self.blocks)

    def _each(self, precisions: Tensor) -> Sequence[Tensor]:
        """Each block's share of one precision [1], one per group [T], or one per weight [P] (diagonal blocks)."""
        if self._one_a_weight(precisions):
            return precisions.split([g.size(self.sizes) for g in self.groups])
        return precisions.expand(len(self.blocks)).unbind()
