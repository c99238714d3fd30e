"""Bayes by Backprop: a linear-Gaussian model where everything is known, unbiased estimators, resuming, pruning.

Each docstring names the bug that the test catches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import FitContext, Network
from bnn_runner.errors import Interrupted, RunFailed, UserError
from bnn_runner.methods.bbb import BBB
from bnn_runner.models.mlp import MLP
from bnn_runner.models.resnet20 import ResNet20
from bnn_runner.tasks import Task
from bnn_runner.training.schedules import Schedule
from bnn_runner.variational.fit import Fit, Plan
from bnn_runner.variational.kl import GaussianPrior, ScaleMixture
from bnn_runner.variational.posterior import MeanField
from tests.problems import context, make_network, make_task

NOISE, PRECISION = 0.5, 2.0


def _linear() -> tuple[Task, Network, Tensor, Tensor]:
    """A linear model with correlated inputs, its exact posterior mean and precision (weights, then bias)."""
    task = make_task("regression", (3,), 1, num_train=60)
    mixing = torch.tensor([[1.0, 0.6, 0.0], [0.0, 0.5, 0.9], [0.0, 0.0, 2.0]], dtype=torch.float64)
    task = replace(task, train=replace(task.train, inputs=task.train.inputs @ mixing))
    network = make_network(MLP(hidden=()), task, precision=PRECISION, noise=NOISE)
    x = torch.cat([task.train.inputs, torch.ones(60, 1, dtype=torch.float64)], 1)
    precision = x.T @ x / NOISE**2 + PRECISION * torch.eye(4, dtype=torch.float64)
    assert task.train.targets is not None
    mean = torch.linalg.solve(precision, x.T @ task.train.targets / NOISE**2).squeeze(1)
    return task, network, mean, precision


def _context(epochs: int, batch_size: int, lr: float, **changes: Any) -> FitContext:
    schedule = Schedule(optimizer="adam", epochs=epochs, batch_size=batch_size, lr=lr)
    return replace(context(), schedule=schedule, **changes)


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors["out.weight"].flatten(), tensors["out.bias"].flatten()])


def test_the_optimum_has_the_posterior_means_and_the_variances_of_the_diagonal_precision() -> None:
    """Planted bugs: KL divided by the batch; σ for σ² in the local noise; the factor of softplus forgotten."""
    task, network, mean, precision = _linear()
    method = BBB(noise="kept", rho_init=-2.0, samples=4)
    posterior = method.fit(task, [network], _context(600, 60, 0.04))
    sigma = _flat(dict(posterior.sigmas))
    expected = precision.diagonal().rsqrt()
    assert float(((_flat(posterior.network.parameters) - mean) / expected).abs().max()) < 0.15
    torch.testing.assert_close(sigma, expected, rtol=0.06, atol=0)


def _closed_elbo(task: Task, mu: Tensor, sigma: Tensor) -> float:
    """E log p(y | w) − KL of a linear model, original target units."""
    x = torch.cat([task.train.inputs, torch.ones(len(task.train), 1, dtype=torch.float64)], 1)
    assert task.train.targets is not None
    squares = (task.train.targets.squeeze(1) - x @ mu).square().sum() + (x.square() @ sigma.square()).sum()
    n = len(task.train)
    loglik = -0.5 * n * math.log(2 * math.pi * NOISE**2) - 0.5 * squares / NOISE**2 - n * task.target_scale.log().sum()
    prior, q = torch.distributions.Normal(0, PRECISION**-0.5), torch.distributions.Normal(mu, sigma)
    return float(loglik - torch.distributions.kl_divergence(q, prior).sum())


@pytest.mark.parametrize("batch_size", [7, 60])
def test_the_elbo_is_its_closed_form_whatever_the_batch_size(batch_size: int) -> None:
    """Planted bugs: the KL once a batch; log of the target scale left out; a standard error of one draw."""
    task, network, _, _ = _linear()
    posterior = BBB(noise="kept", elbo_draws=200).fit(task, [network], _context(1, batch_size, 1e-9))
    exact = _closed_elbo(task, _flat(posterior.network.parameters), _flat(dict(posterior.sigmas)))
    report = posterior.report.facts
    assert abs(report["elbo_nats"] - exact) < 5 * report["elbo_standard_error"] + 1e-6
    assert report["elbo_standard_error"] < 0.05 * abs(exact)
    assert "ELBO" in posterior.report.notes[0]


def _plan(network: Network, estimator: str, batch_size: int = 20, **changes: Any) -> Plan:
    prior = GaussianPrior(PRECISION)
    plan = Plan(
        schedule=Schedule(epochs=3, batch_size=batch_size),
        estimator=estimator,  # type: ignore[arg-type]
        samples=1,
        annealing="constant",
        warmup=0.5,
        temperature=1.0,
        rho=-1.0,
        learn_noise=True,
        complexities=dict.fromkeys(network.parameters, prior),
        point=frozenset(),
    )
    return replace(plan, **changes)


def _gradients(estimator: str, kind: str, repeats: int) -> Tensor:
    """Gradients [repeats, P] of the mean −log p of one batch."""
    task = make_task(kind, (3,), 2, num_train=20)
    network = make_network(MLP(hidden=(4,)), task)
    fit = Fit(task, network, _plan(network, estimator), 0)
    x, y = task.train.gather(torch.arange(20))
    assert y is not None
    rows = []
    for i in range(repeats):
        _, grads = fit.gradients(x, y, fit.sigmas(), torch.Generator().manual_seed(i))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_estimators_agree_and_local_noise_varies_least(kind: str) -> None:
    """Planted bugs: signs of Flipout shared by the batch; the noise of the bias left out; σ for 2σ in the chain."""
    found = {e: _gradients(e, kind, 600) for e in ("weights", "local", "flipout")}
    reference = found["weights"]
    for name in ("local", "flipout"):
        error = ((found[name].var(0) + reference.var(0)) / len(reference)).sqrt()
        assert float(((found[name].mean(0) - reference.mean(0)) / error).abs().max()) < 5, name
        most = {"local": 0.6, "flipout": 0.9}[name]
        assert float(found[name].var(0).sum()) < most * float(reference.var(0).sum()), name


@pytest.mark.exhaustive
def test_flipout_is_exact_for_convolutions() -> None:
    """Planted bug: new signs at every position, which makes positions independent."""
    task = make_task("classification", (3, 8, 8), 2, num_train=6)
    network = make_network(ResNet20(norm="group"), task)
    outputs = []
    for estimator in ("weights", "flipout"):
        fit = Fit(task, network, _plan(network, estimator, rho=-4.0), 0)
        assert ("stem.weight" in fit.hooked) is (estimator == "flipout")
        x, y = task.train.gather(torch.arange(2))
        assert y is not None
        values = [float(fit.gradients(x, y, fit.sigmas(), torch.Generator().manual_seed(i))[0]) for i in range(40)]
        outputs.append(torch.tensor(values, dtype=torch.float64))
    a, b = outputs
    assert float((a.mean() - b.mean()).abs()) < 5 * float(((a.var() + b.var()) / 40).sqrt())


def test_complexities_are_what_autograd_says() -> None:
    """Planted bugs: the wrong share of the mixture's parts; the entropy's sign; log λ left out."""
    stream = torch.Generator().manual_seed(0)
    mu = torch.randn(50, generator=stream, dtype=torch.float64).requires_grad_()
    sigma = torch.rand(50, generator=stream, dtype=torch.float64).add(0.05).requires_grad_()
    eps = torch.randn(50, generator=stream, dtype=torch.float64)
    prior = GaussianPrior(2.0)
    expected = torch.autograd.grad(prior.value(mu, sigma, eps), (mu, sigma))
    found = torch.ones(50).double(), torch.ones(50).double()
    prior.add_gradients(3.0, mu.detach(), sigma.detach(), eps, *found)
    torch.testing.assert_close(found, tuple(1 + 3 * e for e in expected))
    normal = torch.distributions.Normal
    exact = torch.distributions.kl_divergence(normal(mu, sigma), normal(0, 0.5**0.5)).sum()
    torch.testing.assert_close(GaussianPrior(2.0).value(mu, sigma, eps), exact)
    # A mixture of two equal parts is a Gaussian: its one-sample values average to the closed form.
    samples = torch.stack(
        [
            ScaleMixture(0.3, 0.5**0.5, 0.5**0.5).value(mu, sigma, torch.randn(50, generator=stream).double())
            for _ in range(2000)
        ]
    )
    samples, exact = samples.detach(), exact.detach()
    assert float((samples.mean() - exact).abs()) < 5 * float(samples.std()) / 2000**0.5


@pytest.mark.parametrize(("mu", "sigma"), [(0.0, 0.005), (0.01, 0.02), (0.05, 0.1), (0.6, 0.3)])
def test_gradients_of_the_mixture_are_those_of_its_expectation(mu: float, sigma: float) -> None:
    """Against quadrature of −log p and the entropy. Planted bugs: shares of the parts exchanged; ε² without the −1."""
    prior, count = ScaleMixture(0.25, 1.0, 0.02), 400_000
    eps = torch.randn(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = torch.ones(count).double(), torch.ones(count).double()
    prior.add_gradients(3.0, torch.full_like(eps, mu), torch.full_like(eps, sigma), eps, *found)
    z = torch.linspace(-8, 8, 40_001, dtype=torch.float64)
    normal = torch.distributions.Normal
    parts = [math.log(p) + normal(0.0, s).log_prob(mu + sigma * z) for p, s in ((0.25, 1.0), (0.75, 0.02))]
    mass = -torch.logaddexp(*parts) * torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    exact = float((mass * z).sum() / sigma), float((mass * (z.square() - 1)).sum() / sigma) - 1 / sigma
    for gradients, value in zip(found, exact, strict=True):
        error = float(gradients.std()) / math.sqrt(count)
        assert abs(float(gradients.mean()) - (1 + 3 * value)) < 5 * error


def test_a_narrow_spike_does_not_kick_the_means() -> None:
    """e⁻⁸ under a posterior 100 times as wide. Planted bug: the slope of the spike at the sample."""
    prior = ScaleMixture(0.75, 1.0, math.exp(-8))
    eps = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mu, sigma = torch.full_like(eps, 0.01), torch.full_like(eps, 0.04)
    in_mu = torch.zeros_like(eps)
    prior.add_gradients(1.0, mu, sigma, eps, in_mu, torch.zeros_like(eps))
    w = (mu + sigma * eps).requires_grad_()
    (kicks,) = torch.autograd.grad(prior.value(w, sigma, torch.zeros_like(eps)), w)
    assert float(in_mu.std()) < 0.05 * float(kicks.std())


def test_a_posterior_inside_the_spike_gets_gradients_without_its_height() -> None:
    """A hundredth as wide as a spike of s = 6.9 nats: there s(w) − s(μ) is −w²/2σ₂², below .001 for |ε| < 4, in float32
    too. Planted bug: s(w) without s(μ), which is right on average, and thousands of times as loud."""
    prior, sigma = ScaleMixture(0.75, 1.0, math.exp(-8)), 0.01 * math.exp(-8)
    eps = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).clamp(-4, 4)
    in_mu, widths = torch.zeros_like(eps), torch.full_like(eps, sigma)
    prior.add_gradients(1.0, torch.zeros_like(eps), widths, eps, in_mu, torch.zeros_like(eps))
    assert float(in_mu.abs().max()) < 0.001 * 4 / sigma


def test_annealing_counts_the_kl_once_an_epoch() -> None:
    """Planted bug: Blundell's weights that sum to M or to 1/M."""
    _, network, _, _ = _linear()
    plan = _plan(network, "local")
    for annealing in ("constant", "blundell"):
        weights = [replace(plan, annealing=annealing).kl_weight(30 + i, 10) for i in range(10)]  # type: ignore[arg-type]
        assert sum(weights) == pytest.approx(10)
    assert weights[0] == pytest.approx(2 * weights[1])
    ramp = [replace(plan, annealing="linear").kl_weight(i, 10) for i in range(30)]
    assert ramp[0] == pytest.approx(1 / 15) and ramp[14:] == pytest.approx([1.0] * 16)


