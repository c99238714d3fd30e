"""Where linearised Laplace is exact Bayesian linear regression, it agrees with scipy's Gaussians (float64)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import linalg, stats

from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.laplace import Laplace
from tests.laplace.test_identities import linear_gaussian
from tests.problems import context

EXACT = {
    "full": Laplace(structure="full"),
    "block": Laplace(structure="block"),
    "kfac, weight and bias together": Laplace(structure="kfac", bias="joint"),
    "ekfac, weight and bias together": Laplace(structure="ekfac", bias="joint"),
    "last layer": Laplace(structure="full", weights="last_layer"),
    "tangent": Laplace(structure="full", mode="tangent"),
    "auto": Laplace(mode="auto"),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("num_train", [40, 4])
def test_a_linear_gaussian_task_agrees_with_scipy(name: str, num_train: int) -> None:
    """Evidence and the joint of all test points at 1e-9. Planted bugs: σ for σ²; λ for 1/λ; units of the
    target; at v* the penalty of w*."""
    exact = linear_gaussian(num_train, precision=0.4, sigma=0.7)
    x, y = exact.task.train.inputs.numpy(), exact.task.train.targets
    assert y is not None
    scale = float(exact.task.target_scale)
    network = exact.network
    if "tangent" in name:  # its evidence is exact from other weights too
        network = replace(network, parameters={n: p + 0.2 for n, p in network.parameters.items()})
    posterior: Any = EXACT[name].fit(exact.task, [network], context(Fixed()))

    phi = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    gram = phi @ phi.T / 0.4 + 0.7**2 * np.eye(len(phi))
    evidence = stats.multivariate_normal(np.zeros(len(phi)), gram).logpdf(y[:, 0].numpy()) - len(phi) * np.log(scale)
    assert posterior.report.facts["evidence_nats"] == pytest.approx(float(evidence), rel=1e-9)

    new = exact.task.test.inputs.numpy()
    psi = np.concatenate([new, np.ones((len(new), 1))], axis=1)
    gain = linalg.cho_solve(linalg.cho_factor(gram), phi @ psi.T / 0.4)
    covariance = psi @ psi.T / 0.4 - (psi @ phi.T / 0.4) @ gain
    np.testing.assert_allclose(posterior.joint_covariance(exact.task.test).numpy(), covariance, rtol=1e-8, atol=1e-10)
    if network is exact.network:
        mean = gain.T @ y[:, 0].numpy()
        np.testing.assert_allclose(posterior.moments(exact.task.test.inputs).mean[:, 0], mean, rtol=1e-9, atol=1e-11)
        targets = exact.task.test.targets
        assert targets is not None
        noise = 0.7**2 * np.eye(len(new))
        joint = stats.multivariate_normal(mean, covariance + noise).logpdf(targets[:, 0].numpy())
        made = posterior.joint_covariance(exact.task.test).numpy() + noise
        centre = posterior.centre(exact.task.test.inputs)[:, 0].numpy()
        ours = stats.multivariate_normal(centre, made).logpdf(targets[:, 0].numpy())
        assert float(ours) == pytest.approx(float(joint), rel=1e-9)
