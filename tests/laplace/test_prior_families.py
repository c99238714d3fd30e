"""Families of prior precisions (one a weight, the g-prior) and regression noise by evidence, against dense algebra."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from bnn_runner.base import Choice, Network, PrecisionProblem
from bnn_runner.curvature import full
from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature
from bnn_runner.errors import RunFailed
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.fixed_point import FixedPoint
from bnn_runner.hyper.grid import Grid
from bnn_runner.hyper.per_weight import best_precisions
from bnn_runner.laplace.prior_family import family_problems
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_sampled import LaplaceSampled
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.models.mlp import MLP
from bnn_runner.posteriors import io as posterior_store
from bnn_runner.rng import generator
from bnn_runner.tasks import Task
from tests.curvature.test_structures import curvature_of
from tests.laplace.test_identities import (
    Exact,
    dense_curvature,
    dense_jacobian,
    linear_gaussian,
    problem_of,
    small,
)
from tests.problems import context, make_network, make_task

DIAG = Laplace(structure="diag")


def flat(network: Network) -> Tensor:
    return torch.cat([p.flatten() for p in network.parameters.values()])


# ------------------------------------------------------------------------------------ noise by evidence


def moved(exact: Exact) -> Network:
    return replace(exact.network, parameters={n: p + 0.3 for n, p in exact.network.parameters.items()})


def best_by_scipy(exact: Exact) -> tuple[float, float, float]:
    """λ, σ (standardised) and the exact evidence at its maximum, by scipy on log N(y; 0, ΦΦᵀ/λ + σ²I)."""
    phi = exact.features(exact.task.train.inputs).numpy()
    values, vectors = np.linalg.eigh(phi @ phi.T)
    y = exact.task.train.targets
    assert y is not None
    rotated = (vectors.T @ y.numpy()[:, 0]) ** 2

    def loss(logs: np.ndarray) -> tuple[float, np.ndarray]:
        lam, noise = np.exp(logs[0]), np.exp(2 * logs[1])
        variances = values.clip(0) / lam + noise
        value = 0.5 * float((np.log(2 * math.pi * variances) + rotated / variances).sum())
        slope = 0.5 * (1 / variances - rotated / variances**2)
        return value, np.array([-(slope * values / lam).sum(), (slope * 2 * noise).sum()])

    found = minimize(loss, np.zeros(2), jac=True, method="BFGS", options={"gtol": 1e-9})
    shift = len(phi) * math.log(float(exact.task.target_scale))
    return math.exp(found.x[0]), math.exp(found.x[1]), -float(found.fun) - shift


@pytest.mark.parametrize("rule", [Evidence(noise="evidence"), FixedPoint(noise="evidence", steps=2000, tolerance=1e-9)])
@pytest.mark.parametrize("side", ["primal", "dual"])
def test_noise_and_precision_are_those_of_the_exact_evidence(
    rule: Any, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bugs: NK without K, γ in the residual's place, σ for σ², ½ log β left out, the curvature not scaled."""
    monkeypatch.setattr(full, "side", lambda *_: side)
    exact = linear_gaussian()
    precision, sigma, evidence = best_by_scipy(exact)
    posterior = Laplace(structure="full", mode="tangent").fit(exact.task, [moved(exact)], context(rule))
    report = posterior.report.facts
    assert report["hyper_status"] == "converged"
    assert report["evidence_nats"] == pytest.approx(evidence, rel=1e-9)
    assert report["prior_precision"] == pytest.approx(precision, rel=1e-5)
    assert report["noise_sigma"][0] == pytest.approx(sigma * float(exact.task.target_scale), rel=1e-5)
    assert report["noise_sigma_trained"][0] == pytest.approx(0.6 * float(exact.task.target_scale))
    at = replace(exact, precision=report["prior_precision"], sigma=report["noise_sigma"][0] / exact.task.target_scale)
    assert at.evidence() == pytest.approx(report["evidence_nats"], rel=1e-9)
    _, covariance = at.predictive(exact.task.test.inputs)
    torch.testing.assert_close(posterior.joint_covariance(exact.task.test), covariance, rtol=1e-8, atol=1e-11)
    assert isinstance(posterior.likelihood, Gaussian)
    assert float(posterior.likelihood.log_noise.exp()) == pytest.approx(float(at.sigma), rel=1e-12)
    assert posterior.draws(2, 0).likelihood is posterior.likelihood
    assert report["newton_decrement_nats"] > 1e-3 and report["effective_dimension"] < 5
    assert any("nats less likely" in note for note in posterior.report.notes), "the network's own outputs misfit more"


