"""The Laplace evidence as a function of the prior precisions, taken at the trained weights w*."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.curvature.base import Curvature
from bnn_runner.curvature.psd import wide
from bnn_runner.laplace.prior_diagonal import PriorShape
from bnn_runner.tasks import Task


class LogEvidence(Protocol):
    """Log p(D) in nats as a function of the prior precisions: one λ [1], one a group [T], or one a weight [P]."""

    def __call__(self, precisions: Tensor) -> Tensor:
        """Log p(D), differentiable in `precisions`."""
        ...

    def log_likelihood(self, precisions: Tensor) -> float:
        """Σ_n log p(y_n | ·) of the training set at the expansion point, nats, original target units."""
        ...

    def squares(self, precisions: Tensor) -> Tensor:
        """Squared norms of the weights there, [T] or [P] as the precisions are (see `PriorShape.squares`)."""
        ...

    def gap(self, precisions: Tensor) -> float:
        """What the evidence may still gain at a better expansion point, nats; 0 where the point is reached."""
        ...

    @property
    def exhausted(self) -> bool:
        """Whether no pass over the data is left to search the expansion point."""
        ...


@dataclass(frozen=True)
class EvidenceAtWeights:
    """The evidence at w*: neither the log-likelihood `loglik` nor the `weights` w* [P] depend on the precisions."""

    curvature: Curvature
    prior: PriorShape
    weights: Tensor
    loglik: float

    def __call__(self, precisions: Tensor) -> Tensor:
        return log_evidence(self.loglik, self.squares(precisions), self.curvature, precisions)

    def log_likelihood(self, precisions: Tensor) -> float:
        return self.loglik

    def squares(self, precisions: Tensor) -> Tensor:
        return self.prior.squares(self.weights, precisions)

    def gap(self, precisions: Tensor) -> float:
        return 0.0

    @property
    def exhausted(self) -> bool:
        return False


@torch.no_grad()
def log_likelihood(task: Task, network: Network, batch_size: int = 1024) -> float:
    """Σ_n log p(y_n | f(x_n, w*)) over the training set, nats; regression in original target units."""
    total = 0.0
    for x, y in task.train.batches(batch_size):
        assert y is not None
        total += float(wide(network.likelihood.log_prob(network(x), y)).sum())
    return total - len(task.train) * float(wide(task.target_scale).log().sum())


def constant_log_likelihood(task: Task) -> float:
    """Σ_n log p(y_n) of the training set under the best predictor that ignores x, nats, original target units.

    Classes: their frequencies, Σ_c N_c log(N_c / N). Regression: a Gaussian with the targets' mean and variance,
    −N/2 Σ_k (log 2πσ_k² + 1). Any useful model has a larger log evidence.
    """
    targets, count = task.train.targets, len(task.train)
    assert targets is not None
    if task.spec.kind == "classification":
        counts = torch.bincount(targets.cpu().flatten()).double()
        return float(torch.xlogy(counts, counts / count).sum())
    sigma = wide(targets).std(0, correction=0) * wide(task.target_scale)
    return -0.5 * count * float((2 * sigma.log() + math.log(2 * math.pi) + 1).sum())


def constant_facts(log_evidence: float, task: Task, at_optimum: bool) -> tuple[dict[str, Any], list[str]]:
    """For the row: the constant predictor's log-likelihood, whether the evidence is below it, and then a note.

    `at_optimum` says whether the evidence is at an optimum already, so that v* is no advice.
    """
    constant = constant_log_likelihood(task)
    below = math.isfinite(constant) and log_evidence < constant
    facts = {"constant_loglik_nats": constant, "evidence_below_constant": below}
    if not below:
        return facts, []
    what = "class frequencies" if task.spec.kind == "classification" else "mean and variance"
    note = (
        f"the log evidence, {log_evidence:.2f} nats, is below the log-likelihood of a constant predictor, "
        f"{constant:.2f} nats ({what} of the training set): it says nothing about the model, and reports do not rank it"
    )
    more = "" if at_optimum else "; method.mode=tangent takes it at the tangent model's optimum"
    return facts, [note + more]


def log_evidence(loglik: float, squares: Tensor, curvature: Curvature, precisions: Tensor) -> Tensor:
    """Log p(D) ≈ log p(D | w*) − ½ [w*ᵀΛw* + log det(H + Λ) − log det Λ], nats (MacKay 1992; Immer et al. 2021).

    Weights held at MAP contribute nothing.

    Args:
        loglik: log p(D | w*) in nats.
        squares: the squared norms that belong to `precisions` (see `PriorShape.squares`).
        curvature: H.
        precisions: one λ [1], one a group [T] or one a weight [P] of the basis; the result is differentiable in it.
    """
    penalty = (precisions.cpu().expand(len(squares)) * squares).sum()
    return loglik - 0.5 * (penalty + curvature.log_det_ratio(precisions).cpu())
