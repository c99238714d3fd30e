"""Brier score of class probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import one_hot

from bnn_runner.metrics.centre import with_centre
from bnn_runner.metrics.scores import mean_score
from bnn_runner.scoring import Evaluation, Score


@dataclass(frozen=True)
class Brier:
    """`brier`: mean over points of sum_k (p_k - [y = k])^2, from 0 to 2 (Brier 1950: summed over classes).

    The centre's, and the difference, are rows of their own (`bnn_runner.metrics.centre`).
    """

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        test = evaluation.test
        if test.mean_probs is None or test.targets is None:
            return []
        probs = test.mean_probs.double()
        values = (probs - one_hot(test.targets, probs.shape[-1])).square().sum(-1)
        return with_centre(self, evaluation, seed, [mean_score("brier", values, evaluation, better="lower")])
