"""Newton steps for v*: sampled rows as a preconditioner, bounds on what is left, and descent as a start (float64)."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.products import Differentiated
from bnn_runner.laplace import sampled_rows as sampling
from bnn_runner.laplace import tangent_sgd
from bnn_runner.laplace.sampled_rows import sampled_rows
from bnn_runner.laplace.tangent_optimum import TangentModel
from bnn_runner.laplace.tangent_state import dual_gap, gradient_gap
from bnn_runner.models.mlp import MLP
from bnn_runner.tasks import Task
from tests.laplace.test_identities import dense_jacobian
from tests.problems import make_network, make_task


def problem(kind: Any = "classification", points: int = 40, scale: float = 3.0) -> tuple[Task, Network, Tensor]:
    """A network with labels of its own, sure of most of them; inputs of unequal scales, so that H is badly scaled."""
    task = make_task(kind, (4,), 3, num_train=points)
    inputs = task.train.inputs
    assert isinstance(inputs, Tensor)
    task = replace(task, train=replace(task.train, inputs=inputs * torch.tensor([0.1, 1.0, 3.0, 10.0])))
    network = make_network(MLP((6,), "tanh"), task)
    network = replace(network, parameters={n: scale * p for n, p in network.parameters.items()})
    precisions = torch.full((sum(p.numel() for p in network.parameters.values()),), 0.05, dtype=torch.float64)
    return task, network, precisions


def model_of(task: Task, network: Network) -> TangentModel:
    return TangentModel(task, Jacobians(network))


def curvature(task: Task, network: Network, outputs: Tensor) -> Tensor:
    """H at outputs h, densely."""
    roots = network.likelihood.curvature_root(outputs)
    rows = dense_jacobian(network, task.train.inputs).view(*outputs.shape, -1)
    each = torch.einsum("nkc,nkp->ncp", roots, rows).flatten(0, 1)
    return each.T @ each


def drawn(task: Task, network: Network, precisions: Tensor, outputs: Tensor, seed: int = 1) -> Any:
    roots = network.likelihood.curvature_root(outputs)
    return sampled_rows(task.train, Jacobians(network), roots, precisions, seed)


def test_all_rows_give_the_exact_inverse() -> None:
    """Planted bugs: Λ for Λ⁻¹ in the Gram matrix; a row's point for its column; held weights moved."""
    task, network, precisions = problem(points=20)
    precisions = precisions * torch.linspace(1, 4, len(precisions), dtype=torch.float64)
    precisions[::5] = 0
    free = precisions > 0
    outputs = network(task.train.inputs)
    h = curvature(task, network, outputs)[free][:, free] + torch.diag(precisions[free])
    v = torch.linspace(-1, 1, len(precisions), dtype=torch.float64)
    found = drawn(task, network, precisions, outputs).product(v)
    torch.testing.assert_close(found[free], torch.linalg.solve(h, v[free]), rtol=1e-6, atol=1e-8)
    assert not bool(found[~free].any())


