"""Mixtures of Laplace posteriors: draws, moments, weights and the row, float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from bnn_runner.base import ClosedForm, Network
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.ensemble_laplace import EnsembleLaplace
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.mlp import MLP
from bnn_runner.posteriors.mixture import Mixture, owners, predictive_log_densities, stacking_weights
from bnn_runner.tasks import Task
from tests.problems import context, make_network, make_task


def members(kind: str, count: int = 3) -> tuple[Task, list[Network]]:
    """Networks that differ, and in regression in their noise too."""
    task = make_task(kind, (3,), 1 if kind == "regression" else 3, num_train=30)
    return task, [make_network(MLP(hidden=(5,)), task, seed=m, noise=0.3 + 0.2 * m) for m in range(count)]


def weighted(posterior: Mixture, *weights: float) -> Mixture:
    return replace(posterior, weights=torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_moments_are_those_of_the_draws_and_of_the_members(kind: str) -> None:
    """5 standard errors. Planted bugs: the spread between means left out; weights on the wrong members."""
    task, networks = members(kind)
    posterior = weighted(EnsembleLaplace(size=3).fit(task, networks, context(Fixed(0.5))), 0.5, 0.3, 0.2)
    x, count = task.test.inputs[:4], 6000
    draws = posterior.draws(count, 3)(x)
    moments = posterior.moments(x)
    error = (moments.covariance.diagonal(dim1=1, dim2=2) / count).sqrt()
    assert float(((draws.mean(0) - moments.mean) / error).abs().max()) < 5
    apart = draws - moments.mean
    products = apart.unsqueeze(-1) * apart.unsqueeze(-2)
    error = products.std(0) / math.sqrt(count)
    assert float(((products.mean(0) - moments.covariance) / error).abs().max()) < 5
    alone = [Laplace(structure="full").fit(task, [n], context(Fixed(0.5))) for n in networks]
    found = [p.moments(x) for p in alone]  # type: ignore[union-attr]
    second = sum(
        w * (m.covariance + m.mean.unsqueeze(-1) * m.mean.unsqueeze(-2))
        for w, m in zip((0.5, 0.3, 0.2), found, strict=True)
    )
    outer = moments.mean.unsqueeze(-1) * moments.mean.unsqueeze(-2)
    torch.testing.assert_close(moments.covariance, second - outer, rtol=1e-8, atol=1e-10)
    assert not isinstance(posterior, ClosedForm), "a mixture has no Gaussian joint"


def test_every_member_is_the_laplace_posterior_of_its_network() -> None:
    """Planted bugs: all members from the first network; one precision for all; evidences in another order."""
    task, networks = members("regression")
    posterior = EnsembleLaplace(size=3, structure="kfac").fit(task, networks, context(Evidence()))
    alone = [Laplace(structure="kfac").fit(task, [n], context(Evidence())) for n in networks]
    assert posterior.report.facts["member_evidence_nats"] == [p.report.facts["evidence_nats"] for p in alone]
    assert posterior.report.facts["member_prior_precision"] == [p.report.facts["prior_precision"] for p in alone]
    assert len(set(posterior.report.facts["member_prior_precision"])) == 3
    assert (
        "evidence_nats" not in posterior.report.facts and "none of its own" in posterior.report.facts["evidence_over"]
    )
    draws = posterior.draws(7, 5)
    x, y = task.test.gather(torch.arange(6))
    sigma = torch.stack([n.likelihood.log_noise.exp() for n in networks])[[0, 1, 2, 0, 1, 2, 0]].unsqueeze(1)
    expected = Normal(draws(x), sigma).log_prob(y).sum(-1)  # type: ignore[arg-type]
    torch.testing.assert_close(draws.likelihood.log_prob(draws(x), y), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("weights", [(0.6, 0.3, 0.1), (1.0, 0.0, 0.0), (1 / 3, 1 / 3, 1 / 3)])
def test_slices_of_weighted_draws_are_nested(weights: tuple[float, ...]) -> None:
    """Planted bugs: a slice that counts a member's draws from zero; members in another order in a slice."""
    task, networks = members("classification")
    posterior = weighted(EnsembleLaplace(size=3).fit(task, networks, context()), *weights)
    x, draws = task.test.inputs, posterior.draws(23, 3)
    whole = draws(x)
    for a, b in ((0, 1), (3, 11), (4, 23), (22, 30), (5, 5)):
        part = draws[a:b]
        assert len(part) == max(0, min(b, 23) - a)
        if len(part):
            torch.testing.assert_close(part(x), whole[a:b])
            torch.testing.assert_close(part[1:](x) if len(part) > 1 else part(x), whole[a:b][min(1, len(part) - 1) :])
    torch.testing.assert_close(posterior.draws(40, 3)(x)[:23], whole)
    shares = torch.tensor(weights, dtype=torch.float64)
    for count in (1, 7, 50, 400):
        counted = owners(shares, count).bincount(minlength=3)
        assert float((counted - count * shares).abs().max()) < 1.5


