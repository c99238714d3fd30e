"""Low-rank curvature: the leading eigenpairs of the GGN, H ≈ Σ_{i≤r} s_i v_i v_iᵀ; elsewhere only the prior remains.

What is dropped, D = H − H_r, is positive semidefinite for both ways of computing H_r, so the posterior is
never too narrow, and its evidence is too high by at most ½ log det(I + Λ^{-½} D Λ^{-½}), which is at
most ½ d log(1 + tr D/(λ d)) with d the largest possible rank of D and λ the smallest precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bnn_runner.curvature.block_fits import Pass
from bnn_runner.curvature.full import ROUNDING, FullCurvature, FullGaussian, bytes_needed, fit_full
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobians import BatchJacobians, Jacobians
from bnn_runner.curvature.psd import Repairs, checked, eigh, wide
from bnn_runner.rng import generator
from bnn_runner.runtime.memory import LARGEST_BYTES, memory_limit

NEGLIGIBLE_NATS = 1e-3
"""Error of the evidence below which there is no note."""
EXACT_UP_TO = 3000
"""Rows of the full curvature's smaller side up to which it is decomposed as a whole."""
OVERSAMPLED, MOST_PASSES, ENOUGH = 10, 8, 1e-3
"""Of the iteration: directions beyond the rank, most passes over the data, and growth of the kept trace to stop at."""


@dataclass(frozen=True)
class LowRankCurvature:
    """The leading eigenpairs of H.

    Attributes:
        inner: with the rows √s_i v_iᵀ [r, P] of H_r.
        trace: of H.
        most: largest possible rank of H.
        passes: over the data in the iteration; 0 for an exact decomposition.
        growth: of the kept trace in the last pass.
    """

    inner: FullCurvature
    trace: float
    most: int
    passes: int
    growth: float = 0.0

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.inner.groups

    @property
    def rank(self) -> int:
        assert self.inner.rows is not None
        return len(self.inner.rows)

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        return self.inner.log_det_ratio(precisions)

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        return self.inner.effective_dimensions(precisions)

    def gaussian(self, precisions: Tensor) -> FullGaussian:
        return replace(self.inner.gaussian(precisions), resolved=False)  # no more than the eigenpairs were

    def dropped(self, precisions: Tensor) -> tuple[dict[str, Any], list[str]]:
        """What is dropped: facts for the row, and notes for a reader; precisions as H has them."""
        assert self.inner.rows is not None
        kept = float(self.inner.rows.square().sum())
        dropped = max(0.0, self.trace - kept) + (ROUNDING * self.trace if self.rank < self.most else 0.0)
        rest = max(1, self.most - (0 if self.passes else self.rank))
        bound = 0.5 * rest * math.log1p(dropped / (float(precisions.min()) * rest))
        facts = {
            "rank": self.rank,
            "rank_of_curvature_at_most": self.most,
            "trace_kept": kept / self.trace if self.trace > 0 else 1.0,
            "evidence_too_high_by_at_most_nats": bound,
            "low_rank_passes": self.passes,
        }
        notes = []
        if self.rank < self.most and bound > NEGLIGIBLE_NATS:
            notes.append(
                f"low rank: {self.rank} of at most {self.most:,} eigenvalues of the curvature are kept, "
                f"{facts['trace_kept']:.4g} of its trace; without the others the posterior is wider, never narrower, "
                f"and the evidence too high by at most {bound:.3g} nats"
            )
        if self.growth > ENOUGH:
            notes.append(
                f"low rank: the eigenpairs have not converged: the last of {self.passes} passes still added "
                f"{self.growth:.2g} of the kept trace (the bound holds nevertheless)"
            )
        return facts, notes


