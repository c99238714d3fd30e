"""The evidence at the tangent model's own optimum v*, which moves with the prior precisions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bnn_runner.curvature.base import Curvature
from bnn_runner.curvature.psd import wide
from bnn_runner.laplace.evidence import log_evidence
from bnn_runner.laplace.prior_diagonal import PriorShape
from bnn_runner.laplace.tangent_optimum import GAP_NATS, TangentModel, TangentOptimum


class EvidenceAtOptimum:
    """The evidence as a function of Λ with v* = v*(Λ) in it.

    v* is a stationary point of the evidence in v, so the derivative in Λ is the partial one at v* (envelope theorem),
    and a rule that climbs this function finds the joint optimum of v and Λ (Antorán et al. 2022 alternate
    between the two). Every optimum is kept, and each search starts from the last one found.

    Args:
        tangent: the tangent model on the training set.
        curvature: H.
        prior: which precision belongs to which weight.
        tolerance: relative gradient at which v* counts as reached.
        max_passes: passes over the data for all searches together; None is the tangent model's own default.
    """

    def __init__(
        self, tangent: TangentModel, curvature: Curvature, prior: PriorShape, tolerance: float, max_passes: int | None
    ) -> None:
        self.tangent, self.curvature, self.prior = tangent, curvature, prior
        self.tolerance = tangent.reachable(tolerance)
        self.max_passes = max_passes or tangent.max_passes
        self._first_pass = tangent.passes
        self._optima: dict[bytes, TangentOptimum] = {}
        self._start = tangent.centre
        self._log_scale = len(tangent.task.train) * float(wide(tangent.task.target_scale).log().sum())

    @property
    def passes(self) -> int:
        """Passes over the data so far."""
        return math.ceil(self.tangent.passes - self._first_pass)

    def __call__(self, precisions: Tensor) -> Tensor:
        return log_evidence(self.log_likelihood(precisions), self.squares(precisions), self.curvature, precisions)

    def log_likelihood(self, precisions: Tensor) -> float:
        return self.optimum(precisions).loglik - self._log_scale

    def squares(self, precisions: Tensor) -> Tensor:
        return self.prior.squares(self.optimum(precisions).weights, precisions)

    def gap(self, precisions: Tensor) -> float:
        """The most by which the evidence is below its value at v*, in nats; 0 where v* is within the tolerance."""
        found = self.optimum(precisions)
        return 0.0 if found.gradient <= self.tolerance else found.gap

    @property
    def exhausted(self) -> bool:
        """Whether the passes over the data have run out."""
        return self.passes >= self.max_passes

    def reached(self, optimum: TangentOptimum) -> bool:
        """Whether a search ended at v*: within the tolerance, or within 0.001 nats."""
        return optimum.gradient <= self.tolerance or optimum.gap <= GAP_NATS

    def optimum(self, precisions: Tensor) -> TangentOptimum:
        """v*(Λ), searched once for each Λ."""
        each = precisions.detach().cpu()
        each = each.expand(len(self.prior.sizes)) if len(each) == 1 else each
        key = each.contiguous().numpy().tobytes()
        if key not in self._optima:
            self._optima[key] = self._searched(each)
            self._start = self._optima[key].weights
        return self._optima[key]

    @torch.no_grad()
    def _searched(self, precisions: Tensor) -> TangentOptimum:
        diagonal = self.prior.diagonal(precisions).to(self.tangent.centre)
        left = max(self.max_passes - self.passes, 1)
        guess = self.curvature.gaussian(precisions) if getattr(self.curvature, "preconditions", False) else None
        return self.tangent.optimum(diagonal, self._start, self.tolerance, left, guess)
