"""The points of every score: their mean is its value, and the error of that mean its standard error."""

from __future__ import annotations

import math

import pytest
import torch

from bnn_runner.metrics.accuracy import Accuracy
from bnn_runner.metrics.brier import Brier
from bnn_runner.metrics.coverage import Coverage
from bnn_runner.metrics.crps import CRPS
from bnn_runner.metrics.dyadic import Dyadic
from bnn_runner.metrics.ece import CalibrationError
from bnn_runner.metrics.joint import Joint
from bnn_runner.metrics.marginal import Marginal
from bnn_runner.metrics.misclassification import Misclassification
from bnn_runner.metrics.ood import OOD
from bnn_runner.metrics.rmse import RMSE
from bnn_runner.scoring import Evaluation, SplitEvaluation

WITHOUT = {"ood_aupr"}
"""No such points are known of it, so it is never bold."""


def evaluations():
    stream = torch.Generator().manual_seed(0)
    n, draws = 60, 12
    ids = torch.arange(n)
    logits = 1.5 * torch.randn(draws, n, 3, generator=stream)
    targets = torch.randint(3, (n,), generator=stream)
    probs = logits.softmax(-1)
    loglik = probs.log().gather(2, targets.expand(draws, n).unsqueeze(-1)).squeeze(-1)
    entropy = -(probs * probs.log()).sum(-1).mean(0)
    test = SplitEvaluation(ids, loglik, targets, probs.mean(0), entropy)
    far = SplitEvaluation(ids + n, mean_probs=probs.mean(0).roll(1, 0) ** 0.5, mean_entropy=entropy)
    weights = torch.zeros(draws)
    yield Evaluation("classification", "draws", False, True, weights, {"test": test, "ood/far": far})
    means = torch.randn(draws, n, 1, generator=stream)
    y = torch.randn(n, 1, generator=stream)
    loglik = torch.distributions.Normal(means, 1.0).log_prob(y).squeeze(-1)
    test = SplitEvaluation(ids, loglik, y, means=means, variances=torch.ones(1, 1, 1))
    yield Evaluation("regression", "draws", False, True, weights, {"test": test})


@pytest.mark.parametrize("evaluation", list(evaluations()), ids=lambda e: e.kind)
def test_the_mean_of_the_points_is_the_score(evaluation):
    """Planted bugs: an error of another number than the value's; points of another order or sign."""
    metrics = [Accuracy(), Brier(), CalibrationError(8), Marginal(), Misclassification(), OOD(), RMSE(), CRPS(10**7)]
    metrics += [Coverage([0.9]), Joint([1, 4], 3, 0.002), Dyadic([2], 10, 2, "uniform", 0.002)]
    checked = 0
    for score in (s for metric in metrics for s in metric(evaluation, 0)):
        if score.status == "n/a" or score.metric.endswith(("_effective_draws", "_at_draws")) or score.metric in WITHOUT:
            continue
        assert score.points is not None, score
        if score.tau in (None, 1):  # blocks: those of the first of several permutations
            assert float(score.points.double().mean()) == pytest.approx(score.value, rel=1e-6), score
        error = float(score.points.double().std()) / math.sqrt(len(score.points))
        if "loglik" not in score.metric:  # that of a log-likelihood from draws also has the draws' own error
            assert score.standard_error == pytest.approx(error, rel=0.02), score
        checked += 1
    assert checked > 6
