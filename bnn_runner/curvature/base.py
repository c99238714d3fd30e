"""The contract of a curvature structure: what the evidence, the hyperparameter rules and the posterior need of one.

Letters: P weights of the basis, T groups of them, S draws, B points, C directions of the outputs.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobians import BatchJacobians


class WeightGaussian(Protocol):
    """N(0, Σ) over the P weights of the basis.

    A class attribute `uses_factors = True` says that no method forms the dense Jacobian of a whole batch.
    """

    def sample(self, seed: int, start: int, stop: int) -> Tensor:
        """Draws `start` to `stop`, [S, P]; draw s depends on (seed, s) alone."""
        ...

    def product(self, vectors: Tensor) -> Tensor:
        """Σ v for vectors [S, P]."""
        ...

    def covariance(self, jacobians: BatchJacobians) -> Tensor:
        """J Σ Jᵀ at each point, [B, C, C]."""
        ...

    def covariance_root(self, jacobians: BatchJacobians) -> Tensor:
        """R [B, C, ·] whose products over the last axis are J Σ Jᵀ, within and across points."""
        ...


class Curvature(Protocol):
    """A fitted curvature H whose T groups of weights have one prior precision each, Λ = diag(λ_g).

    `precisions` are [T] (one a group) or [1] (the same for all). A class attribute `preconditions = True` says that
    products with (H + Λ)⁻¹ are exact and cheap: the search of the tangent model's optimum then uses them. A diagonal
    H has its diagonal [P] as `diagonal` (None elsewhere), and takes precisions [P] too. Sampled effective
    dimensions have a method `dimension_samples` (see `PrecisionProblem`). For `scaled_by_diagonal` see
    `diagonal_scaling`.
    """

    @property
    def groups(self) -> tuple[Group, ...]: ...

    def log_det_ratio(self, precisions: Tensor) -> Tensor:
        """Log det(H + Λ) − log det Λ, float64, differentiable in `precisions`."""
        ...

    def effective_dimensions(self, precisions: Tensor) -> Tensor:
        """Tr_g H (H + Λ)⁻¹ of each group, [T] float64."""
        ...

    def gaussian(self, precisions: Tensor) -> WeightGaussian:
        """N(0, (H + Λ)⁻¹)."""
        ...


@runtime_checkable
class Approximation(Protocol):
    """A curvature that drops part of H and knows how much."""

    def dropped(self, precisions: Tensor) -> tuple[dict[str, Any], list[str]]:
        """What is dropped: facts for the row, and notes for a reader."""
        ...
