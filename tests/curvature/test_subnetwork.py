"""Laplace over single weights against the dense curvature, float64; against laplace-torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.fixed_point import FixedPoint
from bnn_runner.methods.laplace_subnetwork import LaplaceSubnetwork
from bnn_runner.models.cnn import CNN
from bnn_runner.models.mlp import MLP
from tests.laplace.test_identities import dense_curvature, dense_jacobian, places, small
from tests.problems import context, make_network, make_task


def flat(network: Network) -> Tensor:
    return torch.cat([p.flatten() for p in network.parameters.values()])


@pytest.mark.parametrize("select", ["largest_variance", "random"])
@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_posterior_is_that_of_the_chosen_weights(kind: str, structure: Any, select: Any) -> None:
    """Planted bugs: rows and columns of a weight exchanged; the penalty of all weights; the inverse cut out after."""
    task, network = small(kind, num_train=25)
    method = LaplaceSubnetwork(num_weights=0.4, select=select, structure=structure)
    posterior = method.fit(task, [network], context(Fixed(0.5)))
    index = places(network, posterior.jacobians)
    assert len(index) == round(0.4 * network.num_parameters) == posterior.report.facts["weights_in_basis"]
    assert posterior.report.facts["evidence_over"].startswith(f"{len(index)} of {network.num_parameters} weights")
    curvature = dense_curvature(task, network)[index][:, index]
    if structure == "diag":
        curvature = torch.diag(curvature.diagonal())
    precision = curvature + 0.5 * torch.eye(len(index), dtype=torch.float64)
    rows = dense_jacobian(network, task.test.inputs)[:, index]
    expected = rows @ torch.linalg.solve(precision, rows.T)
    torch.testing.assert_close(posterior.joint_covariance(task.test), expected, rtol=1e-8, atol=1e-11)
    penalty = 0.5 * float(flat(network)[index].square().sum())
    log_det = float(torch.logdet(precision / 0.5))
    evidence = posterior.report.facts["train_loglik_nats"] - 0.5 * (penalty + log_det)
    assert posterior.report.facts["evidence_nats"] == pytest.approx(evidence, rel=1e-9)
    draws = posterior.draws(4000, 1)(task.test.inputs).flatten(1)
    variance = expected.diagonal()
    assert float(((draws.var(0) - variance) / (variance * (2 / 4000) ** 0.5)).abs().max()) < 5


def test_the_chosen_weights_have_the_largest_variances_and_none_is_dead() -> None:
    """Planted bugs: the smallest variances; the precision left out; weights that data never reach take the places."""
    task, network = small("classification", num_train=25, layerwise=True)
    dead = task.train.inputs.clone()
    dead[:, 1] = 0.0
    task = replace(task, train=replace(task.train, inputs=dead))
    diagonal = dense_curvature(task, network).diagonal()
    lam = torch.cat([torch.full((p.numel(),), network.prior_precision[n]) for n, p in network.parameters.items()])
    variance = torch.where(diagonal > 0, 1 / (diagonal + lam), 0)
    posterior = LaplaceSubnetwork(num_weights=30).fit(task, [network], context())
    index = places(network, posterior.jacobians)
    assert set(index.tolist()) == set(variance.topk(30).indices.tolist())
    hidden = network.parameters["hidden.0.weight"].shape[0]
    assert posterior.report.facts["subnetwork_never_reached"] == hidden
    assert any("dead" in note for note in posterior.report.notes)
    every = LaplaceSubnetwork(num_weights=10**6, modules=("hidden.0", "out")).fit(task, [network], context())
    assert not any(n.startswith("hidden.1") for n in every.jacobians.names)


def test_modules_by_name_and_what_is_refused() -> None:
    """Planted bugs: a prefix of a name (hidden.1 also names hidden.10); a wrong name that chooses nothing."""
    task, network = small("classification")
    posterior = LaplaceSubnetwork(num_weights=None, modules=("out", "hidden.0.bias")).fit(task, [network], context())
    sizes = {n: network.parameters[n].numel() for n in ("hidden.0.bias", "out.weight", "out.bias")}
    assert posterior.jacobians.sizes() == sizes
    assert posterior.report.facts["evidence_over"].endswith("weights, all in out, hidden.0.bias")
    assert posterior.treatment["hidden.0.weight"] == "held at MAP (outside the basis)"
    n = sizes["out.weight"]
    assert posterior.treatment["out.weight"] == f"full curvature over {n} of its {n} weights, the rest held at MAP"
    with pytest.raises(RunFailed, match="Did you mean"):
        LaplaceSubnetwork(num_weights=3, modules=("hiden.0",)).fit(task, [network], context())
    for wrong in (0, -1, 1.5, 0.0, None):
        with pytest.raises(UserError, match=r"method\.num_weights"):
            LaplaceSubnetwork(num_weights=wrong)


def test_convolutions_choose_the_right_entries() -> None:
    """Both ways of taking columns (few weights by positions, many by the whole). Planted bug: kernel and channel."""
    task = make_task("classification", (1, 8, 8), 3, num_train=6)
    network = make_network(CNN(channels=[3, 4], kernels=[3, 3]), task)
    rows = dense_jacobian(network, task.test.inputs)
    for size in (12, 0.9):
        posterior = LaplaceSubnetwork(num_weights=size, select="random").fit(task, [network], context())
        index = places(network, posterior.jacobians)
        made = posterior.jacobians(task.test.inputs).dense().flatten(0, 1)
        torch.testing.assert_close(made, rows[:, index], rtol=1e-9, atol=1e-12)
        moved = posterior.jacobians.moved(torch.ones(len(index), dtype=torch.float64))
        change = torch.cat([(moved[n] - p).flatten() for n, p in network.parameters.items()])
        torch.testing.assert_close(change, torch.zeros_like(change).index_fill(0, index, 1.0))


def test_tangent_mode_and_rules_work_on_the_chosen_weights() -> None:
    """v* moves the chosen weights alone; rules agree. Planted bug: the gradient of weights that are held."""
    task, network = small("classification", num_train=40)
    found = {}
    for rule in (Evidence(), FixedPoint(tolerance=1e-9)):
        method = LaplaceSubnetwork(num_weights=15, mode="tangent")
        posterior = method.fit(task, [network], context(rule))
        assert posterior.report.facts["tangent_gradient"] < 1e-6 and posterior.report.facts["tangent_settled"]
        assert posterior.report.facts["scale_invariant"] == []
        found[type(rule)] = posterior.report.facts["evidence_nats"]
    assert found[Evidence] == pytest.approx(found[FixedPoint], abs=1e-4)
    normed = make_network(MLP(hidden=(5, 4), norm="layer"), task)
    assert LaplaceSubnetwork(num_weights=15).fit(task, [normed], context()).report.facts["scale_invariant"] == []
