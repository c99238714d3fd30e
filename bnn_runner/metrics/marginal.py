"""Marginal log-likelihood: mean over points of log sum_s w_s p(y_n | f_s(x_n))."""

from __future__ import annotations

from dataclasses import dataclass

from bnn_runner.metrics.block_scores import point_scores
from bnn_runner.scoring import Evaluation, Score


@dataclass(frozen=True)
class Marginal:
    """`marginal_loglik` on test and, where there is one, val; nats per point, original target units.

    It is the joint score of single points. Where the predictive is a known Gaussian it is exact, and
    the value from draws is `marginal_loglik_by_draws`; elsewhere it is estimated from draws, with a
    status (`bnn_runner.metrics.log_mean`). The centre's, and the difference, are rows of their own
    (`bnn_runner.metrics.centre`).
    """

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        scores = []
        for name in ("test", "val"):
            split = evaluation.splits.get(name)
            if split is not None and split.loglik is not None:
                scores += point_scores("marginal_loglik", evaluation, name, unit="nats per point")
        return scores


def validation_against_centre(evaluation: Evaluation) -> tuple[Score, Score, Score] | None:
    """The marginal log-likelihood of the validation part: the posterior's, its centre's, and their difference.

    None where there is no centre or no validation part.
    """
    split = evaluation.splits.get("val")
    if split is None or split.loglik is None:
        return None
    scores = {s.metric: s for s in point_scores("marginal_loglik", evaluation, "val", unit="nats per point")}
    if "centre_marginal_loglik" not in scores:
        return None
    return scores["marginal_loglik"], scores["centre_marginal_loglik"], scores["marginal_loglik_minus_centre"]
