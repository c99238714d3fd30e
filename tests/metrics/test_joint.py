"""Marginal, joint and dyadic log-likelihoods against identities, loops and exact Gaussians."""

import math
from dataclasses import replace

import pytest
import torch

from bnn_runner.errors import UserError
from bnn_runner.metrics.blocks import Blocks, group_sums, permutations
from bnn_runner.metrics.dyadic import Dyadic
from bnn_runner.metrics.gaussian_blocks import block_values
from bnn_runner.metrics.joint import Joint
from bnn_runner.metrics.marginal import Marginal
from bnn_runner.rng import generator
from bnn_runner.scoring import Evaluation, GaussianJoint, SplitEvaluation


def evaluation_of(loglik, *, log_weights=None, finite=True, ids=None, **fields):
    """An Evaluation that knows nothing but its test log-likelihoods [S, N]."""
    num_draws, num_points = loglik.shape
    ids = torch.arange(num_points) if ids is None else ids
    split = SplitEvaluation(ids=ids, loglik=loglik, targets=torch.zeros(num_points, dtype=torch.int64))
    log_weights = torch.zeros(num_draws, dtype=torch.float64) if log_weights is None else log_weights
    values = {"kind": "classification", "predictive": "draws", "finite": finite, "has_joint": True} | fields
    return Evaluation(log_weights=log_weights, splits={"test": split}, **values)


