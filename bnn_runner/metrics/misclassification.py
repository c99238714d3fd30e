"""Detecting wrong predictions by the predictive uncertainty."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bnn_runner.evaluation.predictive import total_entropy
from bnn_runner.metrics.areas import roc_area
from bnn_runner.metrics.scores import draws_used, not_available
from bnn_runner.scoring import Evaluation, Score


@dataclass(frozen=True)
class Misclassification:
    """`misclassification_auroc`: area under the ROC curve of predictive entropy for wrong test predictions."""

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        test, metric = evaluation.test, "misclassification_auroc"
        if test.mean_probs is None or test.targets is None:
            return []
        entropy = total_entropy(test)
        wrong = test.mean_probs.argmax(-1) != test.targets
        count = int(wrong.sum())
        if not torch.isfinite(entropy).all():
            return [not_available(metric, "probabilities are not finite", better="higher")]
        if count in (0, len(wrong)):
            reason = f"{count} of {len(wrong)} predictions are wrong, so there are no two groups to separate"
            return [not_available(metric, reason, better="higher")]
        area, error, by_group = roc_area(entropy[~wrong], entropy[wrong])
        points = torch.empty_like(by_group)
        points[~wrong], points[wrong] = by_group[: len(wrong) - count], by_group[len(wrong) - count :]
        return [
            Score(
                metric,
                area,
                error,
                n=len(wrong),
                draws=draws_used(evaluation),
                better="higher",
                unit="fraction",
                note=f"by entropy, {count} wrong predictions",
                points=points,
            )
        ]