def test_validation_weights_are_the_optimum() -> None:
    """Concave, so the gradient tells: Σ_n p_m/p is N where w_m > 0 and no more elsewhere. Planted bug: one EM step."""
    logs = torch.randn(4, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    weights = stacking_weights(logs)
    assert float(weights.sum()) == pytest.approx(1)
    slope = torch.exp(logs - torch.logsumexp(weights.log().unsqueeze(1) + logs, 0)).mean(1)
    assert float(slope.max()) < 1 + 1e-4
    assert float((slope[weights > 1e-3] - 1).abs().max()) < 1e-4
    task, networks = members("classification")
    posterior = EnsembleLaplace(size=3, mixture="validation").fit(task, networks, context())
    assert posterior.report.facts["mixture_weights"] == posterior.weights.tolist() != [1 / 3] * 3
    found = predictive_log_densities(posterior.components, task.val, 0, 3)
    torch.testing.assert_close(stacking_weights(found), posterior.weights, atol=1e-6, rtol=0)
    assert any("validation points" in note for note in posterior.report.notes)


def test_predictive_densities_are_those_of_the_closed_form() -> None:
    """Regression's are Gaussian in closed form: 6 standard errors of the mean over draws."""
    task, networks = members("regression")
    posterior = EnsembleLaplace(size=3).fit(task, networks, context(Fixed(4.0)))
    x, y = task.val.gather(torch.arange(len(task.val)))
    assert y is not None
    found = predictive_log_densities(posterior.components, task.val, 0, 100).exp()
    for density, component, network in zip(found, posterior.components, networks, strict=True):
        moments, noise = component.moments(x), network.likelihood.log_noise.exp()  # type: ignore[attr-defined]
        exact = Normal(moments.mean[:, 0], (moments.covariance[:, 0, 0] + noise**2).sqrt()).log_prob(y[:, 0]).exp()
        draws: Tensor = component.draws(2000, 1)(x)[..., 0]
        error = Normal(draws, noise).log_prob(y[:, 0]).exp().std(0) / math.sqrt(200)
        assert float(((density - exact) / error).abs().max()) < 6


def test_what_is_refused() -> None:
    task, networks = members("regression", 2)
    with pytest.raises(RunFailed, match="same weights"):
        EnsembleLaplace(size=2).fit(task, [networks[0]] * 2, context())
    with pytest.raises(UserError, match=r"method\.size"):
        EnsembleLaplace(size=0)
    with pytest.raises(UserError, match=r"method\.sharing"):
        EnsembleLaplace(structure="diag", sharing="reduce")
    without = replace(task.spec, val_fraction=0.0)
    method: Any = EnsembleLaplace(mixture="validation")
    assert any("data.val_fraction" in problem for problem in method.problems(without, Fixed()))
    assert EnsembleLaplace().problems(without, Fixed()) == []
    posterior = EnsembleLaplace(size=2).fit(task, networks, context())
    with pytest.raises(UserError, match="closed form"):
        evaluate(task, posterior, "closed_form", 4, 0, 5, 5)