def random_loglik(num_draws, num_points, seed=0, scale=1.0):
    noise = torch.randn(num_draws, num_points, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return -(noise * scale).exp()


def joint(taus, repeats=3):
    return Joint(taus=taus, repeats=repeats, tolerance=0.002)


def dyadic(kappas=(2,), repeats=3, variant="uniform"):
    return Dyadic(kappas=kappas, labels=10, repeats=repeats, variant=variant, tolerance=0.002)


def only(scores, **fields):
    (score,) = [s for s in scores if all(getattr(s, k) == v for k, v in fields.items())]
    return score


def test_one_draw_gives_tau_times_the_marginal():
    evaluation = evaluation_of(random_loglik(1, 60))
    marginal = Marginal()(evaluation, 0)[0].value
    for tau in (1, 2, 3, 5, 10):  # 60 is a multiple of each, so no point is left out
        assert only(joint([tau])(evaluation, 0), tau=tau).value == pytest.approx(tau * marginal, abs=1e-12)


def test_joint_at_tau_one_is_the_marginal():
    evaluation = evaluation_of(random_loglik(7, 41))
    marginal, score = Marginal()(evaluation, 0)[0], joint([1])(evaluation, 0)[0]
    assert score.value == pytest.approx(marginal.value, abs=1e-12)
    assert score.standard_error == pytest.approx(marginal.standard_error, abs=1e-12)
    assert dyadic((1,))(evaluation, 0)[0].value == pytest.approx(marginal.value, abs=1e-12)


def test_two_opposed_members_score_below_tau_times_their_marginal():
    # Two members, each sure (0.9) of one of two points and 0.1 on the other, swapped between members.
    # Marginal: log((0.9 + 0.1) / 2) = log 0.5 at both points, twice that is -1.386.
    # Joint: log((0.9 * 0.1 + 0.1 * 0.9) / 2) = log 0.09 = -2.408.
    loglik = torch.tensor([[0.9, 0.1], [0.1, 0.9]], dtype=torch.float64).log()
    evaluation = evaluation_of(loglik)
    assert 2 * Marginal()(evaluation, 0)[0].value == pytest.approx(-1.386, abs=1e-3)
    assert joint([2])(evaluation, 0)[0].value == pytest.approx(-2.408, abs=1e-3)


@pytest.mark.parametrize("metric", [joint([1, 2, 4]), dyadic((1, 2, 3))], ids=["joint", "dyadic"])
def test_a_draw_twice_is_a_draw_of_double_weight(metric):
    loglik = random_loglik(3, 20)
    twice = evaluation_of(torch.cat([loglik, loglik[:1]]))
    weighted = evaluation_of(loglik, log_weights=torch.tensor([2.0, 1.0, 1.0]).double().log() + 5.0)
    for a, b in zip(metric(twice, 0), metric(weighted, 0), strict=True):
        assert a.value == pytest.approx(b.value, abs=1e-12)
    assert Marginal()(twice, 0)[0].value == pytest.approx(Marginal()(weighted, 0)[0].value, abs=1e-12)


def test_joint_against_a_loop():
    loglik, weights = random_loglik(4, 11), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    ids = torch.tensor([5, 3, 8, 1, 0, 9, 12, 4, 30, 22, 7])
    score = joint([3], repeats=2)(evaluation_of(loglik, log_weights=weights.log(), ids=ids), 17)[0]
    per_repeat = []
    for repeat in range(2):
        order = sorted(range(11), key=lambda i: int(ids[i]))
        permutation = torch.randperm(11, generator=generator(17, "eval", "joint", 11, repeat)).tolist()
        order = [order[i] for i in permutation]
        blocks = [order[0:3], order[3:6], order[6:9]]
        per_repeat.append(
            [
                math.log(sum(float(weights[s]) * math.prod(math.exp(loglik[s, i]) for i in b) for s in range(4)))
                for b in blocks
            ]
        )
    values = torch.tensor(per_repeat)
    assert score.value == pytest.approx(float(values.mean()), abs=1e-5)
    assert score.standard_error == pytest.approx(math.sqrt(float(values.var(1).mean()) / 3), abs=1e-5)
    assert score.n == 3 and "2 points left over" in score.note


@pytest.mark.parametrize("variant", ["uniform", "forced"])
def test_dyadic_against_a_loop(variant):
    loglik = random_loglik(4, 9)
    score = dyadic((2,), repeats=2, variant=variant)(evaluation_of(loglik), 3)[0]
    assert score.metric == {"uniform": "dyadic_loglik", "forced": "dyadic_forced_loglik"}[variant]
    total = []
    for repeat, order in enumerate(permutations(torch.arange(9), 2, 3, "dyadic")):
        stream = generator(3, "eval", "dyadic", variant, 9, 2, 10, repeat)
        if variant == "forced":
            firsts = torch.randint(1, 9, (4, 1), generator=stream)[:, 0].tolist()
            labels = [[0] * n + [1] * (10 - n) for n in firsts]
        else:
            labels = torch.randint(2, (4, 10), generator=stream).tolist()
        for block in range(4):
            anchors = order[2 * block : 2 * block + 2].tolist()
            terms = [math.prod(math.exp(loglik[s, anchors[j]]) for j in labels[block]) for s in range(4)]
            total.append(math.log(sum(terms) / 4))
    assert score.value == pytest.approx(sum(total) / len(total), abs=1e-9)
    assert (score.tau, score.kappa, score.n) == (10, 2, 4)


def test_repeats_of_dyadic_blocks():
    metric = dyadic()
    for kappa, tau in ((2, 10), (5, 40)):
        counts = metric._counts(2000, kappa, tau, torch.Generator().manual_seed(0))
        assert (counts.sum(1) == tau).all()
        # a count is binomial(tau, 1/kappa): compare mean and variance at 5 standard errors
        assert abs(float(counts[:, 0].double().mean()) - tau / kappa) < 5 * math.sqrt(tau / kappa / 2000)
        assert float(counts[:, 0].double().var()) == pytest.approx(tau / kappa * (1 - 1 / kappa), rel=0.2)
    forced = dyadic(variant="forced")._counts(2000, 2, 10, torch.Generator().manual_seed(0))
    assert set(forced[:, 0].tolist()) == set(range(1, 9)) and (forced.sum(1) == 10).all()


def test_one_draw_dyadic_is_near_tau_times_the_marginal():
    # Equal up to the sampling of repeats: five standard errors.
    evaluation = evaluation_of(random_loglik(1, 3000))
    marginal = Marginal()(evaluation, 0)[0].value
    for score in dyadic((2, 3, 4, 5))(evaluation, 0):
        assert abs(score.value - score.tau * marginal) < 5 * score.standard_error


def test_joint_does_not_depend_on_the_order_of_the_test_set():
    # With distinct ids the same points meet in a block; only the ids say which points they are.
    loglik, ids = random_loglik(5, 24), torch.arange(24) * 3
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    a = evaluation_of(loglik, ids=ids)
    b = evaluation_of(loglik[:, order], ids=ids[order])
    for metric in (joint([2, 5]), dyadic((2, 3))):
        for x, y in zip(metric(a, 4), metric(b, 4), strict=True):
            assert x.value == pytest.approx(y.value, abs=1e-12)
    assert joint([5])(a, 4)[0].value != joint([5])(a, 5)[0].value  # the seed does matter


def test_randomness_per_point_shows_in_the_joint_and_not_in_the_marginal():
    # Draws that agree over points (a common shift) against the same numbers shuffled within each point.
    shift = torch.randn(400, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    loglik = (-1.0 + 1.0 * shift).expand(400, 200) - 0.5
    stream = torch.Generator().manual_seed(1)
    shuffled = torch.stack([column[torch.randperm(400, generator=stream)] for column in loglik.T], 1)
    good, bad = evaluation_of(loglik), evaluation_of(shuffled)
    assert Marginal()(good, 0)[0].value == pytest.approx(Marginal()(bad, 0)[0].value, abs=1e-12)
    assert joint([10])(good, 0)[0].value - joint([10])(bad, 0)[0].value > 5


def test_underflow_gives_finite_scores():
    loglik = torch.full((3, 12), -1e5, dtype=torch.float64)
    evaluation = evaluation_of(loglik)
    for metric in (Marginal(), joint([1, 10]), dyadic((2, 5))):
        assert all(math.isfinite(score.value) for score in metric(evaluation, 0))


def test_an_impossible_label_counts_only_where_it_is_drawn():
    loglik = random_loglik(2, 400)
    loglik[:, 0] = -math.inf
    score = dyadic((5,), repeats=1)(evaluation_of(loglik), 0)[0]
    assert score.value == -math.inf and "not finite" in score.note  # and not NaN
    blocks = Blocks(torch.tensor([[0, 1]]), torch.tensor([[0, 10]]))
    sums = group_sums(loglik.T.contiguous(), torch.zeros(2).double(), blocks, [0, 2])
    assert math.isfinite(float(sums.totals))


def test_finite_posteriors_are_exact_and_carry_no_convergence():
    scores = joint([2])(evaluation_of(random_loglik(5, 40), finite=True), 0)
    assert [s.metric for s in scores] == ["joint_loglik"] and scores[0].status == "ok"


def test_convergence_rows_and_flags():
    many = evaluation_of(random_loglik(4000, 200, scale=0.1), finite=False)
    scores = joint([2])(many, 0)
    assert scores[0].status == "ok" and scores[0].draws == 4000
    assert [s.draws for s in scores if s.metric == "joint_loglik_at_draws"] == [1000, 2000, 4000]
    assert scores[0].value == only(scores, metric="joint_loglik_at_draws", draws=4000).value
    effective = only(scores, metric="joint_loglik_effective_draws")
    assert 1000 < effective.value <= 4000
    few = evaluation_of(random_loglik(20, 200), finite=False)
    scores = joint([10])(few, 0)
    assert scores[0].status == "not converged" and "effective draws per block" in scores[0].note
    assert only(scores, metric="joint_loglik_effective_draws").value < 5
    tiny = joint([2])(evaluation_of(random_loglik(5, 200), finite=False), 0)
    assert tiny[0].status == "not converged" and "too few" in tiny[0].note


def test_the_value_at_fewer_draws_is_that_of_the_first_draws():
    loglik, weights = random_loglik(32, 30), random_loglik(1, 32, seed=3)[0]
    scores = dyadic((3,))(evaluation_of(loglik, log_weights=weights, finite=False), 0)
    first = dyadic((3,))(evaluation_of(loglik[:8], log_weights=weights[:8], finite=False), 0)[0]
    assert only(scores, metric="dyadic_loglik_at_draws", draws=8).value == pytest.approx(first.value, abs=1e-12)


def test_effective_draws_by_hand():
    # Two of 8 draws carry all of a block's likelihood, one three times the other: 1 / (.75^2 + .25^2) = 1.6.
    loglik = torch.full((8, 6), -1000.0, dtype=torch.float64)
    loglik[5], loglik[6] = math.log(0.75), math.log(0.25)
    score = only(joint([1])(evaluation_of(loglik, finite=False), 0), metric="joint_loglik_effective_draws")
    assert score.value == pytest.approx(1.6, abs=1e-12)


def test_closed_forms_without_a_joint_are_not_available():
    evaluation = evaluation_of(random_loglik(1, 30), has_joint=False, predictive="probit", finite=False)
    for score in joint([2])(evaluation, 0) + dyadic((2,))(evaluation, 0):
        assert score.status == "n/a" and math.isnan(score.value) and "no draws" in score.note
    assert joint([31])(evaluation_of(random_loglik(1, 30)), 0)[0].status == "n/a"


def gaussian_process(num_points, num_draws, noise=0.3, seed=0):
    """A small GP predictive: S draws of f at the test points, and its exact joint."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 3, num_points, dtype=torch.float64)
    covariance = 0.5 * torch.exp(-0.5 * (x[:, None] - x[None]) ** 2) + 1e-6 * torch.eye(num_points).double()
    root = torch.linalg.cholesky(covariance)
    mean = torch.sin(x)
    f = mean + torch.randn(num_draws, num_points, generator=stream, dtype=torch.float64) @ root.T
    truth = mean + root @ torch.randn(num_points, generator=stream, dtype=torch.float64)
    y = truth + noise * torch.randn(num_points, generator=stream, dtype=torch.float64)
    loglik = -0.5 * ((y - f) / noise) ** 2 - math.log(noise) - 0.5 * math.log(2 * math.pi)
    split = SplitEvaluation(
        ids=torch.arange(num_points),
        loglik=loglik,
        targets=y[:, None],
        means=f[:, :, None],
        variances=torch.full((1, 1, 1), noise**2, dtype=torch.float64),
    )
    exact = GaussianJoint(mean, covariance + noise**2 * torch.eye(num_points).double())
    zeros = torch.zeros(num_draws, dtype=torch.float64)
    return Evaluation("regression", "draws", False, True, zeros, {"test": split}, gaussian_joint=exact)


def test_exact_gaussian_joint_agrees_with_many_draws():
    evaluation = gaussian_process(24, 40_000)
    cases = [(joint([1, 2, 4]), "joint_loglik"), (dyadic((2,)), "dyadic_loglik")]
    for metric, name in cases:
        scores = metric(evaluation, 0)
        for score in (s for s in scores if s.metric == name):
            by_draws = only(scores, metric=f"{name}_by_draws", tau=score.tau)
            effective = only(scores, metric=f"{name}_by_draws_effective_draws", tau=score.tau)
            # error of a log-mean: sqrt(S/ESS - 1) / sqrt(S) for each block; five of them, all blocks alike
            assert abs(score.value - by_draws.value) < 5 / math.sqrt(effective.value)
            assert score.status == by_draws.status == "ok" and "exact Gaussian" in score.note


def test_few_draws_are_biased_low_and_flagged():
    evaluation = gaussian_process(40, 16)
    scores = dyadic((3,))(evaluation, 0)
    by_draws = only(scores, metric="dyadic_loglik_by_draws")
    assert scores[0].status == "ok" and by_draws.status == "not converged"
    assert by_draws.value < scores[0].value - 0.5


def test_exact_gaussian_joint_of_repeated_points_against_the_definition():
    # One anchor, y seen three times: integrate N(f; m, c) prod N(y; f, s2) over f on a grid.
    y, m, c, s2 = 0.7, 0.2, 0.5, 0.09
    f = torch.linspace(-8, 8, 20001, dtype=torch.float64)
    log_terms = -0.5 * (f - m) ** 2 / c - 0.5 * math.log(2 * math.pi * c)
    log_terms = log_terms + 3 * (-0.5 * (y - f) ** 2 / s2 - 0.5 * math.log(2 * math.pi * s2))
    expected = float(torch.logsumexp(log_terms, 0)) + math.log(float(f[1] - f[0]))
    covariance = torch.tensor([[c + s2, 0.3], [0.3, 1.0]]).double()
    for anchors, counts in (([[0]], [[3]]), ([[0, 1]], [[3, 0]])):
        blocks = Blocks(torch.tensor(anchors), torch.tensor(counts))
        value = block_values(torch.tensor([y - m, 9.0]).double(), covariance, torch.tensor([s2, s2]).double(), blocks)
        assert float(value) == pytest.approx(expected, abs=1e-6)


def test_exact_gaussian_joint_of_repeated_points_against_a_dense_gaussian():
    """Labels written out one by one, tau = 40. Planted bug: the covariance of f with the noise on repeats."""
    joint_, noise = gaussian_process(12, 1).gaussian_joint, 0.09
    residual = torch.randn(12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    counts = dyadic((5,))._counts(2, 5, 40, torch.Generator().manual_seed(2))
    blocks = Blocks(torch.tensor([[0, 3, 5, 8, 11], [1, 2, 4, 6, 9]]), counts)
    values = block_values(residual, joint_.covariance, torch.full((12,), noise, dtype=torch.float64), blocks)
    for value, anchors, times in zip(values, blocks.anchors, counts, strict=True):
        index = torch.repeat_interleave(anchors, times)
        dense = (joint_.covariance - noise * torch.eye(12).double())[index][:, index] + noise * torch.eye(40).double()
        normal = torch.distributions.MultivariateNormal(torch.zeros(40).double(), dense)
        assert float(value) == pytest.approx(float(normal.log_prob(residual[index])), abs=1e-8)


def test_no_exact_joint_of_repeated_points_where_the_noise_differs_between_draws():
    evaluation = gaussian_process(20, 8)
    split = evaluation.test
    noise = split.variances * torch.arange(1, 9).reshape(8, 1, 1)
    evaluation = replace(evaluation, splits={"test": replace(split, variances=noise)})
    score = dyadic()(evaluation, 0)[0]
    assert score.metric == "dyadic_loglik" and score.draws == 8 and "noise differs between draws" in score.note


def test_closed_form_regression_scores_its_exact_joint():
    evaluation = gaussian_process(24, 1)
    variance = evaluation.gaussian_joint.covariance.diagonal()[:, None]
    split = evaluation.test
    split = SplitEvaluation(
        split.ids, split.loglik, split.targets, variances=variance[None], epistemic=variance - 0.09, means=split.means
    )
    closed = Evaluation(
        "regression", "closed_form", False, False, torch.zeros(1), {"test": split}, evaluation.gaussian_joint
    )
    for metric in (joint([4]), dyadic((2,))):
        (score,) = metric(closed, 0)
        assert "exact Gaussian" in score.note and score.status == "ok"
        assert score.value == pytest.approx(only(metric(evaluation, 0), metric=score.metric).value, abs=1e-9)


def test_settings_that_cannot_be_are_told_together():
    with pytest.raises(UserError) as caught:
        Joint(taus=[], repeats=0, tolerance=0.002)
    assert len(caught.value.problems) == 2 and "metric.joint.taus" in caught.value.problems[0]
    with pytest.raises(UserError, match="kappas of at most 2"):
        dyadic((2, 3), variant="forced")
