"""The diagonal of the prior precision, from one number, one a group of weights, or one a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PriorShape:
    """Λ = diag(λ_j s_j): `sizes` are the numbers of weights of the T groups; `shape` s [P] is all ones where None.

    Precisions are [1] (one λ for all), [T] (one a group) or [P] (one a weight).
    """

    sizes: tuple[int, ...]
    shape: Tensor | None = None

    def diagonal(self, precisions: Tensor) -> Tensor:
        """The diagonal of Λ, [P] float64, on the CPU unless `shape` is elsewhere."""
        each = precisions if self._one_a_weight(precisions) else self._repeated(precisions)
        return each if self.shape is None else each.to(self.shape) * self.shape

    def squares(self, weights: Tensor, precisions: Tensor) -> Tensor:
        """Σ_j s_j w_j² of each group, [T], or of each weight, [P], as the precisions are; on the CPU."""
        terms = weights.square() if self.shape is None else weights.square() * self.shape.to(weights)
        if self._one_a_weight(precisions):
            return terms.cpu()
        return torch.stack([part.sum() for part in terms.split(list(self.sizes))]).cpu()

    @property
    def held(self) -> int:
        """Weights whose s is 0: they are held at MAP and have no part in the prior."""
        return 0 if self.shape is None else int((self.shape == 0).sum())

    def _one_a_weight(self, precisions: Tensor) -> bool:
        return len(precisions) == sum(self.sizes) != len(self.sizes)

    def _repeated(self, precisions: Tensor) -> Tensor:
        return precisions.cpu().expand(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
