"""Curvature scaled by its own diagonal, D H D with D = s^{-1/2} and s = diag(H)/N, as the g-prior needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from bnn_runner.curvature.base import Curvature
from bnn_runner.curvature.psd import Repairs

NO_CURVATURE = 1e-13
"""Of a tensor's largest diagonal entry: less is what rounding leaves of zero."""


@dataclass(frozen=True)
class DiagonalScaling:
    """`curvature` is that of the scaled weights (its draws are of the weights); `shape` s [P], 0 where held at MAP."""

    curvature: Curvature
    shape: Tensor


@runtime_checkable
class ScalesByDiagonal(Protocol):
    """A curvature that stays in its form when it is scaled by its diagonal."""

    def scaled_by_diagonal(self, num_points: int, repairs: Repairs) -> DiagonalScaling:
        """D H D and s, for N = `num_points`.

        Raises:
            RunFailed: this fit of the structure has no such form.
        """
        ...


def information_per_point(diagonal: Tensor, num_points: int) -> Tensor:
    """S = diagonal / N of one tensor, with 0 for what is zero up to rounding."""
    return torch.where(diagonal > NO_CURVATURE * diagonal.max(), diagonal, 0.0) / num_points


def inverse_root(shape: Tensor) -> Tensor:
    """D = s^{-1/2}, 0 where s is."""
    return torch.where(shape > 0, shape.rsqrt(), 0.0)
