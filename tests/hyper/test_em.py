"""EM for the prior precisions ends where MacKay's fixed point and the gradient end, exact and by samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bnn_runner.errors import UserError
from bnn_runner.hyper.em import EM, _Search
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed_point import FixedPoint
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_sampled import LaplaceSampled
from bnn_runner.models.mlp import MLP
from tests.laplace.test_identities import dense_curvature, problem_of, small
from tests.problems import context, make_network, make_task


@pytest.mark.parametrize("family", ["isotropic", "layerwise"])
@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
def test_em_ends_where_the_fixed_point_and_the_gradient_end(structure: Any, family: Any) -> None:
    """Planted bugs: γ for D − γ; sizes of the whole basis for those of a group; a leap that is not undone."""
    task, network = small("classification", num_train=40)
    network = replace(network, parameters={n: 2 * p for n, p in network.parameters.items()})
    problem = problem_of(Laplace(structure=structure), task, network)
    expected = EM(family=family).choose(problem)
    settled = FixedPoint(family=family, tolerance=1e-9, steps=2000).choose(problem)
    climbed = Evidence(family=family).choose(problem)
    assert expected.status == settled.status == climbed.status
    torch.testing.assert_close(expected.precisions.log(), settled.precisions.log(), atol=1e-5, rtol=0)
    if climbed.status == "converged":
        torch.testing.assert_close(expected.precisions.log(), climbed.precisions.log(), atol=1e-3, rtol=0)
        assert expected.facts["hyper_gradient"] < 1e-4
    assert expected.facts["hyper_iterations"] < 400


def test_an_em_step_is_the_expected_square_and_raises_the_evidence() -> None:
    """Against the dense covariance. Planted bugs: variances without ‖w‖²; the trace of H for that of Σ."""
    task, network = small("classification", num_train=25)
    problem = problem_of(Laplace(structure="full"), task, network)
    precisions = torch.linspace(0.3, 2.0, len(problem.names), dtype=torch.float64)
    sizes = [p.numel() for p in network.parameters.values()]
    diagonal = precisions.repeat_interleave(torch.tensor(sizes))
    variances = torch.linalg.inv(dense_curvature(task, network) + torch.diag(diagonal)).diagonal().split(sizes)
    expected = [
        p.numel() / float(p.square().sum() + v.sum())
        for p, v in zip(network.parameters.values(), variances, strict=True)
    ]
    moved = _Search(problem, torch.arange(len(sizes))).step(precisions.log())[0].exp()
    torch.testing.assert_close(moved, torch.tensor(expected, dtype=torch.float64), rtol=1e-8, atol=0)
    assert float(problem.evidence(moved)) > float(problem.evidence(precisions))


def test_em_by_samples_ends_near_the_exact_one_and_says_how_many() -> None:
    """Within 5 standard errors of γ, which are what the fixed point has in log λ at least."""
    task = make_task("regression", (3,), 1, num_train=40)
    network = make_network(MLP(hidden=(6,)), task)
    method = LaplaceSampled(samples=64, probes=0, tolerance=1e-4)
    by_samples = method.fit(task, [network], context(EM())).report.facts
    exact = Laplace(structure="full").fit(task, [network], context(EM())).report.facts
    assert by_samples["em_e_step"] == "64 posterior samples" and exact["em_e_step"] == "exact moments"
    error = by_samples["effective_dimension_standard_error"] / by_samples["effective_dimension"]
    ratio = torch.log(torch.tensor(by_samples["prior_precision"] / exact["prior_precision"]))
    assert 0 < float(ratio.abs()) < 5 * error


def test_em_that_runs_away_is_held_and_bad_settings_are_refused() -> None:
    task, network = small("regression")
    some = replace(network, parameters=network.parameters | {"hidden.1.weight": torch.zeros(4, 5, dtype=torch.float64)})
    posterior = Laplace(structure="kfac").fit(task, [some], context(EM(family="layerwise")))
    assert posterior.report.facts["hyper_status"] == "at bound"
    assert 1e3 < posterior.report.facts["prior_precisions"]["hidden.1.weight"] < 1e6
    assert any("hidden.1.weight" in note for note in posterior.report.notes)
    short = Laplace(structure="kfac").fit(task, [network], context(EM(steps=3)))
    assert short.report.facts["hyper_status"] == "not converged"
    with pytest.raises(UserError, match="tolerance") as refused:
        EM(steps=0, tolerance=0.0)
    assert len(refused.value.problems) == 2
