"""Expected calibration error of the top class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.metrics.centre import with_centre
from bnn_runner.metrics.checks import positive_integers
from bnn_runner.metrics.scores import NAN, draws_used, mean_and_error
from bnn_runner.scoring import Evaluation, Score


def bin_of(confidence: Tensor, bins: int) -> Tensor:
    """Index [N] of the equal-width bin (i/bins, (i+1)/bins]; 0 belongs to the first bin, 1 to the last."""
    edges = torch.arange(1, bins, dtype=confidence.dtype) / bins
    return torch.bucketize(confidence, edges)


@dataclass(frozen=True)
class CalibrationError:
    """`ece`: sum over `bins` bins of (share of points) |accuracy - mean confidence| (Naeini et al. 2015).

    It is the mean over points of the gap between right (1) or wrong (0) and the confidence, times the sign of the bin's
    own gap; the standard error is that of this mean, with the signs fixed.
    """

    bins: int

    def __post_init__(self) -> None:
        positive_integers("ece", bins=self.bins)

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        test = evaluation.test
        if test.mean_probs is None or test.targets is None:
            return []
        fields = {"n": len(test.ids), "draws": draws_used(evaluation), "better": "lower", "unit": "fraction"}
        confidence, predicted = test.mean_probs.double().max(-1)
        if not torch.isfinite(confidence).all():
            return [Score("ece", NAN, note="probabilities are not finite", **fields)]  # type: ignore[arg-type]
        confidence = confidence.clamp(0, 1)  # a sum of rounded numbers may exceed 1
        gap = (predicted == test.targets).double() - confidence
        place = bin_of(confidence, self.bins)
        per_bin = torch.zeros(self.bins, dtype=torch.float64).index_add_(0, place, gap)
        points = per_bin.sign()[place] * gap
        value, (_, error) = float(per_bin.abs().sum() / len(gap)), mean_and_error(points)
        note = f"{self.bins} equal-width bins"
        score = Score("ece", value, error, note=note, points=points, **fields)  # type: ignore[arg-type]
        return with_centre(self, evaluation, seed, [score])