def test_a_resumed_fit_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """Planted bugs: noise from one generator that starts again; the optimiser's moments or batchnorm left out."""
    task = make_task("regression", (3,), 2, num_train=30)
    network = make_network(MLP(hidden=(5,), norm="batch"), task)
    method = BBB(prior="scale_mixture", elbo_draws=2)
    whole = method.fit(task, [network], _context(4, 8, 0.01))

    def stop(stage: str, done: int, total: int) -> None:
        if done == 6:
            raise Interrupted("stop")

    path = tmp_path / "fit.partial"
    with pytest.raises(Interrupted):
        method.fit(task, [network], _context(4, 8, 0.01, checkpoint=path, progress=stop))
    steps = []
    again = method.fit(
        task, [network], _context(4, 8, 0.01, checkpoint=path, progress=lambda s, done, total: steps.append(done))
    )
    assert steps[0] == 7
    for name, t in whole.network.tensors.items():
        assert torch.equal(t, again.network.tensors[name]), name
    assert all(torch.equal(s, again.sigmas[n]) for n, s in whole.sigmas.items())
    assert whole.report.facts["elbo_nats"] == again.report.facts["elbo_nats"]
    assert not torch.equal(whole.network.buffers["norms.0.running_mean"], network.buffers["norms.0.running_mean"])


