"""Contracts of scoring: what an evaluation keeps of a posterior, and what a metric makes of it.

Letters as in `base`: N points, K outputs, S draws, tau points in a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from bnn_runner.tasks import Kind


@dataclass(frozen=True)
class SplitEvaluation:
    """The predictions of S draws for the N points of one split, in original target units.

    Attributes:
        ids: of the points, [N].
        loglik: log p(y_n | f_s(x_n)) in nats, [S, N]; None without targets.
        targets: [N] class labels or [N, K] numbers; None without targets.
        mean_probs: classes: mean over draws of the class probabilities, [N, K].
        mean_entropy: classes: mean over draws of each one's entropy, nats, [N].
        means: regression: mean of y given each draw, [S, N, K].
        variances: regression: variance of y given each draw, [S or 1, N or 1, K]; of a closed form (S = 1) the total.
        epistemic: regression in closed form: the part of `variances` that the posterior adds, [N, K].
        exact_loglik: next to draws: log-densities of the exact predictive, where it is a Gaussian, [N].
    """

    ids: Tensor
    loglik: Tensor | None = None
    targets: Tensor | None = None
    mean_probs: Tensor | None = None
    mean_entropy: Tensor | None = None
    means: Tensor | None = None
    variances: Tensor | None = None
    epistemic: Tensor | None = None
    exact_loglik: Tensor | None = None


@dataclass(frozen=True)
class GaussianJoint:
    """The exact joint predictive of a split's targets: mean [N] and covariance [N, N] with noise, original units.

    `noise` [N] is the part of the variances that repeats of one point do not share.
    """

    mean: Tensor
    covariance: Tensor
    noise: Tensor | None = None


@dataclass(frozen=True)
class Evaluation:
    """Everything that metrics may use; saved with the cell, so that metrics need neither a GPU nor the data again.

    Attributes:
        kind: of the task.
        predictive: how probabilities were computed: draws, closed_form, probit or bridge.
        finite: the draws are the whole posterior.
        has_joint: the draws are functions, so that joint scores exist; a closed form has none without `gaussian_joint`.
        log_weights: of the draws, [S]; zero where draws count equally.
        splits: "test", "val", "ood/<name>" and "shift/<name>/<level>".
        gaussian_joint: of the test targets, where it is known.
        temperature: by which the logits were divided, if they were calibrated.
        unavailable: "ood/<name>" to the reason why that set is not in `splits`.
        centre: of a posterior that has one (see `base.Centred`), the predictions of its centre for "test" and "val":
            one draw, at the same temperature.
        notes: what a reader of the scores should know.
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
    centre: Evaluation | None = None
    notes: tuple[str, ...] = ()

    @property
    def test(self) -> SplitEvaluation:
        return self.splits["test"]


ScoreStatus = Literal["ok", "n/a", "not converged", "not finite"]


@dataclass(frozen=True)
class Score:
    """One number of the tidy table.

    Every score is given the status `not finite` and a note when its value or its standard error overflowed or met a
    NaN, so a metric need not look.

    Attributes:
        metric: its name.
        value: NaN for n/a.
        standard_error: over the n points or blocks of this one evaluation; of a log-likelihood from draws it includes
            the draws' own Monte Carlo error; NaN where there is none.
        n: number of points or blocks.
        split: which split it is of.
        tau: points per block of a joint score.
        kappa: distinct points per block of a dyadic score.
        draws: number of draws that the value was computed from.
        better: "higher", "lower" or "" (neither).
        unit: in words.
        status: ok, n/a (with the reason in `note`), not converged, or not finite.
        note: for a reader.
        points: numbers [n], one per point or block, whose mean is the value (to first order, where the score is not a
            mean itself). Two methods' difference on the same points has the standard error of their differences; not
            in metrics.csv but in points.npz. None where there are none.
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
    points: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.status in ("n/a", "not finite"):
            return
        bad_value = not math.isfinite(self.value)
        if bad_value or math.isinf(self.standard_error):
            name, number = ("value", self.value) if bad_value else ("standard error", self.standard_error)
            object.__setattr__(self, "status", "not finite")
            object.__setattr__(self, "note", "; ".join(filter(None, (self.note, f"the {name} is {number}"))))


SCORE_COLUMNS = tuple(f.name for f in fields(Score) if f.name != "points")
"""The columns of metrics.csv."""


@runtime_checkable
class Metric(Protocol):
    """A frozen dataclass whose fields are its YAML's keys: a pure function of an Evaluation and a seed."""

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        """Scores; an empty list where the metric does not apply to this kind of task."""
        ...
