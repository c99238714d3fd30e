"""Regression whose noise depends on the input: likelihoods, curvature, and the way through training to scores.

Each docstring names the bug that the test catches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call, jacrev

from bnn_runner.base import Network
from bnn_runner.data.hetero1d import Hetero1D
from bnn_runner.errors import UserError
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.grid import Grid
from bnn_runner.laplace.validation_score import _sampled_log_prob
from bnn_runner.methods.ensemble import Ensemble
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.likelihoods import MeanVariance, Natural, NoiseRule
from bnn_runner.models.mlp import MLP
from bnn_runner.models.priors import Isotropic
from bnn_runner.tasks import Task
from bnn_runner.training.cache import NetworkCache
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig
from tests.problems import context, make_network, make_task

FORMS = {"mean_variance": MeanVariance(), "natural": Natural()}
every_form = pytest.mark.parametrize("form", FORMS)
WIDE = MLP(hidden=(8,))


def _outputs(count: int, targets: int) -> Tensor:
    return torch.randn(count, 2 * targets, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.5


@every_form
def test_log_prob_is_that_of_the_stated_moments(form: str) -> None:
    """Planted bugs: η₂ without its half; standard deviation for variance; the halves of the outputs swapped."""
    likelihood, outputs = FORMS[form], _outputs(5, 2)
    y = torch.randn(5, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mean, variance = likelihood.mean_variance(outputs)
    expected = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y).sum(-1)
    torch.testing.assert_close(likelihood.log_prob(outputs, y), expected)
    torch.testing.assert_close(likelihood.log_prob(outputs.expand(3, 5, 4), y), expected.expand(3, 5))
    if form == "natural":
        first, second = outputs[:, :2], -0.5 * torch.nn.functional.softplus(outputs[:, 2:])
        torch.testing.assert_close(mean, -first / (2 * second))
        torch.testing.assert_close(variance, -1 / (2 * second))
    else:
        torch.testing.assert_close(mean, outputs[:, :2])
        torch.testing.assert_close(variance, outputs[:, 2:].exp())


@every_form
def test_curvature_root_is_that_of_the_fisher(form: str) -> None:
    """Planted bugs: the factor ½ of log σ² left out; ∂η/∂f not chained; the off-diagonal of the wrong sign.

    The mean of the Hessian over y ~ p(y | outputs) is exact by Gauss-Hermite quadrature: it is quadratic in y.
    """
    likelihood = FORMS[form]
    nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(5))
    weights = weights / weights.sum()
    for out in _outputs(4, 1):
        mean, variance = likelihood.mean_variance(out)
        fisher = torch.zeros(2, 2, dtype=torch.float64)
        for node, weight in zip(nodes, weights, strict=True):
            y = (mean + variance.sqrt() * node).detach()
            fisher -= weight * jacrev(jacrev(partial(_log_prob, likelihood, y)))(out)
        root = likelihood.curvature_root(out.unsqueeze(0))[0]
        torch.testing.assert_close(root @ root.T, fisher, rtol=1e-9, atol=1e-12)


def _log_prob(likelihood: MeanVariance | Natural, y: Tensor, out: Tensor) -> Tensor:
    return likelihood.log_prob(out.unsqueeze(0), y.unsqueeze(0)).sum()


def test_natural_curvature_is_the_hessian_in_eta_chained() -> None:
    """Planted bug: the derivative of softplus missing. −∂²log p/∂η² is free of y: −∇² of the log-partition."""
    out = torch.tensor([0.7, -0.4], dtype=torch.float64)

    def eta(f: Tensor) -> Tensor:
        return torch.stack([f[0], -0.5 * torch.nn.functional.softplus(f[1])])

    def partition(e: Tensor) -> Tensor:
        return -(e[0] ** 2) / (4 * e[1]) - 0.5 * torch.log(-2 * e[1])

    slope = jacrev(eta)(out)
    expected = slope.T @ jacrev(jacrev(partition))(eta(out)) @ slope
    root = Natural().curvature_root(out.unsqueeze(0))[0]
    torch.testing.assert_close(root @ root.T, expected, rtol=1e-9, atol=1e-12)


def test_two_targets_do_not_mix() -> None:
    """Planted bug: the halves of 2K outputs interleaved in the root."""
    outputs = _outputs(3, 2)
    for likelihood in FORMS.values():
        joint = likelihood.curvature_root(outputs)
        for k in range(2):
            alone = likelihood.curvature_root(outputs[:, [k, 2 + k]])
            both = (joint @ joint.mT)[:, [k, 2 + k]][:, :, [k, 2 + k]]
            torch.testing.assert_close(both, alone @ alone.mT)
        assert float((joint @ joint.mT)[:, [0, 2]][:, :, [1, 3]].abs().max()) == 0


def test_natural_is_finite_where_softplus_underflows() -> None:
    """Planted bug: log of softplus without care, -inf in float32 and a NaN gradient."""
    raw = torch.tensor([[0.0, -80.0], [0.0, 120.0], [3.0, -25.0]], requires_grad=True)
    value = Natural().log_prob(raw, torch.zeros(3, 1))
    value.sum().backward()
    assert bool(torch.isfinite(value).all()) and bool(torch.isfinite(raw.grad).all())  # type: ignore[arg-type]
    sample = Natural().log_prob(torch.tensor([[0.3, -25.0]], dtype=torch.float64), torch.ones(1, 1).double())
    precision = math.exp(-25.0)
    assert float(sample) == pytest.approx(
        0.5 * (-25.0 - precision * (1 - 0.3 / precision) ** 2 - math.log(2 * math.pi))
    )


def _hetero_network(form: str, task: Task) -> Network:
    network = make_network(WIDE, replace(task, spec=replace(task.spec, num_outputs=2 * task.spec.num_outputs)))
    return replace(network, likelihood=FORMS[form])


@every_form
@pytest.mark.parametrize("hyper", [Evidence(), Grid(num=5)])
def test_laplace_stands_on_the_fisher(form: str, hyper: Evidence | Grid) -> None:
    """Planted bugs: the number of curvature directions taken from the targets; a probit validation score."""
    task = make_task("regression", (3,), 1)
    network = _hetero_network(form, task)
    method = Laplace(structure="full")
    posterior = method.fit(task, [network], context(hyper))
    x = task.train.inputs

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(network.module, {**parameters, **network.buffers}, (x,))

    jacobian = torch.cat([j.flatten(2) for j in jacrev(outputs)(network.parameters).values()], dim=2)
    root = network.likelihood.curvature_root(network(x))
    rows = torch.einsum("bkc,bkp->bcp", root, jacobian).flatten(0, 1)
    precision = float(posterior.report.facts["prior_precision"])
    covariance = torch.linalg.inv(rows.T @ rows + precision * torch.eye(rows.shape[1], dtype=torch.float64))
    expected = torch.einsum("bkp,pq,blq->bkl", jacobian, covariance, jacobian)
    torch.testing.assert_close(posterior.moments(x).covariance, expected, rtol=1e-6, atol=1e-9)  # type: ignore[union-attr]
    made = evaluate(task, posterior, "draws", 7, 0, 5, 3)
    assert made.test.means is not None and made.test.means.shape == (7, len(task.test), 1)
    assert made.test.variances is not None and made.test.variances.shape == (7, len(task.test), 1)
    assert made.gaussian_joint is None and any("no exact Gaussian joint" in n for n in made.notes)


def test_validation_score_is_the_mean_over_outputs() -> None:
    """Planted bug: variance for its root in the draws. Uncertain mean alone: the exact Gaussian is known."""
    y, mean = torch.tensor([[0.4]]).double(), torch.tensor([[0.1, -0.3]]).double()
    covariance = torch.diag_embed(torch.tensor([[0.3, 0.0]]).double())
    exact = torch.distributions.Normal(0.1, math.sqrt(0.3 + math.exp(-0.3))).log_prob(y)
    draws = 200
    values = MeanVariance().log_prob(
        mean + math.sqrt(0.3) * torch.randn(20000, 1, 2).double() * torch.tensor([1, 0]), y
    )
    error = float(values.exp().std() / values.exp().mean()) / math.sqrt(draws)
    assert float((_sampled_log_prob(MeanVariance(), y, mean, covariance) - exact).abs()) < 4 * error
    point = _sampled_log_prob(Natural(), y, mean, 0 * covariance)
    torch.testing.assert_close(point, Natural().log_prob(mean, y))


def _trained(form: str, members: int = 1) -> tuple[Task, list[Network]]:
    data = Hetero1D(
        num_train=1200, num_test=50, noise_left=0.2, noise_right=0.8, val_fraction=0.0, train_size=None, test_size=None
    )
    task = data.load(Path(), 0)
    config = TrainingConfig(
        model=MLP(hidden=(12,)),
        schedule=Schedule(optimizer="adam", epochs=150, batch_size=200, lr=0.03),
        prior=Isotropic(1e-3),
        noise=NoiseRule(form=form),  # type: ignore[arg-type]
    )
    group = LaneTrainer(config, [Lane(task, i, f"key{i}") for i in range(members)], torch.device("cpu"))
    return task, group.train(None, lambda *_: None)


@every_form
def test_the_noise_curve_is_recovered(form: str, tmp_path: Path) -> None:
    """Planted bugs: training by the homoscedastic likelihood; a network of K outputs; the cache forgets the form.

    log σ from 1,200 points by some ten effective weights: standard error √(10/2400) = 0.065.
    """
    task, networks = _trained(form, members=2)
    posterior = Ensemble(2).fit(task, networks, context())
    draws = posterior.draws(2, 0)
    assert task.input_mean is not None and task.input_scale is not None and task.true_noise is not None
    x = torch.linspace(-2.7, 2.7, 60)[:, None]
    _, variance = draws.likelihood.mean_variance(draws((x - task.input_mean) / task.input_scale))  # type: ignore[attr-defined]
    found = 0.5 * variance.log() + task.target_scale.log()
    error = (found - task.true_noise(x).log()).square().mean((1, 2)).sqrt()
    assert float(error.max()) < 3 * 0.065, error
    cache = NetworkCache(tmp_path)
    cache.store(networks[0])
    back = cache.load("key0", networks[0].module, torch.device("cpu"), torch.float32)
    assert back is not None and back.likelihood == networks[0].likelihood == FORMS[form]


def test_invalid_combinations_are_refused() -> None:
    """Planted bug: a fixed noise that the form ignores in silence."""
    with pytest.raises(UserError, match=r"likelihood\.noise=fixed"):
        NoiseRule("fixed", 0.1, "natural")
    regression, classes = (make_task(kind, (2,), 2).spec for kind in ("regression", "classification"))
    rule = NoiseRule(form="mean_variance")
    assert rule.problems(regression, "draws") == [] and rule.network_spec(regression).num_outputs == 4
    assert "has classes" in rule.problems(classes, "draws")[0] and rule.network_spec(classes) is classes
    assert "not Gaussian" in rule.problems(regression, "closed_form")[0]