def test_divergence_is_told_with_the_key_to_lower() -> None:
    """Planted bug: a NaN that ends in the table."""
    task = make_task("regression", (3,), 1, num_train=20)
    network = make_network(MLP(hidden=(4,)), task)
    with pytest.raises(RunFailed, match=r"method\.lr"):
        BBB(lr=1e200).fit(task, [network], _context(5, 10, 0.01))
    with pytest.raises(UserError, match=r"sigma2"):
        BBB(sigma1=0.1, sigma2=0.5)
    free = replace(network, prior_precision=dict.fromkeys(network.parameters, 0.0))
    with pytest.raises(RunFailed, match=r"prior\.precision"):
        BBB().fit(task, [free], _context(1, 10, 0.01))


def test_given_noise_stays_and_the_history_is_told() -> None:
    """Planted bugs: likelihood.noise=fixed moved by the fit; the history of the fit kept to itself."""
    task = make_task("regression", (3,), 1, num_train=20)
    network = make_network(MLP(hidden=(4,)), task)
    rows: list[Mapping[str, float]] = []
    fixed = BBB().fit(task, [network], _context(3, 10, 0.05, noise_fixed=True, record=rows.append))
    learned = BBB().fit(task, [network], _context(3, 10, 0.05))
    before, kept, moved = (p.likelihood.log_noise for p in (network, fixed, learned))  # type: ignore[attr-defined]
    assert torch.equal(before, kept) and not torch.equal(before, moved)
    assert [row["epoch"] for row in rows] == [1, 2, 3] and all(row["kl"] > 0 for row in rows)


