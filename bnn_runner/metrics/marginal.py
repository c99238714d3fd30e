"""Marginal log-likelihood: mean over points of log sum_s w_s p(y_n | f_s(x_n))."""

from __future__ import annotations

from dataclasses import dataclass

from bnn_runner.evaluation.predictive import log_mixture, log_weights
from bnn_runner.metrics.scores import mean_score
from bnn_runner.scoring import Evaluation, Score


@dataclass(frozen=True)
class Marginal:
    """`marginal_loglik` on test and, where there is one, val; nats per point, original target units."""

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        scores = []
        for name in ("test", "val"):
            split = evaluation.splits.get(name)
            if split is None or split.loglik is None:
                continue
            values = log_mixture(split.loglik, log_weights(evaluation))
            scores.append(
                mean_score("marginal_loglik", values, evaluation, split=name, better="higher", unit="nats per point")
            )
        return scores
