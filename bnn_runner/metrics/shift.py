"""Scores of the test points under a growing shift, level by level (Ovadia et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bnn_runner.metrics.accuracy import Accuracy
from bnn_runner.metrics.checks import positive_integers
from bnn_runner.metrics.ece import CalibrationError
from bnn_runner.metrics.marginal import Marginal
from bnn_runner.scoring import Evaluation, Score

PREFIX = "shift/"


@dataclass(frozen=True)
class Shift:
    """`shift_marginal_loglik`, `shift_accuracy` and `shift_ece` (with `bins` bins) of every "shift/<name>/<level>".

    "shift/clean/0" are the same points without shift.
    """

    bins: int

    def __post_init__(self) -> None:
        positive_integers("shift", bins=self.bins)

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        scores = []
        for name, split in evaluation.splits.items():
            if not name.startswith(PREFIX):
                continue
            alone = replace(evaluation, splits={"test": split}, gaussian_joint=None, centre=None)
            for metric in (Marginal(), Accuracy(), CalibrationError(self.bins)):
                found = metric(alone, seed)[:1]  # the rest are companions
                scores += [replace(s, metric=f"shift_{s.metric}", split=name) for s in found]
        return scores
