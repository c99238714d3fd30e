"""Metrics of single points: calibration, errors, CRPS, coverage, out-of-distribution and uncertainty."""

import math
from dataclasses import replace

import pytest
import torch

from bnn_runner.evaluation.predictive import log_weights, pit
from bnn_runner.metrics.accuracy import Accuracy
from bnn_runner.metrics.brier import Brier
from bnn_runner.metrics.coverage import Coverage
from bnn_runner.metrics.crps import CRPS, expected_distance, pair_offsets
from bnn_runner.metrics.ece import CalibrationError, bin_of
from bnn_runner.metrics.marginal import Marginal
from bnn_runner.metrics.misclassification import Misclassification
from bnn_runner.metrics.ood import OOD
from bnn_runner.metrics.rmse import RMSE
from bnn_runner.metrics.uncertainty import Uncertainty
from bnn_runner.scoring import Evaluation, SplitEvaluation


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(probs, targets, log_weights=None, ood=None, notes=()):
    """Evaluation of per-draw class probabilities [S, N, K]."""
    probs = torch.as_tensor(probs, dtype=torch.float64)
    log_weights = torch.zeros(len(probs)).double() if log_weights is None else log_weights

    def split(p, y):
        w = torch.softmax(log_weights, 0)
        entropy = -torch.xlogy(p, p).sum(-1)
        loglik = None if y is None else p.gather(-1, y.expand(p.shape[:2]).unsqueeze(-1)).squeeze(-1).log()
        return SplitEvaluation(
            torch.arange(p.shape[1]), loglik, y, torch.einsum("s,snk->nk", w, p), torch.einsum("s,sn->n", w, entropy)
        )

    splits = {"test": split(probs, torch.as_tensor(targets))}
    splits |= {f"ood/{name}": split(torch.as_tensor(p, dtype=torch.float64), None) for name, p in (ood or {}).items()}
    return Evaluation("classification", "draws", True, True, log_weights, splits, notes=tuple(notes))


def regression(means, variances, y, log_weights=None, ood=None):
    """Evaluation of Gaussian draws: means [S, N, K], variances broadcastable, y [N, K]."""
    log_weights = torch.zeros(len(means)).double() if log_weights is None else log_weights
    log_prob = -0.5 * ((y - means) ** 2 / variances + torch.log(2 * math.pi * variances))
    splits = {"test": SplitEvaluation(torch.arange(len(y)), log_prob.sum(-1), y, means=means, variances=variances)}
    for name, m in (ood or {}).items():
        splits[f"ood/{name}"] = SplitEvaluation(torch.arange(m.shape[1]), means=m, variances=variances)
    return Evaluation("regression", "draws", True, True, log_weights, splits)


def value(scores, metric, split="test"):
    (score,) = [s for s in scores if s.metric == metric and s.split == split]
    return score.value


def test_metrics_that_do_not_apply_say_nothing():
    c = classes([[[0.5, 0.5]]], [0])
    r = regression(torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1).double(), torch.zeros(1, 1).double())
    for metric in (RMSE(), CRPS(max_terms=100), Coverage(levels=[0.5])):
        assert metric(c, 0) == []
    for metric in (Accuracy(), Brier(), CalibrationError(bins=15), Misclassification()):
        assert metric(r, 0) == []


def test_accuracy_and_brier_by_hand():
    evaluation = classes([[[0.7, 0.3], [0.4, 0.6]], [[0.9, 0.1], [0.8, 0.2]]], [0, 1])
    # mean probabilities (.8, .2) and (.6, .4)
    assert value(Accuracy()(evaluation, 0), "accuracy") == 0.5
    assert value(Brier()(evaluation, 0), "brier") == pytest.approx((0.2**2 + 0.2**2 + 0.6**2 + 0.6**2) / 2)


def test_nan_probabilities_stay_visible():
    evaluation = classes([[[math.nan, math.nan], [0.4, 0.6]]], [0, 1])
    score = Accuracy()(evaluation, 0)[0]
    assert math.isnan(score.value) and "1 of 2 values are not finite" in score.note
    assert math.isnan(CalibrationError(bins=15)(evaluation, 0)[0].value)
    assert Misclassification()(evaluation, 0)[0].status == "n/a"


def test_ece_by_hand_and_at_both_ends():
    sure = classes([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]], [0, 1, 1, 1])
    assert value(CalibrationError(bins=15)(sure, 0), "ece") == pytest.approx(0.25)
    assert bin_of(torch.tensor([0.0, 1 / 15, 1.0, 0.5], dtype=torch.float64), 15).tolist() == [0, 0, 14, 7]
    mixed = classes([[[0.62, 0.38], [0.64, 0.36], [0.95, 0.05]]], [0, 1, 0])
    # bins (.6, .667]: accuracy .5, confidence .63; (.933, 1]: accuracy 1, confidence .95
    expected = 2 / 3 * 0.13 + 1 / 3 * 0.05
    assert value(CalibrationError(bins=15)(mixed, 0), "ece") == pytest.approx(expected)


