"""The tangent optimum of more weights than outputs: products, function space, and what is told of a short budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.products import Differentiated
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.laplace import dual_tangent
from bnn_runner.laplace.tangent_optimum import TangentModel
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.lenet import LeNet
from bnn_runner.models.mlp import MLP
from bnn_runner.models.resnet18 import ResNet18
from bnn_runner.models.text_transformer import TextTransformer
from bnn_runner.models.vit import ViT
from bnn_runner.tasks import Task
from tests.problems import context, make_network, make_task

WIDE: dict[str, tuple[Any, tuple[int, ...], str]] = {
    "mlp": (MLP(hidden=(9, 6), norm="batch"), (3,), "regression"),
    "lenet": (LeNet(), (1, 16, 16), "classification"),
    "resnet18": (ResNet18(widths=(2, 2, 3, 3)), (3, 8, 8), "classification"),
    "vit": (ViT(patch=2, width=4, depth=1, heads=2), (1, 4, 4), "classification"),
    "text": (TextTransformer(width=4, depth=1, heads=2), (4,), "classification"),
}


def wide(case: str, num_train: int = 7) -> tuple[Task, Network]:
    model, shape, kind = WIDE[case]
    outputs = 2 if kind == "regression" else 3
    task = make_task(kind, shape, outputs, num_train=num_train, vocabulary=9 if case == "text" else 0)
    network = make_network(model, task)
    return task, replace(network, prior_precision={n: 0.3 + 0.1 * (i % 5) for i, n in enumerate(network.parameters)})


def each_weight(network: Network) -> Tensor:
    return torch.cat(
        [torch.full((p.numel(),), network.prior_precision[n]).double() for n, p in network.parameters.items()]
    )


@pytest.mark.parametrize("case", WIDE)
def test_single_products_are_those_of_the_jacobian(case: str) -> None:
    """Against the factored Jacobians. Planted bugs: a derivative of training mode; tensors out of order; a mean."""
    task, network = wide(case)
    jacobians, x = Jacobians(network), task.train.inputs
    dense = jacobians(x).dense()
    products = Differentiated(jacobians, x)
    g = torch.Generator().manual_seed(0)
    v = torch.randn(dense.shape[-1], generator=g, dtype=torch.float64)
    u = torch.randn(dense.shape[:2], generator=g, dtype=torch.float64)
    torch.testing.assert_close(products.outputs, network(x))
    torch.testing.assert_close(products.jvp(v), dense @ v, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(products.vjp(u), torch.einsum("bkp,bk->p", dense, u), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(
    ("case", "memory"),
    [(case, "a matrix each") for case in WIDE] + [("lenet", "one for all"), ("lenet", "several passes")],
)
def test_function_space_has_the_optimum_of_weight_space(
    case: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bugs: g·g' of other points in a product of factors; a tensor's λ for the next one's; Λ not followed."""
    if memory != "a matrix each":
        monkeypatch.setattr(dual_tangent, "GRAM_BYTES", 0)
    task, network = wide(case)
    model, lam = TangentModel(task, Jacobians(network)), each_weight(network)
    if memory == "several passes":
        monkeypatch.setattr(dual_tangent, "ROWS_BYTES", 8 * 21 * max(p.numel() for p in network.parameters.values()))
        monkeypatch.setattr(dual_tangent, "MOST_PASSES", 99)
    assert model.in_function_space
    gaussian = Laplace(structure="full").fit(task, [network], context(Fixed())).gaussian
    for factor in (1.0, 3.0):
        found = model.optimum(factor * lam, model.centre, 1e-10, 1)
        direct = model.newton(factor * lam, model.centre, 1e-10, 2000, gaussian)
        assert found.gradient < 1e-9 and direct.gradient <= 1e-10
        torch.testing.assert_close(found.weights, direct.weights, rtol=1e-7, atol=1e-8)
        assert found.loglik == pytest.approx(direct.loglik, rel=1e-9)
    assert model._grams is not None and model._grams.made == 1, "a multiple of Λ costs no pass"
    assert (model._grams.passes > 1) == (memory == "several passes")


