"""The posterior's centre next to the posterior: its scores, and the paired differences.

`centre_<metric>` is a score of the centre alone (see `base.Centred`), `<metric>_minus_centre` the posterior's minus the
centre's, with the standard error of the difference over the same points or blocks: what both share cancels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bnn_runner.metrics.scores import mean_and_error
from bnn_runner.scoring import Evaluation, Metric, Score

PREFIX, MINUS = "centre_", "_minus_centre"


def with_centre(metric: Metric, evaluation: Evaluation, seed: int, scores: Sequence[Score]) -> list[Score]:
    """The posterior's `scores` by a metric, then the centre's by the same, with their differences; no more without one.

    The error of a difference is that of the mean over points (see `Score.points`).
    """
    found = list(scores)
    for own, alone in zip(scores, [] if evaluation.centre is None else metric(evaluation.centre, seed), strict=False):
        found.append(named(alone))
        if own.points is not None and alone.points is not None:
            apart = own.points.double() - alone.points.double()
            found.append(difference(own, own.value - alone.value, mean_and_error(apart)[1]))
    return found


def named(score: Score) -> Score:
    """The score as one of the centre."""
    return replace(score, metric=f"{PREFIX}{score.metric}")


def difference(score: Score, value: float, error: float) -> Score:
    """The posterior's `score` minus its centre's; it has converged where that has."""
    status, note = (score.status, score.note) if score.status == "not converged" else ("ok", "")
    metric = f"{score.metric}{MINUS}"
    return replace(score, metric=metric, value=value, standard_error=error, status=status, note=note, points=None)
