"""Detecting out-of-distribution points by the predictive uncertainty."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnn_runner.evaluation.predictive import log_weights, total_entropy, variance_parts
from bnn_runner.metrics.areas import roc_area
from bnn_runner.metrics.scores import draws_used, mean_score, not_available
from bnn_runner.scoring import Evaluation, Score, SplitEvaluation


@dataclass(frozen=True)
class OOD:
    """`ood_auroc` and `ood_aupr` for each out-of-distribution set (its points are the positives).

    The score of a point is its predictive entropy (classes) or the epistemic standard deviation,
    averaged over outputs (regression). Classes also get `ood_auroc_confidence`, by one minus the
    largest probability, and `ood_confidence`, the mean largest probability on the set.
    """

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        scores = [
            not_available(metric, reason, split=name, better="higher")
            for name, reason in evaluation.unavailable.items()
            for metric in ("ood_auroc", "ood_aupr")
        ]
        for name, split in evaluation.splits.items():
            if name.startswith("ood/"):
                scores += self._classes(evaluation, name, split) if split.mean_probs is not None else []
                scores += self._regression(evaluation, name, split) if split.means is not None else []
        return scores

    def _classes(self, evaluation: Evaluation, name: str, split: SplitEvaluation) -> list[Score]:
        assert split.mean_probs is not None and evaluation.test.mean_probs is not None
        scores = _areas(evaluation, name, total_entropy(evaluation.test), total_entropy(split), "entropy")
        inside, outside = evaluation.test.mean_probs.max(-1).values, split.mean_probs.max(-1).values
        auroc = _areas(evaluation, name, 1 - inside, 1 - outside, "largest probability")[0]
        confidence = mean_score("ood_confidence", outside, evaluation, split=name, better="lower", unit="fraction")
        return [*scores, replace(auroc, metric="ood_auroc_confidence"), confidence]

    def _regression(self, evaluation: Evaluation, name: str, split: SplitEvaluation) -> list[Score]:
        weights = log_weights(evaluation)
        inside, outside = (variance_parts(s, weights)[1].sqrt().mean(-1) for s in (evaluation.test, split))
        if not bool((inside > 0).any() | (outside > 0).any() | inside.isnan().any() | outside.isnan().any()):
            reason = "a single function has no epistemic uncertainty"
            return [not_available(m, reason, split=name, better="higher") for m in ("ood_auroc", "ood_aupr")]
        return _areas(evaluation, name, inside, outside, "epistemic standard deviation")


def _areas(evaluation: Evaluation, name: str, inside: Tensor, outside: Tensor, by: str) -> list[Score]:
    """Areas under the ROC and the precision-recall curve of test points against the set `name`."""
    values = torch.cat([inside, outside]).double()
    if not torch.isfinite(values).all():
        reason = f"the {by} is not finite at {int((~torch.isfinite(values)).sum())} points"
        return [not_available(m, reason, split=name, better="higher") for m in ("ood_auroc", "ood_aupr")]
    from sklearn.metrics import average_precision_score

    labels = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))]).numpy()
    area, error, points = roc_area(inside, outside)
    fields = {"n": len(values), "split": name, "draws": draws_used(evaluation), "better": "higher", "unit": "fraction"}
    fields["note"] = f"by {by}, {len(inside)} test points against {len(outside)}"
    precision = float(average_precision_score(labels, values.numpy()))
    return [
        Score("ood_auroc", area, error, points=points, **fields),  # type: ignore[arg-type]
        Score("ood_aupr", precision, **fields),  # type: ignore[arg-type]
    ]