def test_marginal_is_finite_at_very_small_probabilities():
    loglik = torch.tensor([[-1e4, -2.0], [-2e4, -3.0]]).double()
    split = SplitEvaluation(torch.arange(2), loglik, torch.zeros(2).long())
    evaluation = Evaluation(
        "classification", "draws", True, True, torch.zeros(2).double(), {"test": split, "val": split}
    )
    scores = Marginal()(evaluation, 0)
    expected = (-1e4 - math.log(2) + math.log((math.exp(-2) + math.exp(-3)) / 2)) / 2
    assert [s.split for s in scores] == ["test", "val"]
    assert scores[0].value == pytest.approx(expected)


def test_rmse_uses_the_weighted_mean():
    means = torch.tensor([[[0.0], [0.0]], [[2.0], [4.0]]]).double()
    log_weights = torch.tensor([0.75, 0.25]).double().log()
    y = torch.tensor([[0.0], [0.0]]).double()
    evaluation = regression(means, torch.ones(1, 1, 1).double(), y, log_weights)
    score = RMSE()(evaluation, 0)[0]
    assert score.value == pytest.approx(math.sqrt((0.5**2 + 1.0**2) / 2))
    assert score.standard_error > 0


def mixture_crps_by_integration(y, means, sds, weights):
    z = torch.linspace(-30, 30, 200_001, dtype=torch.float64)
    cdf = sum(
        w * 0.5 * (1 + torch.erf((z - m) / (s * math.sqrt(2)))) for m, s, w in zip(means, sds, weights, strict=True)
    )
    return float(torch.trapezoid((cdf - (z >= y).double()) ** 2, z))


def test_crps_against_numerical_integration():
    means, variances = 2 * rand(3, 4, 1, seed=1), rand(3, 4, 1, seed=2).exp()
    y, weights = rand(4, 1, seed=3), torch.tensor([0.5, 0.2, 0.3]).double()
    evaluation = regression(means, variances, y, weights.log())
    expected = [
        mixture_crps_by_integration(float(y[n]), means[:, n, 0].tolist(), variances[:, n, 0].sqrt().tolist(), weights)
        for n in range(4)
    ]
    score = CRPS(max_terms=10_000)(evaluation, 0)[0]
    assert score.value == pytest.approx(sum(expected) / 4, abs=2e-4)
    assert score.note == ""


def test_crps_of_one_gaussian_is_the_known_formula():
    y, sd = rand(6, 1), 0.7
    evaluation = regression(torch.zeros(1, 6, 1).double(), torch.full((1, 1, 1), sd**2).double(), y)
    z = y / sd
    phi, cdf = torch.exp(-0.5 * z**2) / math.sqrt(2 * math.pi), 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    expected = float((sd * (z * (2 * cdf - 1) + 2 * phi - 1 / math.sqrt(math.pi))).mean())
    assert value(CRPS(max_terms=100)(evaluation, 0), "crps") == pytest.approx(expected, abs=1e-6)
    assert float(expected_distance(torch.tensor(-2.0), torch.tensor(0.0))) == 2.0


def test_crps_with_thinned_pairs_is_near_the_exact_one():
    means, y = rand(60, 30, 1, seed=4), rand(30, 1, seed=5)
    weights = rand(60, seed=6).exp()
    # Without the rightly weighted diagonal the double sum would be off by 1/60 of E|Y - Y'|, about 0.01. Unequal
    # weights leave fewer pairs that count, hence the wider bound.
    for log_weight, bound in ((torch.zeros(60).double(), 0.004), (weights.log(), 0.05)):
        evaluation = regression(means, torch.full((1, 1, 1), 0.01).double(), y, log_weight)
        exact = value(CRPS(max_terms=10**9)(evaluation, 0), "crps")
        thin = CRPS(max_terms=60 * 30 * 6)(evaluation, 0)[0]
        assert "6 of 30 offsets" in thin.note
        assert thin.value == pytest.approx(exact, abs=bound)
    assert pair_offsets(10, 100) == [1, 2, 3, 4, 5] and pair_offsets(1, 5) == [] and pair_offsets(2, 1) == [1]


def test_coverage_of_a_calibrated_gaussian():
    num_points = 4000
    means = rand(1, num_points, 1, seed=7)
    y = means[0] + 0.5 * rand(num_points, 1, seed=8)
    evaluation = regression(means, torch.full((1, 1, 1), 0.25).double(), y)
    scores = Coverage(levels=[0.5, 0.9, 0.95])(evaluation, 0)
    for level in (0.5, 0.9, 0.95):
        error = math.sqrt(level * (1 - level) / num_points)
        assert abs(value(scores, f"coverage_{100 * level:g}") - level) < 5 * error
    assert value(scores, "coverage_error") < 5 * 0.5 / math.sqrt(num_points)
    narrow = regression(means, torch.full((1, 1, 1), 0.05).double(), y)
    assert value(Coverage(levels=[0.9])(narrow, 0), "coverage_error") > 0.2