def fit_low_rank(jacobians: Jacobians, batches: Pass, num_rows: int, rank: int, repairs: Repairs) -> LowRankCurvature:
    """The `rank` leading eigenpairs of H, or as many as H has.

    Exact, from the full curvature, where its smaller side is small. Otherwise by subspace iteration with a
    final Nyström approximation, the r leading eigenpairs of H Q (QᵀHQ)⁺ QᵀH, which is never larger
    than H (Halko, Martinsson & Tropp 2011; Gittens & Mahoney 2016): one pass over the data for each product
    with H.

    Args:
        jacobians: of the weights of the basis.
        batches: starts a pass over the training set.
        num_rows: M = N·C.
        rank: r.
        repairs: counts numerical repairs.

    Raises:
        RunFailed: the eigenvectors would not fit in memory, or H is not finite.
    """
    total = sum(jacobians.sizes().values())
    most = min(total, num_rows)
    rank = min(rank, most)
    if most <= EXACT_UP_TO and bytes_needed(total, num_rows) < LARGEST_BYTES:
        full = fit_full(jacobians, batches(), num_rows, repairs)
        values, vectors = full.isotropic_eigen()
        kept, rows = values[-rank:], vectors[:, -rank:].T
        inner = _rows(jacobians, rows * kept.sqrt().unsqueeze(1), repairs)
        return LowRankCurvature(inner, float(values.sum()), most, 0)
    width = min(most, rank + OVERSAMPLED)
    memory_limit().reserve(
        f"the search for {rank} eigenvectors of {total:,} weights",
        4 * 8 * width * total,
        "Lower method.rank, or use method.structure=kfac or diag.",
    )
    device = jacobians.network.parameters[jacobians.names[0]].device
    start = torch.randn(total, width, generator=generator(0, "low rank"), dtype=torch.float64)
    directions = torch.linalg.qr(start).Q.to(device)
    before, growth = 0.0, math.inf
    for made in range(1, MOST_PASSES + 1):
        product, trace = _product(jacobians, batches(), directions)
        leading = _leading(directions, product, rank, repairs)
        caught = float(leading.square().sum())
        growth, before = (caught - before) / max(caught, 1e-300), caught
        if made > 1 and growth <= ENOUGH:
            break
        directions = torch.linalg.qr(product).Q
    return LowRankCurvature(_rows(jacobians, leading, repairs), trace, most, made, growth)


def _rows(jacobians: Jacobians, rows: Tensor, repairs: Repairs) -> FullCurvature:
    """The curvature with these rows."""
    dtype = jacobians.network.parameters[jacobians.names[0]].dtype
    return FullCurvature(rows.contiguous(), None, jacobians.sizes(), dtype, repairs)


def _product(jacobians: Jacobians, batches: Iterator[BatchJacobians], directions: Tensor) -> tuple[Tensor, float]:
    """H Q for directions Q [P, b], and the trace of H; one pass over the data, a tensor's Jacobian at a time."""
    sizes = list(jacobians.sizes().values())
    product, trace = torch.zeros_like(directions), 0.0
    for batch in batches:
        parts = [q.T.contiguous().to(batch.outputs) for q in directions.split(sizes)]
        tensors = list(batch.tensors.values())
        moved = torch.stack([j.apply(q) for j, q in zip(tensors, parts, strict=True)]).sum(0)  # J Q, [B, C, b]
        for name, j, into in zip(jacobians.names, tensors, product.split(sizes), strict=True):
            rows = wide(checked(j.dense().flatten(0, 1), name))
            into += rows.T @ moved.flatten(0, 1)
            trace += float(rows.square().sum())
    return product, trace


def _leading(directions: Tensor, product: Tensor, rank: int, repairs: Repairs) -> Tensor:
    """Rows √s_i v_iᵀ [r, P] of the leading eigenpairs of H Q (QᵀHQ)⁺ QᵀH."""
    values, vectors = eigh(directions.T @ product, "the leading directions", repairs)
    keep = values > values[-1].clamp_min(1e-300) * 1e-12
    half = product @ (vectors[:, keep] * values[keep].rsqrt())  # its product with its transpose is the approximation
    _, inside = eigh(half.T @ half, "the leading eigenpairs", repairs)
    return (half @ inside[:, -rank:]).T
