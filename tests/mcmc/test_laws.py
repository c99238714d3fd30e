"""Samplers against laws known exactly: discretised stationary laws, Gaussian posteriors, skewed targets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from scipy.special import polygamma, psi
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.mcmc.chains import run_hamiltonian
from bnn_runner.mcmc.checkpoint import Checkpoint
from bnn_runner.mcmc.diagnostics import effective_draws, rhat
from bnn_runner.mcmc.dynamics import ChainState, hamiltonian, langevin, preconditioned
from bnn_runner.mcmc.hamiltonian import Point, transition
from bnn_runner.methods.hmc import HMC
from bnn_runner.methods.sgmcmc import StochasticGradientMCMC
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.models.mlp import MLP
from bnn_runner.rng import generator
from bnn_runner.tasks import Task
from bnn_runner.training.schedules import Schedule
from tests.problems import context, make_network, make_task

SIGMAS = 5
LANES = 8000
PRECISIONS = torch.tensor([0.3, 4.0, 25.0], dtype=torch.float64)


def ends(step, steps: int, gradient_sd: float = 0.0) -> ChainState:  # type: ignore[no-untyped-def]
    """Where 8,000 chains on N(0, 1/PRECISIONS) stand after `steps` steps from stationarity of the limit."""
    g = generator(1, "laws")

    def noise() -> Tensor:
        return torch.randn(LANES, 3, generator=g, dtype=torch.float64)

    state = ChainState.at(noise() / PRECISIONS.sqrt(), torch.full((LANES, 3), 4.0, dtype=torch.float64))
    for _ in range(steps):
        gradient = -PRECISIONS * state.position + gradient_sd * noise()
        state = step(state, gradient, noise=noise())
    return state


def check_variance(positions: Tensor, expected: Tensor) -> None:
    """At five standard errors of a variance of independent normals."""
    torch.testing.assert_close(positions.var(0), expected, rtol=SIGMAS * (2 / LANES) ** 0.5, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_langevin_has_its_discretised_stationary_law(temperature: float) -> None:
    """Planted bugs: ε for ε/2; √ε without T; noise of the wrong power. λ⁻¹ alone is 33 % off at λ = 25."""
    step = 0.04
    state = ends(partial(langevin, step=step, temperature=temperature), 400)
    check_variance(state.position, temperature / PRECISIONS / (1 - step * PRECISIONS / 4))


def test_a_fixed_preconditioner_leaves_the_stationary_law() -> None:
    """Planted bugs: G for √G in the noise; a gradient without G; V instead of √V (G is 1/(2 + 0.5) here)."""
    step = 0.1
    act = partial(preconditioned, step=step, temperature=0.7, num_points=10, decay=1.0, floor=0.5)
    state = ends(act, 400)
    check_variance(state.position, 0.7 / PRECISIONS / (1 - step / 2.5 * PRECISIONS / 4))


def test_preconditioner_follows_the_squared_mean_gradient() -> None:
    """Planted bug: V of the summed gradient, N² too large."""
    state = ChainState.at(torch.zeros(1, 1), torch.full((1, 1), 2.0))
    moved = preconditioned(state, torch.tensor([[30.0]]), 0.1, 0.0, torch.zeros(1, 1), 10, 0.9, 1e-5)
    assert float(moved.square) == pytest.approx(0.9 * 2 + 0.1 * 9)


@pytest.mark.parametrize(("temperature", "gradient_sd"), [(1.0, 0.0), (0.4, 0.0), (1.0, 2.0)])
def test_hamiltonian_has_its_discretised_stationary_law(temperature: float, gradient_sd: float) -> None:
    """Planted bugs: momentum added before it is moved; noise √(2αη) without T; β̂ not taken off."""
    step, friction = 0.01, 0.2
    act = partial(hamiltonian, step=step, temperature=temperature, friction=friction, gradient_variance=gradient_sd**2)
    state = ends(act, 1000, gradient_sd)
    # v' = (1−α) v − ηλ w + n, w' = w + v', n of variance 2αηT (the gradient's own noise is part of it).
    expected = []
    for precision in PRECISIONS.tolist():
        matrix = np.array([[1 - friction, -step * precision], [1 - friction, 1 - step * precision]])
        noise = 2 * friction * step * temperature * np.ones((2, 2))
        expected.append(solve_discrete_lyapunov(matrix, noise)[1, 1])
    check_variance(state.position, torch.tensor(expected, dtype=torch.float64))


def linear_problem(*scales: float) -> tuple[Task, Network, Tensor, Tensor]:
    """A linear network with Gaussian noise; its posterior is N(mean [P], A⁻¹) with the A [P, P] returned."""
    task = make_task("regression", (3,), 1, num_train=30)
    # Columns of unequal scale make the posterior ill-conditioned.
    scale = torch.tensor(scales, dtype=torch.float64)
    train = replace(task.train, inputs=task.train.inputs * scale, targets=task.train.targets * 0.3)
    task = replace(task, train=train)
    network = make_network(MLP(hidden=()), task, precision=0.7, noise=0.5)
    assert isinstance(network.likelihood, Gaussian) and train.targets is not None
    assert list(network.parameters) == ["out.weight", "out.bias"]
    x = torch.cat([train.inputs, torch.ones(len(train), 1, dtype=torch.float64)], 1)
    noise = float(network.likelihood.log_noise.exp() ** 2)
    precision = x.mT @ x / noise + 0.7 * torch.eye(4, dtype=torch.float64)
    mean = torch.linalg.solve(precision, x.mT @ train.targets[:, 0] / noise)
    return task, network, mean, precision


def check_moments(draws: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Draws [L, M, P]: mean and variances at five standard errors of their own effective sample sizes."""
    assert float(rhat(draws).max()) < 1.05
    variance = covariance.diagonal()
    centred = (draws - mean).square()
    for values, expected, spread in ((draws, mean, variance), (centred, variance, 2 * variance.square())):
        error = (spread / effective_draws(values)).sqrt()
        assert bool(((values.mean((0, 1)) - expected).abs() < SIGMAS * error).all())
        assert bool((error < 0.2 * variance.sqrt()).all() if values is draws else (error < 0.2 * variance).all())


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.exhaustive), 0.4])
def test_hmc_samples_the_exact_posterior_of_a_linear_network(temperature: float) -> None:
    """Planted bugs: a prior counted N times; noise σ for σ²; T on the prior only; no half kick at the end;
    trajectories at the limit of leapfrogs without jitter.
    """
    task, network, mean, precision = linear_problem(3.0, 1.0, 0.2)
    method = HMC(chains=6, warmup=150, draws=300, max_leapfrogs=30, posterior_temperature=temperature, start="initial")
    posterior = method.fit(task, [network] * 7, context())
    check_moments(posterior.weights, mean, temperature * torch.linalg.inv(precision))
    assert posterior.report.facts["divergences"] == 0 and posterior.report.notes == ()
    assert all(0.6 < a <= 1 for a in posterior.report.facts["acceptance"])


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_sgld_samples_the_discretised_posterior_of_a_linear_network(temperature: float) -> None:
    """Planted bugs: N left out of the likelihood (or squared); the prior's gradient added N times; ε for ε/2."""
    task, network, mean, precision = linear_problem(1.5, 1.0, 0.6)
    step = 0.8 / float(torch.linalg.eigvalsh(precision)[-1])
    method = StochasticGradientMCMC(
        chains=40, length=1000, keep=32000, step=step, last_fraction=1.0, start="map", posterior_temperature=temperature
    )
    fit = context()
    fit = replace(fit, schedule=Schedule(epochs=1, batch_size=30))
    posterior = method.fit(task, [network], fit)
    inflation = torch.linalg.inv(torch.eye(4, dtype=torch.float64) - step * precision / 4)
    check_moments(posterior.weights, mean, temperature * torch.linalg.inv(precision) @ inflation)
    assert posterior.report.facts["learning_rate_first"] == pytest.approx(step * 30 / 2)


