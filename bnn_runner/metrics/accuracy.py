"""Accuracy of the most probable class."""

from __future__ import annotations

from dataclasses import dataclass

from bnn_runner.metrics.centre import with_centre
from bnn_runner.metrics.scores import mean_score
from bnn_runner.scoring import Evaluation, Score


@dataclass(frozen=True)
class Accuracy:
    """`accuracy`: share of test points whose class has the largest mean probability.

    `centre_accuracy`: the same for the posterior's centre. The centre of linearised Laplace is the MAP network, so this
    equals MAP's accuracy (a check, and it shows what averaging over draws changes).
    """

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        test = evaluation.test
        if test.mean_probs is None or test.targets is None:
            return []
        right = (test.mean_probs.argmax(-1) == test.targets).double()
        # argmax of NaN is some class: such a point counts neither as right nor as wrong
        right[test.mean_probs.isnan().any(-1)] = float("nan")
        score = mean_score("accuracy", right, evaluation, better="higher", unit="fraction")
        return with_centre(self, evaluation, seed, [score])