@pytest.mark.parametrize("way", ["function space", "weight space"])
def test_weights_without_a_precision_are_held(way: str) -> None:
    """What the g-prior holds for want of curvature. Planted bugs: 1/0; their part of J w* taken off f; their gradient
    counted in what is left."""
    task, network = wide("mlp")
    jacobians, lam = Jacobians(network), each_weight(network)
    lam[::3] = 0
    free = lam > 0
    model = TangentModel(task, jacobians)
    start = model.centre

    dual = way == "function space"
    found = model.dual_optimum(lam, 1e-10) if dual else model.newton(lam, start, 1e-10, 2000)
    assert torch.equal(found.weights[~free], start[~free])
    dense, y = jacobians(task.train.inputs).dense(), task.train.targets
    v = found.weights.clone().requires_grad_()
    h = network(task.train.inputs) + dense @ (v - start)
    assert y is not None
    loss = -network.likelihood.log_prob(h, y).sum() + 0.5 * (lam * v.square()).sum()
    (gradient,) = torch.autograd.grad(loss, v)
    size = float((lam * found.weights).norm())
    assert float(gradient[free].norm()) < 1e-8 * size < float(gradient[~free].norm())


def test_a_subnetworks_optimum_is_over_its_weights() -> None:
    """Planted bug: products with the whole tensor of a weight that is in the basis."""
    task, network = wide("mlp", num_train=4)
    chosen = {"hidden.1.weight": torch.tensor([0, 7, 11, 30]), "out.weight": torch.arange(12)}
    jacobians = Jacobians(network, tuple(chosen), chosen)
    model = TangentModel(task, jacobians)
    lam = torch.full_like(model.centre, 0.5)
    dense, x = jacobians(task.train.inputs).dense(), task.train.inputs
    products = Differentiated(jacobians, x)
    torch.testing.assert_close(products.jvp(model.centre), dense @ model.centre, rtol=1e-8, atol=1e-9)

    assert model.in_function_space
    found, direct = model.dual_optimum(lam, 1e-10), model.newton(lam, model.centre, 1e-10, 500)
    torch.testing.assert_close(found.weights, direct.weights, rtol=1e-7, atol=1e-8)


def test_the_evidence_is_the_same_by_both_ways_and_a_search_makes_one_gram_matrix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task, network = wide("lenet", num_train=6)
    network = replace(network, prior_precision=dict.fromkeys(network.parameters, 2.0))
    method = Laplace(structure="kfac", mode="tangent", tangent_passes=3000, tangent_tolerance=1e-8)
    here = method.fit(task, [network], context(Evidence()))
    assert here.report.facts["tangent_settled"] and here.report.facts["tangent_gradient"] < 1e-8
    monkeypatch.setattr(TangentModel, "in_function_space", False)
    other = method.fit(task, [network], context(Fixed(here.report.facts["prior_precision"])))
    assert other.report.facts["tangent_settled"]
    assert here.report.facts["evidence_nats"] == pytest.approx(other.report.facts["evidence_nats"], rel=1e-7)


def test_a_short_budget_is_told_with_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: mode=auto that falls back without a word."""
    monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 0)
    monkeypatch.setattr(TangentModel, "in_function_space", False)
    task, network = wide("mlp", num_train=20)
    stages: list[tuple[str, int, int]] = []

    def fit(mode: Any, passes: int, rule: Any = None) -> Any:
        method = Laplace(structure="diag", mode=mode, tangent_passes=passes)
        told = replace(context(rule or Fixed()), progress=lambda *stage: stages.append(stage))
        return method.fit(task, [network], told)

    short, long = fit("tangent", 3), fit("tangent", 3000)
    assert long.report.facts["tangent_settled"] and long.report.facts["tangent_gap_nats"] < 1e-9
    assert not short.report.facts["tangent_settled"] and short.report.facts["tangent_passes"] <= 4
    assert short.report.facts["evidence_nats"] < long.report.facts["evidence_nats"], (
        "short of its optimum it is a lower one"
    )
    assert any("v* was not reached" in note and "nats are left" in note for note in short.report.notes)
    fallen = fit("auto", 3, Evidence())
    assert fallen.report.facts["mode"] == "network"
    assert any("v* was not reached" in note and "at w*" in note for note in fallen.report.notes)
    assert {(name, total) for name, _, total in stages} >= {("tangent optimum", 3), ("tangent optimum", 3000)}
