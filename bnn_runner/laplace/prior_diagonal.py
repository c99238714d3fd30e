"""The diagonal of the prior precision, from one number, one per group of weights, or one per weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PriorShape:
    """Λ = diag(λ_j s_j): `sizes` are the numbers of weights of the T groups; `shape` is s [P], None for all ones.

    Precisions are [1] (one λ for all), [T] (one per group) or [P] (one per weight).
    """

    sizes: tuple[int, ...]
    shape: Tensor | None = None

    def diagonal(self, precisions: Tensor) -> Tensor:
        """The diagonal of Λ, [P] float64, on the device of `shape` (the CPU without one)."""
        each = precisions if self._one_a_weight(precisions) else self._repeated(precisions)
        return each if self.shape is None else each.to(self.shape) * self.shape

    def squares(self, weights: Tensor, precisions: Tensor) -> Tensor:
        """Σ_j s_j w_j² of each group, [T], or s_j w_j² of each weight, [P], like the precisions; on the CPU."""
        terms = weights.square() if self.shape is None else weights.square() * self.shape.to(weights)
        if self._one_a_weight(precisions):
            return terms.cpu()
        return torch.stack([part.sum() for part in terms.split(list(self.sizes))]).cpu()

    @property
    def held(self) -> int:
        """Number of weights with s = 0, which are held at MAP and not part of the prior."""
        return 0 if self.shape is None else int((self.shape == 0).sum())

    def _one_a_weight(self, precisions: Tensor) -> bool:
        return len(precisions) == sum(self.sizes) != len(self.sizes)

    def _repeated(self, precisions: Tensor) -> Tensor:
        return precisions.cpu().expand(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
