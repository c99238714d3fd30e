"""SWAG: its moments, draws, collection and batchnorm statistics. Each test names the bug that it catches."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import FitContext, Network
from bnn_runner.curvature.sharpness import sharpness
from bnn_runner.errors import Interrupted, RunFailed, UserError
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.swag import SWAG, SWAGPosterior
from bnn_runner.models.mlp import MLP
from bnn_runner.posteriors.batchnorm import recomputed
from bnn_runner.posteriors.swag_moments import PathMoments
from bnn_runner.rng import generator
from bnn_runner.training.schedules import Schedule
from tests.methods.test_dropout import TinyConv
from tests.problems import make_network, make_task


def path(steps: int, size: int, lanes: int = 1) -> Tensor:
    """A drifting path of weights [steps, lanes, size] far from zero, with unequal spreads."""
    steps_taken = torch.randn(steps, lanes, size, generator=generator(0, "swag path"), dtype=torch.float64)
    return 100 + (steps_taken * torch.linspace(0.1, 3, size)).cumsum(0)


def moments_of(theta: Tensor, rank: int) -> PathMoments:
    moments = PathMoments(rank)
    for weights in theta:
        moments.collect([weights[:, :2], weights[:, 2:].reshape(len(weights), -1, 1)])
    return moments


def test_moments_of_a_path() -> None:
    """Planted bugs: the mean's weights off by one; E θ² − (E θ)² in low precision; deviations from the last mean
    for all; the first deviations kept in place of the last."""
    theta = path(9, 5, lanes=2)
    moments = moments_of(theta, rank=4)
    torch.testing.assert_close(moments.mean, theta.mean(0))
    torch.testing.assert_close(moments.squares / moments.count, theta.var(0, correction=0))
    expected = [theta[i] - theta[: i + 1].mean(0) for i in range(5, 9)]
    torch.testing.assert_close(torch.stack(moments.deviations), torch.stack(expected))
    lane = moments.lane(1)
    assert lane.count == 9 and torch.equal(lane.mean, moments.mean[1])
    assert torch.equal(lane.deviations[2], moments.deviations[2][1])


@pytest.mark.parametrize(("rank", "scale"), [(4, 0.5), (0, 1.0)])
def test_the_covariance_of_draws_is_the_stated_one(rank: int, scale: float) -> None:
    """Planted bugs: variance used as standard deviation; R in place of R − 1; ½ applied twice; one z for both parts."""
    moments = moments_of(path(9, 5), rank).lane(0)
    task = make_task("regression", (4,), 1)
    network = make_network(MLP(hidden=()), task)
    posterior = SWAGPosterior((network,), (moments,), scale, None)
    count = 15_000
    draws = torch.stack([posterior.weights(s, 7) for s in range(count)])
    covariance = torch.diag(moments.squares / moments.count)
    if rank:
        deviations = torch.stack(moments.deviations)
        covariance = covariance + deviations.T @ deviations / (rank - 1)
    covariance = scale * covariance
    assert float(((draws.mean(0) - moments.mean) / (covariance.diagonal() / count).sqrt()).abs().max()) < 5
    centred = draws - moments.mean
    error = torch.outer(covariance.diagonal(), covariance.diagonal()) + covariance.square()
    gap = centred.T @ centred / count - covariance
    assert float((gap / (error / count).sqrt()).abs().max()) < 5


def test_a_mixture_takes_its_members_in_turn() -> None:
    """Planted bugs: every draw from the first member; a member's mean with another's spread."""
    theta = path(6, 5, lanes=2)
    theta[:, 1] += 1e6
    both = moments_of(theta, 3)
    task = make_task("regression", (4,), 1)
    networks = tuple(make_network(MLP(hidden=()), task, noise=n, seed=i) for i, n in enumerate((0.1, 0.7)))
    posterior = SWAGPosterior(networks, (both.lane(0), both.lane(1)), 0.5, None)
    assert [float(posterior.weights(s, 0).mean()) > 5e5 for s in range(4)] == [False, True, False, True]
    noise = posterior.draws(4, 0)[1:].likelihood.log_noise.exp().flatten()  # type: ignore[attr-defined]
    torch.testing.assert_close(noise, torch.tensor([0.7, 0.1, 0.7], dtype=torch.float64))


def context_of(**changes: Any) -> FitContext:
    schedule = Schedule("adam", epochs=1, batch_size=16, lr=0.01)
    return replace(FitContext(seed=0, hyper=Fixed(), schedule=schedule), **changes)


def fit(model: Any, shape: tuple[int, ...], context: FitContext, **changes: Any) -> SWAGPosterior:
    task = make_task("regression", shape, 2, num_train=37)
    method = SWAG(**{"size": 2, "epochs": 4, "lr": 0.002, "rank": 2} | changes)
    networks = [make_network(model, task, seed=i) for i in range(method.size)]
    return method.fit(task, networks, context)


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "at once": (MLP(hidden=(5,), norm="batch"), (3,)),
    "one after the other": (TinyConv(), (2, 6, 6)),
}


@pytest.mark.parametrize("stop_at", [5, 12, 17])
@pytest.mark.parametrize("case", CASES)
def test_an_interrupted_collection_goes_on_as_if_it_had_not_been(tmp_path: Path, case: str, stop_at: int) -> None:
    """Planted bugs: moments not saved; momentum begun again; a finished member collected again; deviations lost."""
    model, shape = CASES[case]
    whole = fit(model, shape, context_of())
    seen: list[int] = []

    def progress(stage: str, done: int, total: int) -> None:
        seen.append(done)
        if len(seen) == stop_at and stop_at <= total:
            raise Interrupted("stopped")

    stopped = context_of(checkpoint=tmp_path / "fit.partial", progress=progress)
    total = 12 if case == "at once" else 24
    if stop_at <= total:
        with pytest.raises(Interrupted):
            fit(model, shape, stopped)
    resumed = fit(model, shape, stopped)
    assert seen == list(range(1, total + 1)), "no step is taken twice"
    for a, b in zip(resumed.members, whole.members, strict=True):
        assert a.count == b.count == 4
        assert torch.equal(a.mean, b.mean) and torch.equal(a.squares, b.squares)
        assert all(torch.equal(x, y) for x, y in zip(a.deviations, b.deviations, strict=True))


def test_collection_starts_at_the_networks_and_collects_when_it_says() -> None:
    """Planted bugs: initial weights in place of the trained ones; a collection at every step; the noise forgotten."""
    model, shape = CASES["at once"]
    posterior = fit(model, shape, context_of(), lr=1e-9)
    for network, moments in zip(posterior.networks, posterior.members, strict=True):
        weights = torch.cat([p.flatten() for p in network.parameters.values()])
        torch.testing.assert_close(moments.mean, weights, rtol=0, atol=1e-5)
    assert posterior.report.facts["collected"] == 4 and posterior.report.facts["mean_moved"] < 1e-5
    assert fit(model, shape, context_of(), collect_every=2, epochs=5).report.facts["collected"] == 2
    assert set(posterior.treatment) == set(posterior.networks[0].parameters)


def test_a_path_without_spread_says_so() -> None:
    """Planted bug: the note looks at weights, or at the members of a mixture alone."""
    task = make_task("regression", (3,), 1)
    network = make_network(MLP(hidden=(5,)), task)
    still = SWAG(epochs=4, lr=1e-9).fit(task, [network], context_of())
    assert any("hardly any function diversity" in note and "method.lr" in note for note in still.report.notes)
    assert still.report.facts["function_diversity"] < 1e-4
    moving = SWAG(epochs=40, lr=0.01).fit(task, [network], context_of())
    assert moving.report.facts["function_diversity"] > 0.01
    assert not any("hardly any function diversity" in note for note in moving.report.notes)


def test_diverging_collections_fail_with_the_reason() -> None:
    """Planted bugs: weights of 1e13 that are finite and score; a NaN row."""
    for lr in (1e3, 0.5):
        with pytest.raises(RunFailed, match=r"diverged: .* Lower method\.lr"):
            fit(MLP(hidden=(5,), activation="relu"), (3,), context_of(), lr=lr, epochs=40)


def test_settings_that_cannot_be_are_refused() -> None:
    for changes in ({"size": 0}, {"epochs": 1}, {"lr": 0.0}, {"momentum": 1.0}, {"rank": 1}, {"scale": -1.0}):
        with pytest.raises(UserError, match=f"method.{next(iter(changes))}"):
            SWAG(**changes)  # type: ignore[arg-type]


def test_the_learning_rate_follows_the_curvature() -> None:
    """The largest eigenvalue of X̃ᵀX̃/(Nσ²) for a linear network. Planted bugs: a sum over points; the noise left out."""
    task = make_task("regression", (3,), 1)
    network = make_network(MLP(hidden=()), task, noise=0.2)
    x = torch.cat([task.train.inputs, torch.ones(len(task.train), 1)], dim=1).double()
    exact = float(torch.linalg.eigvalsh(x.T @ x / len(x))[-1]) / 0.2**2
    assert sharpness(network, task, steps=200, tolerance=0.0) == pytest.approx(exact, rel=1e-5)
    posterior = SWAG(epochs=3).fit(task, [network], context_of())
    assert posterior.report.facts["lr"] == pytest.approx(1 / exact, rel=0.2)


def test_batchnorm_statistics_are_those_of_the_training_data() -> None:
    """Planted bugs: the last batch's statistics; those of the MAP weights; a momentum left changed in the module."""
    task = make_task("regression", (3,), 1, num_train=1100)
    network: Network = make_network(MLP(hidden=(4,), norm="batch"), task)
    layer = network.module.norms[0]  # type: ignore[index]
    before = {n: b.clone() for n, b in network.buffers.items()}
    parameters = {n: 2 * p for n, p in network.parameters.items()}
    found = recomputed(network.module, parameters, network.buffers, task.train)
    h = task.train.inputs @ parameters["hidden.0.weight"].T + parameters["hidden.0.bias"]
    torch.testing.assert_close(found["norms.0.running_mean"], h.mean(0))
    torch.testing.assert_close(found["norms.0.running_var"], h.var(0), rtol=0.02, atol=0)  # of three batches
    assert layer.momentum == 0.1 and not any(m is layer and m.training != network.module.training for m in [layer])
    assert all(torch.equal(b, before[n]) for n, b in network.buffers.items())
    method = SWAG(epochs=2, lr=1e-4)
    posterior = method.fit(task, [network], context_of())
    draws = posterior.draws(2, 0)
    weights = draws._networks.weights[1]
    again = recomputed(network.module, {n: weights[n] for n in network.parameters}, network.buffers, task.train)
    torch.testing.assert_close(weights["norms.0.running_mean"], again["norms.0.running_mean"])
    assert not torch.allclose(weights["norms.0.running_mean"], before["norms.0.running_mean"])
    assert "1100 clean training points" in posterior.report.notes[0]
    assert math.isfinite(float(draws(task.test.inputs).sum()))
