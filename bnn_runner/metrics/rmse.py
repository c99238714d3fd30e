"""Root mean squared error of the predictive mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bnn_runner.evaluation.predictive import log_weights, mixture_mean
from bnn_runner.metrics.centre import with_centre
from bnn_runner.metrics.scores import draws_used, mean_and_error
from bnn_runner.scoring import Evaluation, Score


@dataclass(frozen=True)
class RMSE:
    """`rmse`: square root of the mean over points (and outputs) of (y - mean)^2, in the target's own units.

    Its standard error follows from that of the mean square by the delta method.
    """

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        test = evaluation.test
        if test.means is None or test.targets is None:
            return []
        centre = mixture_mean(test.means, log_weights(evaluation))
        squares = (test.targets - centre).square().mean(-1)
        square, error = mean_and_error(squares)
        value = math.sqrt(square)
        error = error / (2 * value) if value > 0 else 0.0
        points = value + (squares.double() - square) / (2 * value) if value > 0 else squares
        fields = {"n": len(centre), "draws": draws_used(evaluation), "better": "lower", "unit": "target units"}
        note = "" if math.isfinite(value) else "not finite"
        score = Score("rmse", value, error, note=note, points=points, **fields)  # type: ignore[arg-type]
        return with_centre(self, evaluation, seed, [score])