def test_some_rows_have_the_curvature_as_their_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the trace and by random directions at 4 standard errors. Planted bugs: weights 1/√π; π not at most 1."""
    monkeypatch.setattr(sampling, "MOST_ROWS", 12)
    task, network, precisions = problem()
    outputs = network(task.train.inputs)
    h = curvature(task, network, outputs)
    v = torch.randn(len(h), 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values, counts = [], []
    for seed in range(60):
        rows = drawn(task, network, precisions, outputs, seed).rows
        values.append(torch.cat([rows.square().sum().view(1), (rows @ v).square().sum(0)]))
        counts.append(float(len(rows)))
    exact = torch.cat([h.trace().view(1), torch.einsum("ps,pq,qs->s", v, h, v)])
    found = torch.stack(values)
    error = found.std(0) / math.sqrt(len(found))
    assert bool(((found.mean(0) - exact).abs() < 4 * error).all())
    assert 8 < sum(counts) / len(counts) < 14


def test_forward_and_reverse_products_agree() -> None:
    """Also where only some weights of a tensor are in the basis. Planted bug: their places in the whole tensor."""
    task, network, _ = problem(points=5)
    chosen = {"hidden.0.weight": torch.tensor([1, 7, 20]), "out.bias": torch.tensor([2, 0])}
    jacobians = Jacobians(network, tuple(chosen), chosen)
    products = Differentiated(jacobians, task.train.inputs)
    v = torch.randn(5, dtype=torch.float64)
    forward = products.jvp(v)
    assert jacobians.forward_mode
    jacobians.forward_mode = False
    torch.testing.assert_close(products.jvp(v), forward, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_no_bound_is_below_the_true_gap(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At w*, between, and near v*, by exact and by rough Newton steps. Planted bugs: B for its root; H x without its
    step length; KL in the other direction; a part of the gradient of held weights."""
    task, network, precisions = problem(kind)
    precisions[::7] = 0
    free = precisions > 0
    model = model_of(task, network)
    best = model.newton(precisions, model.centre, 1e-11, 3000)
    lowest = model.state(best.weights, precisions).value
    tight, rounding = 0, 1e-13 * abs(lowest)
    for part in (0.0, 0.5, 0.9, 0.99, 0.9999):
        v = model.centre + part * (best.weights - model.centre)
        at = model.state(v, precisions)
        true, plain = at.value - lowest, gradient_gap(at.gradient, precisions)
        assert plain >= true - rounding
        h = curvature(task, network, at.outputs)
        h = h * free * free.unsqueeze(1)
        exact = torch.where(free, torch.linalg.solve(h + torch.diag(precisions + ~free), -at.gradient), 0)
        for x in (exact, 0.3 * exact, -at.gradient / (precisions + h.diagonal() + 1e-9) * free):
            product, moved = model.curvature_product(at.outputs, x, precisions)
            bound = dual_gap(model.likelihood, at.outputs, moved, at.gradient, product - precisions * x, precisions)
            assert bound >= true - rounding
            tight += bound < 1.1 * true + 1e-12 < plain
    assert tight >= 2, "the exact step's bound is the true gap, where the plain one is far above"


@pytest.mark.parametrize("way", ["kept", "recomputed"])
def test_every_start_and_route_ends_at_the_same_optimum(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: rows at other outputs after the first step; descent that leaves the held weights' values."""
    task, network, precisions = problem()
    precisions[::7] = 0
    if way == "recomputed":
        monkeypatch.setattr(TangentModel, "keeps", property(lambda self: False))
        monkeypatch.setattr(tangent_sgd, "FEWEST_POINTS", 10)
    monkeypatch.setattr(TangentModel, "in_function_space", property(lambda self: False))
    model = model_of(task, network)
    exact = model.dual_optimum(precisions, 1e-11)
    cold = model.optimum(precisions, model.centre, 1e-9, 3000)
    assert cold.route == ("newton" if way == "kept" else "sgd and newton")
    model.optimum(4 * precisions, cold.weights, 1e-9, 3000)
    other = model.optimum(4 * precisions, model.centre, 1e-9, 3000)
    warm = model.optimum(precisions, other.weights, 1e-9, 3000)
    assert other.route == warm.route == "newton", "only a first search descends"
    for found in (cold, warm):
        torch.testing.assert_close(found.weights, exact.weights, rtol=1e-5, atol=1e-6)
        assert found.gap < 1e-6


def test_descent_comes_near_the_optimum_and_is_reproducible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: a minibatch's sum not scaled to N; no decay; the step of the unflattened curvature."""
    monkeypatch.setattr(TangentModel, "keeps", property(lambda self: False))
    task, network, precisions = problem(points=200)
    model = model_of(task, network)
    begin = model.state(model.centre, precisions)
    ended = [tangent_sgd.descend(model_of(task, network), precisions, model.centre, begin) for _ in range(2)]
    assert torch.equal(*ended)
    lowest = model.state(model.newton(precisions, model.centre, 1e-9, 2000).weights, precisions).value
    left = model.state(ended[0], precisions).value - lowest
    assert 0 <= left < 0.05 * (begin.value - lowest)


def test_sampled_rows_save_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the prior alone. Planted bug: rows that are made and not used."""
    monkeypatch.setattr(sampling, "MOST_ROWS", 40)
    task, network, precisions = problem(points=80)
    model = model_of(task, network)
    with_rows = model.newton(precisions, model.centre, 1e-8, 3000).passes
    monkeypatch.setattr(TangentModel, "preconditioner", lambda self, outputs, precisions: None)
    without = model.newton(precisions, model.centre, 1e-8, 3000)
    assert without.gradient <= 1e-8 and with_rows < 0.6 * without.passes
