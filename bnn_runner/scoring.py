"""Contracts of scoring: what an evaluation keeps of a posterior, and what a metric makes of it.

Letters as in `base`: N points, K outputs, S draws, tau points in a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from bnn_runner.tasks import Kind


@dataclass(frozen=True)
class SplitEvaluation:
    """What S draws say about N points of one split, in original target units.

    `loglik` [S, N]: log p(y_n | f_s(x_n)) in nats, absent without targets. Classes: `mean_probs`
    [N, K], `mean_entropy` [N] (mean over draws of the entropy of each, nats), and `centre` [N], the
    class that the posterior's centre (f(x, w*) of a linearised one) prefers, where it has one.
    Regression: `means` [S, N, K] and `variances` [S or 1, N or 1, K] of y given each draw; a closed
    form has S = 1, `variances` total, and `epistemic` [N, K] the part of it that the posterior adds.
    """

    ids: Tensor
    loglik: Tensor | None = None
    targets: Tensor | None = None
    mean_probs: Tensor | None = None
    mean_entropy: Tensor | None = None
    centre: Tensor | None = None
    means: Tensor | None = None
    variances: Tensor | None = None
    epistemic: Tensor | None = None


@dataclass(frozen=True)
class GaussianJoint:
    """The exact joint predictive of a split's targets: mean [N], covariance [N, N] with noise, original units."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class Evaluation:
    """Everything the metrics may use; saved with the cell, so that metrics need no GPU and no data again.

    `splits` holds "test", "val" and "ood/<name>". `log_weights` [S] are zero where draws count
    alike. `finite`: the draws are the whole posterior. `has_joint`: the draws are functions, so
    joint scores exist (a closed-form predictive has none, unless `gaussian_joint` is there).
    `temperature` is what the logits were divided by, if they were calibrated. `unavailable` maps
    "ood/<name>" to the reason why that set is missing from `splits`.
    """

    kind: Kind
    predictive: str
    finite: bool
    has_joint: bool
    log_weights: Tensor
    splits: Mapping[str, SplitEvaluation]
    gaussian_joint: GaussianJoint | None = None
    temperature: float | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def test(self) -> SplitEvaluation:
        return self.splits["test"]


@dataclass(frozen=True)
class Score:
    """One number of the tidy table.

    `status`: ok, n/a (with the reason in `note`) or not converged. `value` is NaN for n/a.
    `standard_error` is over the n points or blocks of this one evaluation. `draws` is the number of
    draws the value used; `better` is "higher", "lower" or "" (neither).
    """

    metric: str
    value: float
    standard_error: float = float("nan")
    n: int = 0
    split: str = "test"
    tau: int | None = None
    kappa: int | None = None
    draws: int | None = None
    better: str = ""
    unit: str = ""
    status: str = "ok"
    note: str = ""


@runtime_checkable
class Metric(Protocol):
    """A frozen dataclass whose fields are its YAML's keys: a pure function of an Evaluation and a seed."""

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        """Scores; an empty list where the metric does not apply to this kind of task."""
        ...
