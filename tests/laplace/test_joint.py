"""Joint log-likelihoods of every structure by draws against its exact Gaussian one, regression, float64.

For a block of labels y let w = p(y | f) with f the draw. E w and E w² are Gaussian integrals, so the error of
log mean_s w_s over S draws is known: its bias is −V/(2S) and its variance V/S, V = E w²/(E w)² − 1, to first order.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

from bnn_runner.base import Network
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.ensemble_laplace import EnsembleLaplace
from bnn_runner.methods.laplace import Laplace
from bnn_runner.metrics.blocks import permutations
from bnn_runner.metrics.dyadic import Dyadic
from bnn_runner.metrics.joint import Joint
from bnn_runner.models.mlp import MLP
from bnn_runner.scoring import Evaluation
from bnn_runner.tasks import Task
from tests.choices import METHODS, make, target
from tests.laplace.test_identities import dense_jacobian
from tests.problems import context, make_network, make_task

S, TAU = 4000, 4


@cache
def problem() -> tuple[Task, Network]:
    """Labels that the network could have made, so that E w² is not far from (E w)²."""
    task = make_task("regression", (3,), 1, num_train=25, num_test=12)
    network = make_network(MLP(hidden=(6,)), task, noise=0.8)
    noise = torch.randn(12, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return replace(task, test=replace(task.test, targets=network(task.test.inputs) + 0.8 * noise)), network


def structures() -> list[str]:
    """Every method of one network's Laplace posterior that predicts by draws of the tangent model."""
    found = []
    for name in METHODS:
        method = make("method", name)
        one = "Laplace" in target("method", name) and len(method.needs()) == 1
        if one and method.predictive == "draws" and getattr(method, "predict", "draws") == "draws":
            found.append(name)
    return found


STRUCTURES = structures()


@cache
def scored(name: str) -> tuple[Any, Evaluation]:
    task, network = problem()
    changes = {"rank": 4} if name == "laplace_low_rank" else {}
    changes |= {"num_weights": 12} if name == "laplace_subnetwork" else {}
    changes |= {"tolerance": 1e-4} if name == "laplace_sampled" else {}
    posterior = make("method", name, **changes).fit(task, [network], context(Fixed(3.0)))
    return posterior, evaluate(task, posterior, "draws", S, 1, 6, 10)


def exact(name: str) -> tuple[Tensor, Tensor]:
    """Mean [N] and covariance [N, N] of f at the test points, original units: J Σ Jᵀ of the dense Jacobian."""
    task, network = problem()
    posterior, evaluation = scored(name)
    scale, x = float(task.target_scale), task.test.inputs
    rows, gaussian = dense_jacobian(network, x), getattr(posterior, "gaussian", None)
    if gaussian is None and evaluation.gaussian_joint is not None:  # in function space
        covariance = posterior.joint_covariance(task.test)
    elif gaussian is None:  # by samples of the whole curvature
        return exact("laplace_full")
    else:
        names = posterior.jacobians.names
        sizes = {n: p.numel() for n, p in network.parameters.items()}
        parts = dict(zip(sizes, rows.split(list(sizes.values()), dim=1), strict=True))
        chosen = posterior.jacobians.chosen
        rows = torch.cat([parts[n][:, chosen[n]] if n in chosen else parts[n] for n in names], 1)
        covariance = rows @ gaussian.product(rows).T
    return scale * network(x)[:, 0], scale**2 * covariance


def sigma() -> float:
    task, network = problem()
    return float(task.target_scale) * float(network.likelihood.log_noise.exp())  # type: ignore[attr-defined]


