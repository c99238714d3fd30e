"""Runs of chains: diagnostics, resuming, weights, lanes, and what is refused or told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import FitContext, Network
from bnn_runner.errors import Interrupted, RunFailed, UserError
from bnn_runner.mcmc.chains import ChainBatches
from bnn_runner.mcmc.diagnostics import effective_draws, rhat
from bnn_runner.mcmc.initialisation import largest_curvature
from bnn_runner.mcmc.posterior import ChainPosterior
from bnn_runner.mcmc.steps import Cyclical, Polynomial, evenly_kept
from bnn_runner.mcmc.target import LogPosterior
from bnn_runner.methods.hmc import HMC
from bnn_runner.methods.sgmcmc import StochasticGradientMCMC
from bnn_runner.models.mlp import MLP
from bnn_runner.rng import generator
from bnn_runner.runtime.torch_state import evaluation_mode
from bnn_runner.tasks import Task
from bnn_runner.training.schedules import Schedule
from tests.problems import context, make_network, make_task

SMALL: dict[str, Any] = {"chains": 3, "length": 12, "keep": 18, "step": 1e-4}
METHODS: dict[str, Callable[..., Any]] = {
    "sgld": lambda **k: StochasticGradientMCMC(**SMALL | k),
    "psgld": lambda **k: StochasticGradientMCMC("preconditioned", **SMALL | k),
    "sghmc": lambda **k: StochasticGradientMCMC("hamiltonian", **SMALL | k),
    "csgld": lambda **k: StochasticGradientMCMC(**SMALL | {"cycles": 3} | k),
    "hmc": lambda **k: HMC(chains=3, warmup=8, draws=6, max_leapfrogs=6, **k),
}
every_method = pytest.mark.parametrize("name", METHODS)


def problem(kind: str = "regression") -> tuple[Task, list[Network]]:
    task = make_task(kind, (2,), 2, num_train=20)
    return task, [make_network(MLP(hidden=(4,)), task, seed=i) for i in range(3)]


def going(**changes: Any) -> FitContext:
    return replace(context(), schedule=Schedule(epochs=1, batch_size=7), **changes)


# -------------------------------------------------------------------------------- diagnostics


def autoregressive(rho: float, lanes: int = 4, count: int = 4000) -> Tensor:
    """Chains of variance 1 and correlation rho, [L, M, 1]."""
    noise = torch.randn(lanes, count, generator=generator(5, "ar"), dtype=torch.float64)
    values = [noise[:, 0]]
    for t in range(1, count):
        values.append(rho * values[-1] + math.sqrt(1 - rho**2) * noise[:, t])
    return torch.stack(values, 1).unsqueeze(-1)


@pytest.mark.parametrize("rho", [0.9, 0.0, -0.5])
def test_effective_draws_of_autoregressive_chains(rho: float) -> None:
    """S (1−ρ)/(1+ρ). Planted bugs: one chain's worth of draws; lags summed once and not twice."""
    expected = 16000 * (1 - rho) / (1 + rho)
    assert float(effective_draws(autoregressive(rho))) == pytest.approx(expected, rel=0.15)


def test_rhat_sees_shift_scale_and_drift() -> None:
    """Planted bugs: chains not split; not folded, so that unequal spread passes."""
    good = autoregressive(0.3, count=400)
    lane = torch.tensor([0.0, 0, 0, 1]).reshape(4, 1, 1)
    drift = torch.linspace(-1, 1, 400).reshape(1, 400, 1)
    assert 0.99 < float(rhat(good)) < 1.02
    for bad in (good + 2 * lane, good * (1 + 8 * lane), good + 2 * drift):
        assert float(rhat(bad)) > 1.1
    assert float(rhat(good.exp() ** 3)) == pytest.approx(float(rhat(good)), abs=0.02), "ranks alone count"
    assert math.isnan(float(rhat(good[:, :3]))) and math.isnan(float(effective_draws(good[:, :3])))
    assert math.isnan(float(effective_draws(torch.ones(2, 10, 1))))


# -------------------------------------------------------------------------------------- steps