def test_divergent_trajectories_are_refused_and_counted() -> None:
    """A standard normal at a step of 0.5 and of 50, where leapfrog explodes. Planted bugs: a NaN error accepted; the
    divergence of one chain counted for all; a refused chain that moves all the same."""
    start = torch.ones(2, 3, dtype=torch.float64)

    def target(w: Tensor) -> tuple[Tensor, Tensor]:
        return -0.5 * w.square().sum(-1), -w

    for size in (50.0, 1e200):
        step = torch.tensor([0.5, size], dtype=torch.float64)
        noise, uniform = torch.randn(2, 3, generator=generator(0, "test"), dtype=torch.float64), torch.zeros(2)
        counts, mass = torch.full((2,), 10), torch.ones(3, dtype=torch.float64)
        moved = transition(Point.at(start, target), target, step, counts, mass, noise, uniform.double())
        assert moved.diverged.tolist() == [False, True] and float(moved.acceptance[1]) == 0 < float(moved.acceptance[0])
        assert torch.equal(moved.point.position[1], start[1]) and not torch.equal(moved.point.position[0], start[0])
        assert bool(torch.isfinite(moved.point.value).all())


def test_hmc_samples_a_skewed_target_of_unequal_scales() -> None:
    """s_i log G_i with G_i ~ Gamma(k_i): density exp(k x/s − e^(x/s)). Planted bug: a step refused is not repeated."""
    shape = torch.tensor([0.7, 2.0, 9.0], dtype=torch.float64)
    scale = torch.tensor([4.0, 0.05, 1.0], dtype=torch.float64)

    def target(w: Tensor) -> tuple[Tensor, Tensor]:
        u = w / scale
        return (shape * u - u.exp()).sum(-1), (shape - u.exp()) / scale

    run = run_hamiltonian(
        target,
        start=torch.zeros(6, 3, dtype=torch.float64),
        mass=1 / scale.square(),
        warmup=200,
        draws=1500,
        thinning=1,
        trajectory=2.0,
        jitter=0.5,
        most_leapfrogs=50,
        wanted=0.7,
        seeds=range(6),
        checkpoint=Checkpoint(None, ""),
    )
    draws = run.chains.weights
    mean = scale * torch.from_numpy(psi(shape.numpy()))
    variance = scale.square() * torch.from_numpy(polygamma(1, shape.numpy()))
    kurtosis = torch.from_numpy(polygamma(3, shape.numpy()) / polygamma(1, shape.numpy()) ** 2)
    centred = (draws - mean).square()
    for values, expected, spread in ((draws, mean, variance), (centred, variance, (2 + kurtosis) * variance.square())):
        error = (spread / effective_draws(values)).sqrt()
        assert bool(((values.mean((0, 1)) - expected).abs() < SIGMAS * error).all())
    assert float(rhat(draws).max()) < 1.02
    torch.testing.assert_close(run.acceptance, torch.full_like(run.acceptance, 0.75), rtol=0, atol=0.2)