def log_moments(name: str, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Log E w and V of each block of positions [M, tau], which may name a point several times."""
    mean, covariance = exact(name)
    y = problem()[0].test.targets
    assert y is not None
    y = y[:, 0] * float(problem()[0].target_scale) + float(problem()[0].target_mean)
    tau, noise = blocks.shape[1], sigma() ** 2
    inside, eye = covariance[blocks.unsqueeze(2), blocks.unsqueeze(1)], torch.eye(tau, dtype=torch.float64)
    first = MultivariateNormal(mean[blocks], inside + noise * eye).log_prob(y[blocks])
    second = MultivariateNormal(mean[blocks], inside + noise / 2 * eye).log_prob(y[blocks])
    second = second - tau / 2 * math.log(4 * math.pi * noise)
    return first, torch.expm1(second - 2 * first)


def test_every_structure_is_here() -> None:
    """Planted bug: a glob that finds nothing."""
    wanted = {"full", "block", "kfac", "ekfac", "diag", "low_rank", "last_layer", "last_layer_kfac", "subnetwork"}
    assert {f"laplace_{name}" for name in wanted} <= set(STRUCTURES)


@pytest.mark.parametrize("name", STRUCTURES)
def test_joint_scores_by_draws_are_the_exact_ones(name: str) -> None:
    """Blocks of different points, and dyadic ones. 5 standard errors in addition to the bias of S draws, both from the
    Gaussian integrals. Planted bugs: fresh noise at every point; noise shared by two labels of one point; σ for σ²."""
    _, evaluation = scored(name)
    if evaluation.gaussian_joint is not None:
        mean, covariance = exact(name)
        noisy = covariance + sigma() ** 2 * torch.eye(len(mean), dtype=torch.float64)
        torch.testing.assert_close(evaluation.gaussian_joint.covariance, noisy, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(evaluation.gaussian_joint.mean, mean, rtol=1e-9, atol=1e-9)
    loglik = evaluation.test.loglik
    assert loglik is not None
    random = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(12, generator=random) for _ in range(20)]).reshape(-1, TAU)
    anchors = orders[:, :2].gather(1, torch.randint(2, (len(orders), 10), generator=random))
    for blocks in (orders, anchors):
        log_mean, relative = log_moments(name, blocks)
        assert float(relative.max()) < 0.05 * S, "the first order is to do"
        by_draws = torch.logsumexp(loglik[:, blocks].sum(-1), 0) - math.log(S)
        error = (by_draws - log_mean + relative / (2 * S)) / (relative / S).sqrt()
        assert float(error.abs().max()) < 5
        apart = log_moments(name, blocks.reshape(-1, 1))[0].reshape(blocks.shape).sum(1)
        assert float((apart - log_mean).abs().max()) > 5 * float((relative / S).sqrt().max()), "points share a function"


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_rows_of_joint_and_dyadic_scores(name: str) -> None:
    """Exact where the predictive is a Gaussian, from draws elsewhere. Planted bug: exact rows of other blocks."""
    _, evaluation = scored(name)
    blocks = torch.cat([o.reshape(-1, TAU) for o in permutations(evaluation.test.ids, 3, 0, "joint")])
    log_mean, relative = log_moments(name, blocks)
    scores = {s.metric: s for s in Joint(taus=(TAU,), repeats=3, tolerance=0.01)(evaluation, 0)}
    is_exact = evaluation.gaussian_joint is not None
    name_of_draws = "_by_draws" if is_exact else ""
    error = float((relative / S).sqrt().mean())
    assert abs(scores[f"joint_loglik{name_of_draws}"].value - float(log_mean.mean())) < 5 * error
    dyadic = {s.metric: s for s in Dyadic((2,), 10, 3, "uniform", 0.01)(evaluation, 0)}
    if is_exact:
        assert scores["joint_loglik"].value == pytest.approx(float(log_mean.mean()), rel=1e-6)
        assert abs(dyadic["dyadic_loglik"].value - dyadic["dyadic_loglik_by_draws"].value) < 0.2
    assert dyadic[f"dyadic_loglik{name_of_draws}"].draws == S


def test_the_bias_of_few_draws_is_the_stated_one() -> None:
    """4,000 sets of S = 10 draws: the mean error over sets is −V/(2S) within 4 standard errors, and is not zero."""
    few, sets, (task, network) = 10, 4000, problem()
    draws = scored("laplace_full")[0].draws(few * sets, 7)
    y, block = task.test.targets, torch.arange(12).reshape(1, 12)
    assert y is not None
    log_mean, relative = log_moments("laplace_full", block)
    loglik = network.likelihood.log_prob(draws(task.test.inputs), y).sum(1) - 12 * float(task.target_scale.log())
    error = torch.logsumexp(loglik.reshape(sets, few), 1) - math.log(few) - log_mean
    standard, bias = float(error.std()) / math.sqrt(sets), -float(relative) / (2 * few)
    assert abs(float(error.mean()) - bias) < 4 * standard
    assert float(error.mean()) < -4 * standard, "the bias is there to be seen"


def test_the_joint_of_a_mixture_is_that_of_its_members() -> None:
    """Σ_m w_m N(y; μ_m, C_m + σ_m² I), exactly, against draws. Planted bug: the noise of the first member for all."""
    task, _ = problem()
    networks = [make_network(MLP(hidden=(6,)), task, seed=m, noise=0.8 + 0.3 * m) for m in range(3)]
    posterior = EnsembleLaplace(size=3, structure="full").fit(task, networks, context(Fixed(3.0)))
    evaluation = evaluate(task, posterior, "draws", S, 1, 6, 10)
    assert evaluation.gaussian_joint is None, "a mixture is no Gaussian"
    y, loglik, scale = task.test.targets, evaluation.test.loglik, float(task.target_scale)
    assert y is not None and loglik is not None
    blocks = torch.arange(12).reshape(-1, TAU)
    parts = []
    for network in networks:
        alone = Laplace(structure="full").fit(task, [network], context(Fixed(3.0)))
        covariance = alone.joint_covariance(task.test)  # type: ignore[union-attr]
        noise = float(network.likelihood.log_noise.exp()) ** 2 * torch.eye(TAU, dtype=torch.float64)  # type: ignore[attr-defined]
        inside = covariance[blocks.unsqueeze(2), blocks.unsqueeze(1)] + noise
        centre = network(task.test.inputs)[:, 0]
        parts.append(MultivariateNormal(centre[blocks], inside).log_prob(y[blocks, 0]) - TAU * math.log(scale))
    expected = torch.logsumexp(torch.stack(parts), 0) - math.log(3)
    weights = loglik[:, blocks].sum(-1)
    by_draws = torch.logsumexp(weights, 0) - math.log(S)
    relative = (weights - by_draws).exp().var(0)
    error = (by_draws - expected + relative / (2 * S)) / (relative / S).sqrt()
    assert float(error.abs().max()) < 5
