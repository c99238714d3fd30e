"""Laplace in function space against the full curvature's posterior (float64)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_functional import LaplaceFunctional
from bnn_runner.rng import generator
from tests.laplace.test_identities import dense_jacobian, small
from tests.problems import context

KINDS = pytest.mark.parametrize("kind", ["regression", "classification"])


@KINDS
def test_exact_draws_and_moments_are_those_of_the_full_curvature(kind: str) -> None:
    """Products at 1e-9; draws at 5 standard errors; unequal precisions.

    Planted bugs: ε left out of Matheron's rule; the prior part not reduced; Λ^½ for Λ^{-½}; the factor transposed.
    """
    task, network = small(kind, layerwise=True)
    full = Laplace(structure="full").fit(task, [network], context(Fixed()))
    posterior = LaplaceFunctional(form="exact").fit(task, [network], context(Fixed()))
    size = sum(p.numel() for p in network.parameters.values())
    random = torch.randn(30, size, generator=generator(0, "projections"), dtype=torch.float64)
    directions = torch.cat([random, dense_jacobian(network, task.test.inputs)])
    exact = full.gaussian.product(directions)
    torch.testing.assert_close(posterior.gaussian.product(directions), exact, rtol=1e-9, atol=1e-9)
    variances, count = (directions * exact).sum(1), 4000
    draws = posterior.gaussian.sample(1, 0, count)
    scores = ((draws @ directions.T).square().mean(0) / variances - 1) / (2 / count) ** 0.5
    assert float(scores.abs().max()) < 5
    a, b = posterior.moments(task.test.inputs), full.moments(task.test.inputs)
    torch.testing.assert_close(a.covariance, b.covariance, rtol=1e-8, atol=1e-10)
    for name in ("evidence_nats", "effective_dimension", "newton_decrement_nats"):
        assert posterior.report.facts[name] == pytest.approx(full.report.facts[name], rel=1e-8)


def test_a_subset_of_the_data_is_the_posterior_of_these_points_alone() -> None:
    """Planted bugs: the evidence over all points; a subset that depends on the number of points asked for."""
    task, network = small("classification")
    posterior = LaplaceFunctional(points=8).fit(task, [network], context(Fixed()))
    order = torch.randperm(len(task.train), generator=generator(0, "fit points"))
    subset = replace(task, train=task.train.subset(order[:8].sort().values))
    full = Laplace(structure="full").fit(subset, [network], context(Fixed()))
    torch.testing.assert_close(
        posterior.moments(task.test.inputs).covariance, full.moments(task.test.inputs).covariance, rtol=1e-8, atol=0
    )
    assert posterior.report.facts["evidence_nats"] == pytest.approx(full.report.facts["evidence_nats"], rel=1e-9)
    assert posterior.report.facts["evidence_over"] == "all weights; 8 of 20 training points"
    assert any("8 of 20 training points" in note for note in posterior.report.notes)


@pytest.mark.parametrize("kept", [True, False], ids=["kernel", "subspace iteration"])
@KINDS
def test_nystrom_features_lack_the_prior_off_them_and_nothing_else(
    kind: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With features for all that the data inform, the exact covariance less the prior's off the features.

    Planted bugs: features of the weighted rows; no whitening; the least eigenvectors; the prior added twice.
    """
    if not kept:
        monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 0)
    task, network = small(kind, num_train=7, layerwise=True)
    full = Laplace(structure="full").fit(task, [network], context(Fixed()))
    rows, x = dense_jacobian(network, task.train.inputs), task.test.inputs
    scale = torch.cat([torch.full((p.numel(),), network.prior_precision[n]) for n, p in network.parameters.items()])
    scaled = rows * scale.double().rsqrt()
    rank = int(torch.linalg.matrix_rank(scaled))
    method = LaplaceFunctional(form="nystrom", features=rank, pivots=100)
    posterior = method.fit(task, [network], context(Fixed()))
    _, _, right = torch.linalg.svd(scaled, full_matrices=False)
    test = dense_jacobian(network, x) * scale.double().rsqrt()
    off = test - test @ right[:rank].T @ right[:rank]
    expected = full.joint_covariance(task.test) - off @ off.T
    torch.testing.assert_close(posterior.joint_covariance(task.test), expected, rtol=1e-5, atol=1e-6)
    assert posterior.report.facts["variance_off_the_features"]["train"] < 1e-6
    other = dense_jacobian(network, task.ood["other"].inputs) * scale.double().rsqrt()
    missing = (other - other @ right[:rank].T @ right[:rank]).square().sum(1).mean()
    assert posterior.report.facts["variance_off_the_features"]["ood/other"] == pytest.approx(float(missing), rel=1e-4)
    assert posterior.report.facts["evidence_nats"] == pytest.approx(full.report.facts["evidence_nats"], rel=1e-6)
    assert any("variance off them" in note and "ood/other" in note for note in posterior.report.notes)


@pytest.mark.parametrize("pivots", [3, 100], ids=["pivots kept, rows not", "neither kept"])
def test_features_of_a_float32_network_are_those_of_the_float64_one(
    pivots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bug: eigenvectors of kept rows, which are float64, multiplied with rows that are not."""
    found = []
    for dtype in (torch.float64, torch.float32):
        task, network = small("classification")
        size = sum(p.numel() for p in network.parameters.values())
        monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 8 * size * 3 * 4)
        task = task.to(torch.device("cpu"), dtype)
        network = replace(network, parameters={n: p.to(dtype) for n, p in network.parameters.items()})
        posterior = LaplaceFunctional(form="nystrom", features=5, pivots=pivots).fit(task, [network], context(Fixed()))
        found.append(posterior.moments(task.test.inputs).covariance.double())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4 * float(found[0].abs().max()))


def test_fewer_features_keep_less_variance_and_the_evidence_is_differentiable() -> None:
    task, network = small("classification")
    made: list[Any] = [
        LaplaceFunctional(form="nystrom", features=r, pivots=10).fit(task, [network], context(Evidence()))
        for r in (2, 8, 20)
    ]
    assert all(p.report.facts["hyper_status"] == "converged" for p in made)
    one = [
        LaplaceFunctional(form="nystrom", features=r, pivots=10).fit(task, [network], context(Fixed(1.0)))
        for r in (2, 8, 20)
    ]
    variances = [p.moments(task.test.inputs).covariance.diagonal(dim1=1, dim2=2).mean() for p in one]
    missing = [p.report.facts["variance_off_the_features"]["train"] for p in one]
    assert variances == sorted(variances) and missing == sorted(missing, reverse=True)