@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
@pytest.mark.parametrize("family", ["isotropic", "layerwise"])
def test_at_the_trained_weights_no_noise_and_precision_near_by_are_better(structure: Any, family: Any) -> None:
    """Two outputs of unequal noise. By another route: the evidence of a network with that noise and precision given.
    Planted bugs: noise of one output alone; a factor of σ where its square is meant."""
    task, network = small("regression", num_train=40)
    method = Laplace(structure=structure)
    found = method.fit(task, [network], context(Evidence(family=family, noise="evidence"))).report.facts
    assert found["hyper_status"] == "converged" and found["hyper_gradient"] < 1e-3
    sigma = torch.tensor(found["noise_sigma"]).double() / task.target_scale
    names = problem_of(method, task, network).names
    chosen = found.get("prior_precisions") or dict.fromkeys(names, found["prior_precision"])

    def evidence(logs: Tensor) -> float:
        prior = {n: float(v * math.exp(float(logs[0]))) for n, v in chosen.items()}
        noisy = replace(network, likelihood=Gaussian(sigma.log() + logs[1]), prior_precision=prior)
        return float(method.fit(task, [noisy], context(Fixed())).report.facts["evidence_nats"])

    here = evidence(torch.zeros(2))
    assert here == pytest.approx(found["evidence_nats"], rel=1e-9)
    step = 1e-3
    for axis in torch.eye(2):
        up, down = evidence(step * axis), evidence(-step * axis)
        assert abs(up - down) / (2 * step) < 1e-2 and max(up, down) < here
    ratios = sigma / network.likelihood.log_noise.exp()  # type: ignore[attr-defined]
    assert float(ratios[0]) == pytest.approx(float(ratios[1])) and abs(float(ratios[0]) - 1) > 0.05
    settled = method.fit(task, [network], context(FixedPoint(family=family, noise="evidence", steps=2000)))
    assert settled.report.facts["evidence_nats"] == pytest.approx(found["evidence_nats"], abs=1e-6)


@pytest.mark.parametrize("num_train", [15, 90])
def test_a_network_in_float32_comes_to_the_same(num_train: int) -> None:
    """As every run trains it. Planted bug: a noise of float32 that meets the float64 of the tangent model."""
    task, network = small("regression", num_train=num_train)
    narrow = replace(
        network,
        module=copy.deepcopy(network.module).float(),
        parameters={n: p.float() for n, p in network.parameters.items()},
        likelihood=Gaussian(network.likelihood.log_noise.float()),  # type: ignore[attr-defined]
    )
    train, x = task.train, task.train.inputs.float()
    short = replace(task, train=replace(train, inputs=x, targets=train.targets.float()))  # type: ignore[union-attr]
    method, rule = Laplace(structure="full", mode="tangent", tangent_tolerance=1e-5), Evidence(noise="evidence")
    wide, found = (method.fit(t, [n], context(rule)).report.facts for t, n in ((task, network), (short, narrow)))
    assert found["evidence_nats"] == pytest.approx(wide["evidence_nats"], abs=1e-2)
    assert found["noise_sigma"] == pytest.approx(wide["noise_sigma"], rel=1e-3)


def test_the_gradient_with_the_noise_is_that_of_finite_differences() -> None:
    task, network = small("regression", num_train=25)
    problem = problem_of(Laplace(structure="full"), task, network, Evidence(family="layerwise", noise="evidence"))
    logs = problem.start.log().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: problem.evidence(t.exp()), (logs,), eps=1e-5, rtol=1e-6, atol=1e-7)
    (gradient,) = torch.autograd.grad(problem.evidence(logs.exp()), logs)
    terms = problem.effective_dimensions(problem.start) - problem.start * problem.squares(problem.start)
    torch.testing.assert_close(gradient, 0.5 * terms, rtol=1e-8, atol=1e-9)


