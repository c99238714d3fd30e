"""Coverage of central predictive intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bnn_runner.evaluation.predictive import log_weights, pit
from bnn_runner.metrics.checks import fractions
from bnn_runner.metrics.scores import draws_used, mean_and_error, mean_score
from bnn_runner.scoring import Evaluation, Score


@dataclass(frozen=True)
class Coverage:
    """`coverage_<percent>` for each of `levels`, and `coverage_error`.

    The central interval of the predictive mixture at level c contains y when |PIT - 1/2| <= c/2. `coverage_error` is
    the mean of |coverage(c) - c| over c = 0.05, 0.10, ..., 0.95.
    """

    levels: Sequence[float]

    def __post_init__(self) -> None:
        fractions("coverage", levels=self.levels)

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        test = evaluation.test
        if test.means is None or test.targets is None:
            return []
        distance = 2 * (pit(test, log_weights(evaluation)) - 0.5).abs()  # [N, K], the smallest level that contains y
        scores = []
        for level in self.levels:
            inside = torch.where(distance.isnan(), distance, (distance <= level).double()).mean(-1)
            scores.append(
                mean_score(f"coverage_{100 * level:g}", inside, evaluation, unit="fraction", note=f"ideal {level:g}")
            )
        grid = torch.arange(1, 20, dtype=torch.float64) / 20
        gaps = torch.stack([(distance <= c).double().mean(-1) - c for c in grid])  # [19, N]
        points = (gaps.mean(1, keepdim=True).sign() * gaps).mean(0)  # signs fixed
        if distance.isnan().any():
            points = torch.full_like(points, float("nan"))
        error, spread = mean_and_error(points)
        scores.append(
            Score(
                "coverage_error",
                error,
                spread,
                n=len(distance),
                draws=draws_used(evaluation),
                better="lower",
                unit="fraction",
                note="mean over 19 levels of the distance between coverage and level",
                points=points,
            )
        )
        return scores