def test_step_sizes() -> None:
    """Planted bugs: last reached one step late; a cycle that begins at zero; draws kept in burn-in or exploration."""
    steps = Polynomial(0.01, 0.0001, 0.55, 1_000_000)
    assert steps.a == pytest.approx(0.1996, abs=5e-5) and steps.b == pytest.approx(231.07, abs=5e-3)
    assert steps.at(0) == 0.01 and steps.at(999_999) == pytest.approx(0.0001)
    assert Polynomial(0.3, 0.3, 0.55, 10).at(9) == 0.3
    cycle = Cyclical(0.4, 3, 30, 0.5)
    assert cycle.at(0) == cycle.at(10) == 0.4 and cycle.at(5) == pytest.approx(0.2)
    assert [t for t in range(10) if cycle.samples(t)] == [5, 6, 7, 8, 9]
    assert [cycle.noisy(4), cycle.noisy(5), replace(cycle, explore_noise=True).noisy(4)] == [False, True, True]
    assert evenly_kept(cycle, 0, 30, 5) == [7, 15, 18, 26, 29]
    assert evenly_kept(steps, 2, 10, 4) == [3, 5, 7, 9] and evenly_kept(steps, 8, 10, 4) == [8, 9]


def test_draws_keep_the_weight_of_their_step() -> None:
    """Planted bugs: weights in the order of steps while draws are shuffled; SGHMC's weight not halved."""
    task, networks = problem()
    posterior = METHODS["sgld"](last_fraction=0.01).fit(task, networks, going())
    steps = Polynomial(1e-4, 1e-6, 0.55, 36)
    kept = evenly_kept(steps, 7, 36, 6)
    torch.testing.assert_close(posterior.log_weights, torch.tensor([math.log(steps.at(t)) for t in kept]).double())
    draws = posterior.draws(10, seed=4)
    for weight, log_weight in zip(draws.weights, draws.log_weights, strict=True):
        place = (posterior.weights == weight).all(-1).nonzero()[0, 1]
        assert log_weight == posterior.log_weights[place]
    momentum = METHODS["sghmc"](last_fraction=0.01).fit(task, networks, going())
    torch.testing.assert_close(momentum.log_weights, posterior.log_weights / 2)
    assert float(METHODS["csgld"]().fit(task, networks, going()).log_weights.abs().max()) == 0
    assert len(posterior.draws(1000, 0)) == 18, "no more than there are"


# ------------------------------------------------------------------------------------- target


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_log_posterior_and_its_minibatches(kind: str) -> None:
    """Planted bugs: N for a batch's mean left out; a point dropped or seen twice in an epoch; another lane's points;
    the noise's variance left out of the Gaussian's slope.
    """
    task, networks = problem(kind)
    target = LogPosterior(networks, networks[0], 20, torch.float64)
    w = target.start
    everything = torch.arange(20).expand(3, 20)
    with evaluation_mode(target.module):
        value, gradient = target(w, *task.train.gather(everything))  # type: ignore[arg-type]
        for i, network in enumerate(networks):
            direct = network.likelihood.log_prob(network(task.train.inputs), task.train.targets).sum()
            direct -= 0.35 * sum(p.square().sum() for p in network.parameters.values())
            assert float(value[i]) == pytest.approx(float(direct))
        batches = ChainBatches(task.train, [7, 8, 9], 5)
        parts = torch.stack([target(w, *batches.at(t))[1] for t in range(4, 8)])
        torch.testing.assert_close(parts.mean(0), gradient)
        assert not torch.equal(batches.at(0)[0][0], batches.at(0)[0][1]), "each chain has its own order"
        curvature = largest_curvature(lambda v: target(v, *task.train.gather(everything))[1], w, 0)  # type: ignore[arg-type]
        one = LogPosterior(networks[:1], networks[0], 20, torch.float64)

        def value_of(flat: Tensor) -> Tensor:
            outputs = one.outputs(flat[None], task.train.inputs[None])
            return -one.likelihood.log_prob(outputs, task.train.targets).sum() + 0.35 * flat.square().sum()

        slopes = torch.stack([-torch.autograd.functional.jacobian(value_of, v) for v in w])
        torch.testing.assert_close(gradient, slopes)
        largest = max(float(torch.linalg.eigvalsh(torch.autograd.functional.hessian(value_of, v))[-1]) for v in w)
    assert curvature == pytest.approx(largest, rel=0.1)


# ------------------------------------------------------------------------------ going on, lanes