def test_pit_of_a_mixture_is_its_distribution_function():
    means, weights = torch.tensor([[[-1.0]], [[3.0]]]).double(), torch.tensor([0.25, 0.75]).double()
    evaluation = regression(means, torch.ones(1, 1, 1).double(), torch.tensor([[1.0]]).double(), weights.log())
    below = torch.distributions.Normal(means[:, 0, 0], 1.0).cdf(torch.tensor(1.0).double())
    assert float(pit(evaluation.test, log_weights(evaluation))) == pytest.approx(float((weights * below).sum()))


def test_ood_of_classes():
    test = [[[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]]]
    ood = {"far": [[[0.5, 0.5], [0.55, 0.45]]], "same": test}
    evaluation = replace(classes(test, [0, 0, 0], ood=ood), unavailable={"ood/gone": "file x: not found"})
    scores = OOD()(evaluation, 0)
    assert value(scores, "ood_auroc", "ood/far") == 1.0 and value(scores, "ood_aupr", "ood/far") == 1.0
    assert value(scores, "ood_auroc", "ood/same") == 0.5
    assert value(scores, "ood_auroc_confidence", "ood/far") == 1.0
    assert value(scores, "ood_confidence", "ood/far") == pytest.approx(0.525)
    gone = [s for s in scores if s.split == "ood/gone"]
    assert gone and all(s.status == "n/a" and s.note == "file x: not found" for s in gone)


def test_ood_of_regression_goes_by_epistemic_spread():
    inside, outside = 0.1 * rand(20, 50, 1, seed=1), rand(20, 40, 1, seed=2)
    y = torch.zeros(50, 1).double()
    noise = torch.ones(1, 1, 1).double()
    scores = OOD()(regression(inside, noise, y, ood={"far": outside}), 0)
    assert value(scores, "ood_auroc", "ood/far") == 1.0
    one = OOD()(regression(inside[:1], noise, y, ood={"far": outside[:1]}), 0)
    assert {s.status for s in one} == {"n/a"} and "no epistemic" in one[0].note


def test_misclassification():
    evaluation = classes([[[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]]], [0, 1, 0])
    assert value(Misclassification()(evaluation, 0), "misclassification_auroc") == 1.0
    perfect = Misclassification()(classes([[[0.9, 0.1]]], [0]), 0)[0]
    assert perfect.status == "n/a" and "0 of 1" in perfect.note


def test_uncertainty_of_classes_by_hand():
    evaluation = classes([[[1.0, 0.0]], [[0.0, 1.0]]], [0], ood={"x": [[[0.5, 0.5]], [[0.5, 0.5]]]})
    scores = Uncertainty()(evaluation, 0)
    assert value(scores, "total_entropy") == pytest.approx(math.log(2))
    assert value(scores, "expected_entropy") == 0.0
    assert value(scores, "mutual_information") == pytest.approx(math.log(2))
    assert value(scores, "mutual_information", "ood/x") == pytest.approx(0.0, abs=1e-12)
    assert value(scores, "expected_entropy", "ood/x") == pytest.approx(math.log(2))


def test_one_draw_has_no_mutual_information_at_all():
    """Planted bug: what rounding leaves of entropies that were summed in another precision."""
    probs = torch.softmax(rand(1, 50, 7), -1)
    evaluation = classes(probs, torch.zeros(50, dtype=torch.int64))
    test = evaluation.splits["test"]
    rounded = replace(test, mean_entropy=(test.mean_entropy - 1e-12).clamp_min(0))
    scores = Uncertainty()(replace(evaluation, splits={"test": rounded}), 0)
    assert value(scores, "mutual_information") == 0.0 < value(scores, "expected_entropy")


def test_uncertainty_of_regression_by_hand():
    means = torch.tensor([[[0.0]], [[2.0]]]).double()
    evaluation = regression(means, torch.full((1, 1, 1), 0.25).double(), torch.zeros(1, 1).double())
    scores = Uncertainty()(evaluation, 0)
    assert value(scores, "aleatoric_variance") == 0.25 and value(scores, "aleatoric_std") == 0.5
    assert value(scores, "epistemic_variance") == 1.0 and value(scores, "epistemic_std") == 1.0
    closed = SplitEvaluation(
        torch.arange(1),
        means=torch.zeros(1, 1, 1),
        variances=torch.full((1, 1, 1), 1.25),
        epistemic=torch.ones(1, 1),
    )
    scores = Uncertainty()(Evaluation("regression", "closed_form", False, False, torch.zeros(1), {"test": closed}), 0)
    assert value(scores, "aleatoric_variance") == pytest.approx(0.25)
    assert value(scores, "epistemic_variance") == 1.0


def test_draw_weights_count_in_every_regression_metric():
    means, y, noise = rand(3, 25, 2, seed=1), rand(25, 2, seed=2), torch.full((1, 1, 2), 0.3).double()
    twice = regression(torch.cat([means, means[:1]]), noise, y)
    weighted = regression(means, noise, y, torch.tensor([2.0, 1.0, 1.0]).double().log())
    for metric in (RMSE(), CRPS(max_terms=10**6), Coverage(levels=[0.5, 0.9]), Uncertainty(), Marginal()):
        for a, b in zip(metric(twice, 0), metric(weighted, 0), strict=True):
            assert a.value == pytest.approx(b.value, abs=1e-12), a.metric
