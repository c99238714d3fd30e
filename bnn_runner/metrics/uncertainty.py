"""Predictive uncertainty, and its aleatoric and epistemic parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bnn_runner.evaluation.predictive import log_weights, total_entropy, variance_parts
from bnn_runner.metrics.scores import mean_score, not_available
from bnn_runner.scoring import Evaluation, Score, SplitEvaluation


@dataclass(frozen=True)
class Uncertainty:
    """Means over the points of test and of each out-of-distribution set.

    Classes (nats): `total_entropy` of the mean probabilities, `expected_entropy` (mean over draws of
    the entropy of each) and their difference, `mutual_information`. Regression (target units):
    `aleatoric_variance`, `epistemic_variance`, and the means of their roots, `aleatoric_std` and
    `epistemic_std`; averaged over outputs.
    """

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        scores: list[Score] = []
        for name, split in evaluation.splits.items():
            if name == "val":
                continue
            scores += _classes(evaluation, name, split) if split.mean_probs is not None else []
            scores += _regression(evaluation, name, split) if split.means is not None else []
        return scores


def _classes(evaluation: Evaluation, name: str, split: SplitEvaluation) -> list[Score]:
    total = total_entropy(split)
    scores = [mean_score("total_entropy", total, evaluation, split=name, unit="nats")]
    if split.mean_entropy is None:
        reason = "a closed-form predictive has no draws"
        return scores + [not_available(m, reason, split=name) for m in ("expected_entropy", "mutual_information")]
    expected = split.mean_entropy.double()
    alone = len(evaluation.log_weights) == 1
    information = torch.zeros_like(total) if alone else (total - expected).clamp(min=0)  # below 0 by rounding (Jensen)
    return [
        *scores,
        mean_score("expected_entropy", expected, evaluation, split=name, unit="nats"),
        mean_score("mutual_information", information, evaluation, split=name, unit="nats"),
    ]


def _regression(evaluation: Evaluation, name: str, split: SplitEvaluation) -> list[Score]:
    aleatoric, epistemic = variance_parts(split, log_weights(evaluation))
    scores = []
    for part, variance in (("aleatoric", aleatoric), ("epistemic", epistemic)):
        square, plain = {"unit": "target units squared"}, {"unit": "target units"}
        scores.append(mean_score(f"{part}_variance", variance.mean(-1), evaluation, split=name, **square))
        scores.append(mean_score(f"{part}_std", variance.sqrt().mean(-1), evaluation, split=name, **plain))
    return scores