@every_method
def test_an_interrupted_chain_goes_on_to_the_same_draws(name: str, tmp_path: Path) -> None:
    """Planted bugs: momentum or adaptation not saved; noise or order that begins again; a draw lost or doubled."""
    task, networks = problem()
    method = METHODS[name]()
    whole = method.fit(task, networks, going())
    path = tmp_path / "fit.partial"
    stops = [5, 9, 12]

    def progress(stage: str, done: int, total: int) -> None:
        if stops and done == stops[0]:
            stops.pop(0)
            raise Interrupted("stop")

    for _ in range(3):
        with pytest.raises(Interrupted):
            method.fit(task, networks, going(checkpoint=path, progress=progress))
        assert path.exists()
    resumed = method.fit(task, networks, going(checkpoint=path, progress=progress))
    assert torch.equal(resumed.weights, whole.weights)
    assert resumed.report == whole.report
    other = replace(method, posterior_temperature=2.0).fit(task, networks, going(checkpoint=path))
    fresh = replace(method, posterior_temperature=2.0).fit(task, networks, going())
    assert torch.equal(other.weights, fresh.weights), "the state of other chains is not resumed"
    path.write_bytes(b"damaged")
    assert torch.equal(method.fit(task, networks, going(checkpoint=path)).weights, whole.weights)


@every_method
def test_a_chain_among_others_is_the_chain_alone(name: str) -> None:
    """Planted bugs: a shared accept or step size; noise that depends on the number of chains."""
    task, networks = problem()
    many = METHODS[name]().fit(task, networks, going())
    alone = {"chains": 1} if name == "hmc" else {"chains": 1, "keep": 6}
    one = replace(METHODS[name](), **alone).fit(task, networks[:1], going())
    torch.testing.assert_close(one.weights[0], many.weights[0], rtol=1e-9, atol=1e-9)


def test_starts() -> None:
    """Planted bug: untrained networks' noise taken for the target."""
    task, networks = problem()
    for start, trained in (("map", [True]), ("members", [True] * 3), ("initial", [True, False, False, False])):
        method = METHODS["sgld"](start=start)
        specs = method.needs()
        assert [s.trained for s in specs] == trained
        given = [networks[0], *networks][: len(specs)] if start == "initial" else networks[: len(specs)]
        posterior = method.fit(task, given, going())
        assert posterior.likelihood.log_noise is not None and len(posterior.weights) == 3
        assert all("noise held" in rule for rule in posterior.treatment.values())


# --------------------------------------------------------------------------------------- told


@pytest.mark.parametrize("name", ["sgld", "sghmc"])
def test_a_diverging_chain_fails_and_names_the_step(name: str) -> None:
    """Planted bug: NaN weights kept, so that the row holds NaN."""
    task, networks = problem()
    with pytest.raises(RunFailed, match=r"diverged.*Lower method\.step"):
        METHODS[name](step=10.0, length=200).fit(task, networks, going())


def test_chains_that_have_not_mixed_or_do_not_move_say_so() -> None:
    """Planted bug: the note looks at weights, where any two networks differ."""
    task, networks = problem()
    apart = METHODS["sgld"](step=1e-9).fit(task, networks, going())
    assert apart.report.facts["rhat"] > 1.1 and any("have not mixed" in n for n in apart.report.notes)
    still = METHODS["sgld"](step=1e-9, start="map").fit(task, networks[:1], going())
    assert any("hardly any function diversity" in n for n in still.report.notes)
    short = METHODS["sgld"](keep=3).fit(task, networks, going())
    assert short.report.facts["rhat"] is None and any("require 4 draws" in n for n in short.report.notes)


def test_what_cannot_be_is_refused() -> None:
    task, networks = problem()
    with pytest.raises(UserError, match=r"10000000 draws of 22 weights must fit .*method.keep"):
        METHODS["sgld"](keep=10_000_000, max_gigabytes=0.1).fit(task, networks, going())
    with pytest.raises(UserError, match=r"at least one draw.*method.length"):
        METHODS["csgld"](cycles=36).fit(task, networks, going())
    with pytest.raises(UserError) as error:
        StochasticGradientMCMC(chains=0, step=-1.0, burn_in=1.0)
    assert len(error.value.problems) == 3
    big = make_network(MLP(hidden=(200, 100)), task)
    with pytest.raises(UserError, match=r"method=sghmc.*method.force=true"):
        HMC().fit(task, [big] * 4, going())


def test_stored_draws_stand_for_all_chains() -> None:
    """Planted bug: draws in the order of chains, so that the first of them are one chain's burn-in end."""
    task, networks = problem()
    posterior: ChainPosterior = METHODS["hmc"]().fit(task, networks, going())
    draws = posterior.draws(9, 0)
    lanes = {int((posterior.weights == w).all(-1).nonzero()[0, 0]) for w in draws.weights}
    assert lanes == {0, 1, 2}