# ------------------------------------------------------------------------------- one precision a weight


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("rule", [Evidence, FixedPoint])
def test_each_weight_has_its_best_precision(rule: Any, kind: str) -> None:
    """Where the derivative of the evidence in every log λ_j is zero. Planted bugs: the other root; h for √h."""
    task, network = small(kind, num_train=30)
    problem = problem_of(DIAG, task, network)
    choice = rule(family="parameter").choose(problem)
    assert choice.status == "converged" and choice.facts["hyper_gradient"] < 1e-9
    logs = choice.precisions.log().requires_grad_()
    (gradient,) = torch.autograd.grad(problem.evidence(logs.exp()), logs)
    assert float(gradient.abs().max()) < 1e-9
    curvature = dense_curvature(task, network).diagonal()
    expected = 0.5 * (choice.precisions * flat(network).square() + torch.log1p(curvature / choice.precisions)).sum()
    posterior = DIAG.fit(task, [network], context(rule(family="parameter")))
    assert posterior.report.facts["evidence_nats"] == pytest.approx(
        posterior.report.facts["train_loglik_nats"] - float(expected), rel=1e-9
    )
    layers = DIAG.fit(task, [network], context(Evidence(family="layerwise")))
    assert posterior.report.facts["evidence_nats"] > layers.report.facts["evidence_nats"] + 1
    rows = dense_jacobian(network, task.test.inputs)
    covariance = rows @ torch.diag(1 / (curvature + choice.precisions)) @ rows.T
    torch.testing.assert_close(posterior.joint_covariance(task.test), covariance, rtol=1e-8, atol=1e-11)
    draws = posterior.draws(4000, 0)(task.test.inputs).flatten(1)
    error = covariance.diagonal() * math.sqrt(2 / 4000)
    assert float(((draws.var(0) - covariance.diagonal()) / error).abs().max()) < 5
    quartiles = posterior.report.facts["prior_precision_quartiles"]
    assert quartiles[0] == float(choice.precisions.min()) and quartiles == sorted(quartiles)


def test_weights_and_their_precisions_settle_together() -> None:
    """mode=tangent: v* depends on Λ, and what is not needed is pruned (Tipping 2001). Planted bug: squares of w*."""
    task, network = small("regression", num_train=20)
    method = Laplace(structure="diag", weights="last_layer", mode="tangent", tangent_passes=20_000)
    rule = FixedPoint(family="parameter", tolerance=1e-4, steps=500)
    report = method.fit(task, [network], context(rule)).report.facts
    assert report["hyper_status"] in ("converged", "at bound") and report["tangent_settled"]
    assert report["hyper_gradient"] < 1e-3 and report["precisions_kept"] < 10
    at_network = replace(method, mode="network").fit(task, [network], context(rule)).report.facts
    assert report["evidence_nats"] > at_network["evidence_nats"] + 1


def test_weights_without_curvature_or_value_keep_their_precision_and_are_counted() -> None:
    """Planted bugs: NaN of 0/0 in the row; a status of converged."""
    task, network = small("regression")
    weights = network.parameters["hidden.0.weight"].clone()
    weights[:, 0] = 0
    network = replace(network, parameters=network.parameters | {"hidden.0.weight": weights})
    inputs = task.train.inputs.clone()
    inputs[:, :2] = 0  # a pixel that never varies, and one that never varies and has no weight
    dead = replace(task, train=replace(task.train, inputs=inputs))
    posterior = DIAG.fit(dead, [network], context(Evidence(family="parameter")))
    assert posterior.report.facts["hyper_status"] == "at bound"
    assert posterior.report.facts["precisions_kept"] == 10
    assert any("10 of" in note and "start value" in note for note in posterior.report.notes)
    lam = posterior.gaussian.precisions[0]
    assert torch.equal(lam.reshape(5, 3)[:, :2], torch.full((5, 2), 0.7, dtype=torch.float64))
    assert math.isfinite(posterior.report.facts["evidence_nats"])


