"""Sampled Laplace against the exact posterior of the same curvature (float64)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bnn_runner.hyper import Fixed
from bnn_runner.linearised import rows as row_module
from bnn_runner.linearised import sampling
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_sampled import LaplaceSampled
from bnn_runner.streams import generator
from tests.numerics.small_problems import context
from tests.numerics.test_laplace_identities import dense_jacobian, small

SGD = LaplaceSampled(solver="sgd", sgd_passes=250, sgd_batch_size=5, samples=2, probes=0)
METHODS = {
    "cg": (LaplaceSampled(tolerance=1e-3, samples=2, probes=0), False),
    "cg, rows made anew": (LaplaceSampled(tolerance=1e-3, samples=2, probes=0), True),
    "sgd": (SGD, False),
    "sgd, noisy targets": (replace(SGD, objective="noisy_targets"), False),
}


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("name", METHODS)
def test_draws_have_the_covariance_of_the_whole_curvature(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random projections of the weights, and the outputs at test points, at 5 standard errors; unequal precisions.

    Planted bugs: no prior noise; noise ε without its root R; Λ for Λ^½; a minibatch's sum not scaled to N;
    softmax's root squared.
    """
    method, anew = METHODS[name]
    if anew:
        monkeypatch.setattr(row_module, "KEPT_BYTES", 0)
    task, network = small(kind, layerwise=True)
    exact = Laplace(structure="full").fit(task, [network], context(Fixed())).gaussian
    posterior = method.fit(task, [network], context(Fixed()))
    count = 150 if anew else 600
    monkeypatch.setattr(sampling, "draws_at_once", lambda size: count)
    draws = posterior.gaussian.sample(1, 0, count)
    random = torch.randn(25, draws.shape[1], generator=generator(0, "projections"), dtype=torch.float64)
    directions = torch.cat([random, dense_jacobian(network, task.test.inputs)])
    variances = (directions @ exact.product(directions).T).diagonal()
    found = (draws @ directions.T).square().mean(0)
    scores = (found / variances - 1) / (2 / count) ** 0.5
    assert float(scores.abs().max()) < 5
    means = (draws @ directions.T).mean(0) / (variances / count).sqrt()
    assert float(means.abs().max()) < 5


def test_the_stated_error_bounds_the_true_one() -> None:
    """Against the exact solution in every random direction. Planted bugs: the recursion's residual; ‖r‖ without Λ."""
    task, network = small("classification", layerwise=True)
    exact = Laplace(structure="full").fit(task, [network], context(Fixed())).gaussian
    for method in (LaplaceSampled(passes=6), LaplaceSampled(tolerance=0.05), replace(SGD, sgd_passes=10)):
        posterior = method.fit(task, [network], context(Fixed()))
        precise = replace(method, solver="cg", tolerance=1e-9, passes=500).fit(task, [network], context(Fixed()))
        error = posterior.gaussian.sample(0, 0, 2) - precise.gaussian.sample(0, 0, 2)
        precisions = torch.tensor(posterior.gaussian.precisions, dtype=torch.float64)
        rows = posterior.gaussian.rows
        h = row_module.TrainingRows.product(rows, torch.eye(rows.size, dtype=torch.float64))
        each = precisions.repeat_interleave(torch.tensor([p.numel() for p in network.parameters.values()]))
        energy = (error * (error @ (h + torch.diag(each)))).sum(1).sqrt()  # the largest error of any direction, in sd
        bound = posterior.report["sample_error_sd"]
        assert 1e-6 < float(energy.max()) <= bound
        assert bound <= 0.05 or posterior.report["solver"] != "cg" or posterior.report["notes"]
        random = torch.randn(50, rows.size, generator=generator(0, "projections"), dtype=torch.float64)
        spread = (random @ exact.product(random).T).diagonal().sqrt()
        assert float(((error @ random.T) / spread).abs().max()) <= bound
