"""Accuracy of the most probable class."""

from __future__ import annotations

from dataclasses import dataclass

from bnn_runner.base import Evaluation, Score
from bnn_runner.metrics.mixture import mean_score


@dataclass(frozen=True)
class Accuracy:
    """`accuracy`: share of test points whose class has the largest mean probability."""

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        test = evaluation.test
        if test.mean_probs is None or test.targets is None:
            return []
        right = (test.mean_probs.argmax(-1) == test.targets).double()
        # argmax of NaN is some class: such a point must not pass for right or wrong
        right[test.mean_probs.isnan().any(-1)] = float("nan")
        return [mean_score("accuracy", right, evaluation, better="higher", unit="fraction")]