def test_the_best_precision_survives_extreme_curvature() -> None:
    h = torch.tensor([1e-12, 1e12, 1.0, 0.0, 1.0]).double()
    w2 = torch.tensor([1.0, 1e-3, 1e-8, 1.0, 0.0]).double()
    found = best_precisions(h, w2)
    torch.testing.assert_close(h[:3] / (h[:3] + found[:3]), found[:3] * w2[:3], rtol=1e-10, atol=0)
    assert float(found[3]) == 0 and math.isinf(float(found[4]))


# ------------------------------------------------------------------------------------------- g-prior


def kron_diagonal(task: Task, network: Network) -> Tensor:
    """The diagonal of KFAC's curvature, by its own posterior's covariance."""
    return curvature_of(Laplace(structure="kfac").fit(task, [network], context(Fixed(0.5))), network, 0.5).diagonal()


@pytest.mark.parametrize(
    ("structure", "side"), [("full", "primal"), ("full", "dual"), ("block", "primal"), ("kfac", ""), ("diag", "")]
)
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_g_prior_is_the_dense_one(structure: Any, side: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Λ = λ diag(H)/N. Planted bugs: the sum in place of the mean, D for D², another tensor's columns, the penalty
    of the plain weights."""
    if side:
        monkeypatch.setattr(full, "side", lambda *_: side)
    task, network = small(kind, num_train=25)
    plain = Laplace(structure=structure)
    curvature = curvature_of(plain.fit(task, [network], context(Fixed(0.5))), network, 0.5)
    posterior = plain.fit(task, [network], context(Fixed(2.5, family="g")))
    prior = 2.5 * curvature.diagonal() / len(task.train)
    covariance = torch.linalg.inv(curvature + torch.diag(prior))
    rows = dense_jacobian(network, task.test.inputs)
    torch.testing.assert_close(posterior.joint_covariance(task.test), rows @ covariance @ rows.T, rtol=1e-6, atol=1e-8)
    moments = posterior.moments(task.test.inputs).covariance
    whole = (rows @ covariance @ rows.T).reshape(*[len(moments), task.spec.num_outputs] * 2)
    each = torch.stack([whole[i, :, i] for i in range(len(moments))])
    torch.testing.assert_close(moments, each, rtol=1e-6, atol=1e-8)
    penalty = (prior * flat(network).square()).sum() + torch.logdet(curvature + torch.diag(prior)) - prior.log().sum()
    expected = posterior.report.facts["train_loglik_nats"] - 0.5 * float(penalty)
    assert posterior.report.facts["evidence_nats"] == pytest.approx(expected, rel=1e-7)
    assert (
        posterior.report.facts["prior_precision"] == 2.5 and posterior.report.facts["held_for_want_of_curvature"] == 0
    )
    draws = posterior.draws(4000, 0)(task.test.inputs).flatten(1)
    variances = (rows @ covariance @ rows.T).diagonal()
    assert float(((draws.var(0) - variances) / (variances * math.sqrt(2 / 4000))).abs().max()) < 5
    vectors = torch.randn(3, len(prior), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(posterior.gaussian.product(vectors), vectors @ covariance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["network", "tangent"])
def test_the_g_prior_does_not_see_how_a_network_is_scaled(mode: Any) -> None:
    """A ReLU layer × 4 and the next ÷ 4 are the same function: evidence, λ and predictions stay, and isotropic ones do
    not. Planted bug: the scale of the curvature left out of the penalty."""
    task = make_task("regression", (3,), 2, num_train=30)
    network = make_network(MLP(hidden=(6,), activation="relu"), task)
    factors = {"hidden.0.weight": 4.0, "hidden.0.bias": 4.0, "out.weight": 0.25, "out.bias": 1.0}
    scaled = replace(network, parameters={n: factors[n] * p for n, p in network.parameters.items()})
    torch.testing.assert_close(scaled(task.test.inputs), network(task.test.inputs))
    method = Laplace(structure="full", mode=mode)
    for rule in (Evidence(family="g"), FixedPoint(family="g", noise="evidence")):
        one, other = (method.fit(task, [n], context(rule)) for n in (network, scaled))
        assert one.report.facts["hyper_status"] == "converged"
        assert other.report.facts["evidence_nats"] == pytest.approx(one.report.facts["evidence_nats"], rel=1e-6)
        assert other.report.facts["prior_precision"] == pytest.approx(one.report.facts["prior_precision"], rel=1e-4)
        x = task.test.inputs
        torch.testing.assert_close(one.moments(x).covariance, other.moments(x).covariance, rtol=1e-3, atol=1e-9)
    plain = [method.fit(task, [n], context(Evidence())).report.facts["evidence_nats"] for n in (network, scaled)]
    assert abs(plain[0] - plain[1]) > 1


@pytest.mark.parametrize("structure", ["full", "block", "kfac", "diag"])
def test_weights_without_curvature_are_held(structure: Any) -> None:
    """Planted bug: prior standard deviations of 10⁶ for pixels that never vary (METHODS), or NaN."""
    task, network = small("classification")
    inputs = task.train.inputs.clone()
    inputs[:, 1] = 0
    dead = replace(task, train=replace(task.train, inputs=inputs))
    posterior = Laplace(structure=structure).fit(dead, [network], context(Evidence(family="g")))
    assert posterior.report.facts["held_for_want_of_curvature"] == 5
    assert math.isfinite(posterior.report.facts["evidence_nats"]) and math.isfinite(
        posterior.report.facts["newton_decrement_nats"]
    )
    x = task.test.inputs.clone()
    x[:, 1] += 1000.0  # along the dead pixel nothing is uncertain but what the other weights make of it
    assert float(posterior.gaussian.sample(0, 0, 3).reshape(3, -1)[:, :15].reshape(3, 5, 3)[..., 1].abs().max()) == 0
    assert bool(torch.isfinite(posterior.moments(x).covariance).all())
    isotropic = Laplace(structure=structure).fit(dead, [network], context(Evidence()))
    assert float(isotropic.gaussian.sample(0, 0, 3)[:, :15].reshape(3, 5, 3)[..., 1].abs().min()) > 0


def test_the_grid_and_the_fixed_rule_take_the_g_prior() -> None:
    task, network = small("classification", num_train=30)
    unit = Laplace(structure="full").fit(task, [network], context(Fixed(family="g")))
    assert unit.report.facts["prior_precision"] == 1.0 and unit.report.facts["hyper_family"] == "g"
    grid = Laplace(structure="full").fit(task, [network], context(Grid(family="g", low=1e-2, high=1e2, num=9)))
    at_best = Laplace(structure="full").fit(
        task, [network], context(Fixed(grid.report.facts["prior_precision"], family="g"))
    )
    x = task.test.inputs
    torch.testing.assert_close(grid.moments(x).covariance, at_best.moments(x).covariance)
    assert grid.report.facts["evidence_nats"] != pytest.approx(unit.report.facts["evidence_nats"])


def test_families_are_refused_where_they_have_no_spectrum() -> None:
    spec = make_task("classification", (3,), 3).spec
    assert "method.structure=diag" in family_problems("kfac", "ggn", spec, Evidence(family="parameter"))[0]
    assert "eigenbasis" in family_problems("ekfac", "ggn", spec, Evidence(family="g"))[0]
    assert "classes" in family_problems("full", "ggn", spec, Evidence(noise="evidence"))[0]
    regression = make_task("regression", (3,), 1).spec
    assert "empirical" in family_problems("full", "empirical_fisher", regression, FixedPoint(noise="evidence"))[0]
    assert family_problems("diag", "ggn", regression, Evidence(family="parameter", noise="evidence")) == []
    task, network = small("classification", num_train=20)
    with pytest.raises(RunFailed, match=r"ekfac does not support hyper\.family=g"):
        Laplace(structure="ekfac").fit(task, [network], context(Evidence(family="g")))


def test_sampled_curvature_under_the_g_prior_is_the_full_one() -> None:
    """Planted bugs: draws of the scaled weights taken for the weights; the spectrum of H in place of D H D."""
    task, network = small("classification", num_train=25)
    whole = Laplace(structure="full").fit(task, [network], context(Fixed(0.3, family="g")))
    sampled = LaplaceSampled(tolerance=1e-6, samples=16, probes=32).fit(
        task, [network], context(Fixed(0.3, family="g"))
    )
    vectors = torch.randn(3, network.num_parameters, generator=generator(0, "vectors"), dtype=torch.float64)
    exact = whole.gaussian.product(vectors)
    near = 1e-4 * float(exact.abs().max())
    torch.testing.assert_close(sampled.gaussian.product(vectors), exact, rtol=1e-3, atol=near)
    report = sampled.report.facts
    assert report["evidence_status"] == "exact"
    assert report["evidence_nats"] == pytest.approx(whole.report.facts["evidence_nats"], abs=1e-9)
    draws = sampled.draws(400, 0)(task.test.inputs).flatten(1)
    variances = whole.joint_covariance(task.test).diagonal()
    assert float(((draws.var(0) - variances) / (variances * math.sqrt(2 / 400))).abs().max()) < 5
    tuned = LaplaceSampled(samples=64, probes=32).fit(task, [network], context(FixedPoint(family="g"))).report.facts
    best = Laplace(structure="full").fit(task, [network], context(FixedPoint(family="g"))).report.facts
    assert math.log(tuned["prior_precision"] / best["prior_precision"]) == pytest.approx(0, abs=0.3)


def test_probes_of_the_diagonal_have_the_exact_one_as_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """One probe, 100 seeds, 5 standard errors. Planted bugs: columns summed before they are signed; mean for sum."""
    task, network = small("classification", num_train=20)
    monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 0)
    made = torch.stack(
        [
            GGNOperator.of(task, Jacobians(network), OutputCurvature(), lambda *_: None).diagonal(1, s)
            for s in range(100)
        ]
    )
    exact = dense_curvature(task, network).diagonal()
    error = made.std(0) / math.sqrt(len(made))
    assert float(((made.mean(0) - exact) / error.clamp_min(1e-12)).abs().max()) < 5
    all_columns = GGNOperator.of(task, Jacobians(network), OutputCurvature(), lambda *_: None).diagonal(2, 0)
    torch.testing.assert_close(all_columns, exact, rtol=1e-9, atol=1e-12)


# ----------------------------------------------------------------------------- searches that go wrong


def synthetic(evidence: Any, dimensions: Any = None, squares: float = 1.0) -> PrecisionProblem:
    """Two groups; the evidence and γ are given functions of the precisions."""
    start = torch.tensor([0.5, 2.0], dtype=torch.float64)
    return PrecisionProblem(
        names=("a", "b"),
        start=start,
        evidence=evidence,
        validation=lambda candidates, scores, points: [
            {score: torch.full((1, 3), math.nan, dtype=torch.float64) for score in scores} for _ in candidates
        ],
        effective_dimensions=dimensions or (lambda p: torch.ones(2, dtype=torch.float64)),
        squares=lambda p: torch.full((2,), squares, dtype=torch.float64),
        sizes=(3, 4),
        diagonal=torch.ones(7, dtype=torch.float64),
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_search_that_meets_what_is_not_finite_says_so_and_keeps_its_start(value: float) -> None:
    """Planted bug: NaN compared with a tolerance, so that the loop ends as converged."""
    broken = synthetic(lambda p: value * p.sum(), lambda p: torch.full((2,), math.nan, dtype=torch.float64), value)
    for rule in (
        Evidence(family="layerwise"),
        FixedPoint(family="layerwise"),
        Evidence(family="parameter"),
        FixedPoint(family="parameter"),
    ):
        choice = rule.choose(broken)
        assert choice.status == "diverged"
        kept = broken.start if len(choice.precisions) == 2 else broken.start.repeat_interleave(torch.tensor([3, 4]))
        torch.testing.assert_close(choice.precisions, kept)
        assert "start value" in choice.notes[0] and "hyper_iterations" in choice.facts
    failed = Grid().choose(broken)
    assert failed.status == "failed" and failed.facts["grid_not_finite"] == 9
    assert torch.equal(failed.precisions, broken.start) and "training prior is kept" in failed.notes[0]


def test_a_value_that_is_not_finite_on_the_way_is_stepped_around() -> None:
    """The evidence is undefined above λ = 8 and best at 4: the search shortens its step and finds it."""
    choice = Evidence().choose(synthetic(lambda p: -(p.log() - math.log(4)).square().sum() + 0 * (8 - p).log().sum()))
    assert choice.status == "converged"
    torch.testing.assert_close(choice.precisions, torch.full((2,), 4.0, dtype=torch.float64), rtol=1e-4, atol=0)


def test_several_precisions_are_searched_from_the_best_single_one() -> None:
    """A narrow summit of 0 nats at the start values, and one of 20 where all are e⁴. Planted bug: a search from the
    training prior, which ends below what one precision for all reaches."""

    def evidence(p: torch.Tensor) -> torch.Tensor:
        near = -50 * (p.log() - torch.tensor([-0.69, 0.69], dtype=torch.float64)).square().sum()
        far = 20 - 2 * (p.log() - torch.tensor([4.0, 4.2], dtype=torch.float64)).square().sum()
        return torch.logaddexp(near, far)

    choice = Evidence(family="layerwise").choose(synthetic(evidence))
    assert choice.status == "converged"
    torch.testing.assert_close(choice.precisions.log(), torch.tensor([4.0, 4.2], dtype=torch.float64))


@pytest.mark.parametrize("rule", [Evidence(low=1e-3, high=1e3), FixedPoint(low=1e-3, high=1e3)])
@pytest.mark.parametrize("upwards", [True, False])
def test_a_search_that_runs_to_a_bound_says_so_and_keeps_its_start(rule: Any, upwards: bool) -> None:
    """Planted bug: the bound itself taken for the optimum."""
    sign = 1 if upwards else -1
    away = synthetic(lambda p: sign * p.log().sum(), lambda p: 2.0**sign * p, 1.0)
    choice = rule.choose(away)
    assert choice.status == "at bound" and "start value" in choice.notes[0]
    assert float(choice.precisions[0]) == pytest.approx(1.0)  # the one variable starts at the geometric mean
    assert {"hyper_iterations", "hyper_gradient"} <= set(choice.facts)


@pytest.mark.parametrize("rule", [Evidence(steps=1), FixedPoint(steps=1)])
def test_a_search_that_is_cut_short_says_so(rule: Any) -> None:
    short = synthetic(lambda p: -0.5 * (50 * p - p.log()).sum(), lambda p: 1 / (1 + p), 50.0)
    choice = rule.choose(short)
    assert choice.status == "not converged" and "raise hyper.steps" in choice.notes[-1]
    assert choice.facts["hyper_gradient"] > 1e-2 and choice.facts["hyper_iterations"] == 1


def test_a_search_over_the_noise_that_diverges_keeps_the_noise_too() -> None:
    """Planted bug: a noise of NaN, or one chosen for precisions that were not."""
    task, network = small("regression", num_train=20)

    @dataclass(frozen=True)
    class Lost:
        noise: str = "evidence"
        family: str = "isotropic"
        needs_validation: ClassVar[bool] = False

        def choose(self, problem: PrecisionProblem) -> Choice:
            return Choice(problem.start, "diverged", notes=("lost",))

    lost = Laplace(structure="full").fit(task, [network], context(Lost())).report.facts
    fixed = Laplace(structure="full").fit(task, [network], context(Fixed())).report.facts
    assert lost["noise_sigma"] == lost["noise_sigma_trained"] and lost["prior_precision"] == fixed["prior_precision"]
    assert lost["evidence_nats"] == pytest.approx(fixed["evidence_nats"], rel=1e-12)


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        (Laplace(structure="full"), Evidence(family="g", noise="evidence")),
        (Laplace(structure="kfac"), Evidence(family="g")),
        (DIAG, Evidence(family="g", noise="evidence")),
        (DIAG, Evidence(family="parameter", noise="evidence")),
    ],
)
def test_posteriors_of_every_family_come_back_from_disk(method: Laplace, rule: Evidence, tmp_path: Path) -> None:
    task, network = small("regression", num_train=20)
    posterior = method.fit(task, [network], context(rule))
    posterior_store.save(posterior, tmp_path, {"run": "a"})
    loaded: Any = posterior_store.load(tmp_path, {"run": "a"}, network.module, torch.device("cpu"))
    x = task.test.inputs
    assert torch.equal(posterior.draws(3, 0)(x), loaded.draws(3, 0)(x))
    assert torch.equal(posterior.moments(x).covariance, loaded.moments(x).covariance)
    assert torch.equal(posterior.likelihood.log_noise, loaded.likelihood.log_noise)  # type: ignore[attr-defined]