def test_the_means_start_from_the_map_network_or_from_initial_weights() -> None:
    """Planted bugs: start=map that requests an untrained network; means drawn again."""
    task = make_task("regression", (3,), 1, num_train=20)
    network = make_network(MLP(hidden=(4,)), task)
    for start, trained in (("map", True), ("init", False)):
        method = BBB(start=start)  # type: ignore[arg-type]
        assert [(spec.member, spec.trained) for spec in method.needs()] == [(0, trained)]
        fit = method.begin(task, network, Schedule(epochs=1, batch_size=10, lr=0.01), 0)
        assert all(torch.equal(fit.mu[n], p) for n, p in network.parameters.items())
        assert all(float(r.min()) == float(r.max()) == method.rho_init for r in fit.rho.values())


def test_norm_parameters_can_stay_point_estimates() -> None:
    """Planted bug: method.norm=point that leaves their noise on."""
    task = make_task("regression", (3,), 1, num_train=20)
    network = make_network(MLP(hidden=(4,), norm="layer"), task)
    posterior = BBB(norm="point").fit(task, [network], _context(1, 10, 0.01))
    assert {n for n in network.parameters if n not in posterior.sigmas} == {"norms.0.weight", "norms.0.bias"}
    assert "point estimate" in posterior.treatment["norms.0.weight"]
    assert "local" in posterior.treatment["hidden.0.weight"]


def test_pruning_removes_the_least_certain_weights() -> None:
    """Planted bugs: σ kept of a removed weight; the most certain removed first."""
    task = make_task("regression", (3,), 1)
    network = make_network(MLP(hidden=(4,)), task)
    sigmas = {n: torch.full_like(p, 0.1) for n, p in network.parameters.items()}
    posterior = MeanField(network, sigmas)
    snr = posterior.signal_to_noise()
    pruned = posterior.pruned(0.5)
    gone = torch.cat([(p == 0).flatten() for p in pruned.network.parameters.values()])
    assert int(gone.sum()) == round(0.5 * len(snr)) and float(snr[gone].max()) <= float(snr[~gone].min())
    assert torch.equal(gone, torch.cat([(s == 0).flatten() for s in pruned.sigmas.values()]))
    first = posterior.draws(3, 0)(task.test.inputs)
    torch.testing.assert_close(posterior.pruned(0.0).draws(3, 0)(task.test.inputs), first)
    everything = posterior.pruned(1.0).draws(3, 0)(task.test.inputs)
    assert float(everything.abs().max()) == 0
