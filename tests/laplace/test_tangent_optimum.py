"""The tangent model's optimum v*, scale invariance, and precisions by group (float64)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bnn_runner.base import Choice, Network, PrecisionProblem
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.fixed_point import FixedPoint
from bnn_runner.hyper.grid import Grid
from bnn_runner.laplace.newton_decrement import far
from bnn_runner.laplace.scale_invariance import scale_invariant
from bnn_runner.laplace.tangent_optimum import TangentModel
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.mlp import MLP
from bnn_runner.rng import generator
from bnn_runner.tasks import Task
from tests.laplace.test_identities import dense_jacobian, linear_gaussian, small
from tests.problems import context, make_network, make_task

METHOD_FILES = {
    p.stem: p.read_text(encoding="utf-8") for p in (Path(__file__).parents[2] / "conf" / "method").glob("laplace*.yaml")
}


def precisions_of(network: Network) -> Tensor:
    return torch.cat(
        [torch.full((p.numel(),), network.prior_precision[n]).double() for n, p in network.parameters.items()]
    )


def flat(network: Network) -> Tensor:
    return torch.cat([p.flatten() for p in network.parameters.values()])


def test_the_optimum_of_a_gaussian_tangent_model_is_the_closed_form() -> None:
    """v* = (H + Λ)⁻¹ JᵀB (y − f + J w*). Planted bugs: no offset f − J w*; a prior around w*."""
    task, network = small("regression", layerwise=True)
    lam, rows = precisions_of(network), dense_jacobian(network, task.train.inputs)
    noise = network.likelihood.log_noise.exp().expand(len(task.train), -1).flatten()  # type: ignore[attr-defined]
    scaled = rows / noise.unsqueeze(1)
    y = task.train.targets
    assert y is not None
    offset = (y - network(task.train.inputs)).flatten() + rows @ flat(network)
    expected = torch.linalg.solve(scaled.T @ scaled + torch.diag(lam), scaled.T @ (offset / noise))
    model = TangentModel(task, Jacobians(network))
    gaussian = Laplace(structure="full").fit(task, [network], context(Fixed())).gaussian
    found = model.newton(lam, model.centre, 1e-9, 100, gaussian)
    torch.testing.assert_close(found.weights, expected, rtol=1e-7, atol=1e-9)
    assert found.passes <= 6, "one Newton step"
    dual = model.dual_optimum(lam, 1e-9)
    torch.testing.assert_close(dual.weights, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("structure", "way"),
    [(s, w) for s in ("full", "kfac", "diag") for w in ("kept", "recomputed")] + [("kfac", "function space")],
)
def test_the_gradient_vanishes_at_v_and_not_at_w(structure: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another route: the tangent model written out densely, its loss differentiated by autograd.

    Planted bugs: J v of one tensor for another's; the score at w* instead of v; a held weight's part in f − J w*.
    """
    if way == "recomputed":
        monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 0)
    monkeypatch.setattr(TangentModel, "in_function_space", property(lambda _: way == "function space"))
    task, network = small("classification", num_train=30, layerwise=True)
    lam = precisions_of(network)
    posterior = Laplace(structure=structure, mode="tangent").fit(task, [network], context(Fixed()))
    model = TangentModel(task, Jacobians(network))
    found = model.optimum(lam, model.centre, 1e-8, 5000, posterior.gaussian if structure == "full" else None)
    rows, outputs = dense_jacobian(network, task.train.inputs), network(task.train.inputs)
    y = task.train.targets

    def relative_gradient(v: Tensor) -> float:
        v = v.clone().requires_grad_()
        h = outputs + (rows @ (v - flat(network))).reshape(outputs.shape)
        assert y is not None
        (data,) = torch.autograd.grad(-network.likelihood.log_prob(h, y).sum(), v)
        prior = lam * v.detach()
        return float((data + prior).norm() / (data.norm() + prior.norm()))

    assert relative_gradient(found.weights) < 1e-7
    assert relative_gradient(flat(network)) > 1e-2
    assert posterior.report.facts["tangent_settled"] and posterior.report.facts["tangent_gradient"] <= 1e-7
    assert posterior.report.facts["tangent_gap_nats"] < 1e-9
    h = outputs + (rows @ (found.weights - flat(network))).reshape(outputs.shape)
    assert y is not None
    loglik = float(network.likelihood.log_prob(h, y).sum())
    assert posterior.report.facts["train_loglik_nats"] == pytest.approx(loglik, rel=1e-6)


def test_the_tangent_evidence_of_a_linear_model_is_the_exact_one_from_any_weights() -> None:
    """Where w* is not the optimum the network's evidence is wrong, and the tangent model's is not."""
    exact = linear_gaussian()
    moved = replace(exact.network, parameters={n: p + 0.3 for n, p in exact.network.parameters.items()})
    tangent = Laplace(structure="full", mode="tangent").fit(exact.task, [moved], context(Fixed()))
    network = Laplace(structure="full").fit(exact.task, [moved], context(Fixed()))
    assert tangent.report.facts["evidence_nats"] == pytest.approx(exact.evidence(), rel=1e-9)
    assert network.report.facts["evidence_nats"] < exact.evidence() - 1
    x = exact.task.test.inputs
    torch.testing.assert_close(tangent.moments(x).mean, moved(x))  # the predictive mean stays that of the network


def learnable(task: Task, network: Network, sharpness: float = 4.0) -> Task:
    """The task with labels drawn from the network's own probabilities, sharpened."""
    probabilities = torch.softmax(sharpness * network(task.train.inputs), dim=-1)
    labels = torch.multinomial(probabilities, 1, generator=generator(0, "labels")).squeeze(1)
    return replace(task, train=replace(task.train, targets=labels))


def test_v_and_the_precisions_settle_together() -> None:
    """Λ is chosen at v*(Λ): the result solves both, whatever the start. Planted bug: one round only."""
    task, network = small("classification", num_train=60)
    task = learnable(task, network)
    method = Laplace(structure="full", mode="tangent", tangent_passes=5000)
    found = method.fit(task, [network], context(Evidence()))
    elsewhere = replace(network, prior_precision=dict.fromkeys(network.parameters, 30.0))
    other = method.fit(task, [elsewhere], context(Evidence()))
    assert found.report.facts["tangent_settled"] and other.report.facts["tangent_settled"]
    assert found.report.facts["prior_precision"] == pytest.approx(other.report.facts["prior_precision"], rel=3e-3)
    again = method.fit(task, [network], context(Fixed(found.report.facts["prior_precision"])))
    assert again.report.facts["evidence_nats"] == pytest.approx(found.report.facts["evidence_nats"], abs=1e-4)
    for factor in (0.8, 1.25):
        near = method.fit(task, [network], context(Fixed(found.report.facts["prior_precision"] * factor)))
        assert near.report.facts["evidence_nats"] < found.report.facts["evidence_nats"]
    fixed_point = method.fit(task, [network], context(FixedPoint()))
    assert fixed_point.report.facts["prior_precision"] == pytest.approx(found.report.facts["prior_precision"], rel=3e-3)


def test_auto_says_which_mode_it_took_and_why() -> None:
    """Planted bugs: v* where it was not reached; a fallback with other numbers; v* of a network at its optimum."""
    task, network = small("classification", num_train=30)

    def fit(mode: Any, passes: int = 5000, which: Network = network) -> Mapping[str, Any]:
        method = Laplace(structure="kfac", mode=mode, tangent_passes=passes)
        return method.fit(task, [which], context(Evidence())).report.facts

    plain, within, short = fit("network"), fit("auto"), fit("auto", passes=2)
    assert plain["newton_decrement_nats"] > far(plain["effective_dimension"])
    assert within["mode"] == "tangent" and "above" in within["mode_reason"]
    assert within["evidence_nats"] == fit("tangent")["evidence_nats"]
    assert short["mode"] == "network" and "v* was not reached" in short["mode_reason"]
    assert short["evidence_nats"] == plain["evidence_nats"]
    assert plain["mode_reason"] == "method.mode=network"
    forced = Laplace(structure="kfac", mode="tangent", tangent_passes=2).fit(task, [network], context(Evidence()))
    assert any("tangent_passes" in note for note in forced.report.notes)


def test_auto_is_the_default_on_the_command_line() -> None:
    """Planted bug: a method whose file was left at w*."""
    modes = {name: text for name, text in METHOD_FILES.items() if "mode:" in text}
    assert len(modes) >= 3 and all("\nmode: auto  #" in text for text in modes.values())


def test_auto_takes_the_trained_weights_at_their_optimum() -> None:
    """A linear model at its MAP, where the decrement is 0. Planted bug: v* whatever the decrement."""
    exact = linear_gaussian()
    precision = Fixed()

    @dataclass(frozen=True)
    class ByEvidence:
        """Keeps the training prior, but as a rule that uses the evidence."""

        needs_validation: ClassVar[bool] = False

        def choose(self, problem: PrecisionProblem) -> Choice:
            return precision.choose(problem)

    facts = Laplace(structure="full", mode="auto").fit(exact.task, [exact.network], context(ByEvidence())).report.facts
    assert facts["mode"] == "network" and "at most 1" in facts["mode_reason"] and "tangent_passes" not in facts


@pytest.mark.parametrize("rule", [Fixed(), Grid(num=3)])
def test_rules_without_the_evidence_search_no_optimum(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: v* searched for a precision that is given or chosen by validation."""
    monkeypatch.setattr("bnn_runner.laplace.select.at_optimum", None)
    task, network = normalised("batch")
    task = replace(task, val=task.train)
    facts = Laplace(structure="kfac", mode="auto").fit(task, [network], context(rule)).report.facts
    assert facts["mode"] == "network" and "does not use the evidence" in facts["mode_reason"]
    assert facts["scale_invariant"]


def test_auto_takes_the_optimum_of_a_normalised_network_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its w* is no optimum of any log posterior. Planted bug: a search at w* that decides nothing."""
    monkeypatch.setattr("bnn_runner.laplace.select.at_weights", None)
    task, network = normalised("batch")
    method = Laplace(structure="full", mode="auto", tangent_passes=5000)
    facts = method.fit(task, [network], context(Evidence())).report.facts
    assert facts["mode"] == "tangent" and "scale-invariant" in facts["mode_reason"]


# ------------------------------------------------------------------------------------- normalised networks


def normalised(norm: Any = "batch") -> tuple[Task, Network]:
    """A network whose first layer is followed by a normalisation layer; running statistics are those of the data."""
    task = make_task("classification", (3,), 3, num_train=300, num_test=10)
    network = make_network(MLP(hidden=(6, 5), norm=norm), task, precision=0.1)
    return learnable(task, network), network


def rescaled(network: Network, k: float) -> Network:
    """The first layer times k, and what goes with it: running mean times k, running variance and eps times k²."""
    module = copy.deepcopy(network.module)
    module.norms[0].eps *= k**2  # type: ignore[index,union-attr,operator]
    parameters = dict(network.parameters)
    for name in ("hidden.0.weight", "hidden.0.bias"):
        parameters[name] = k * parameters[name]
    buffers = dict(network.buffers)
    if "norms.0.running_mean" in buffers:
        buffers["norms.0.running_mean"] = k * buffers["norms.0.running_mean"]
        buffers["norms.0.running_var"] = k**2 * buffers["norms.0.running_var"]
    return replace(network, module=module, parameters=parameters, buffers=buffers)


@pytest.mark.parametrize(("norm", "structure"), [("batch", "full"), ("layer", "full"), ("batch", "kfac")])
def test_the_scale_of_a_normalised_layer_moves_only_the_evidence_that_is_wrong(norm: Any, structure: Any) -> None:
    """Planted bugs: v* from w*'s penalty; one precision for all groups; λ kept when the scale moves."""
    task, network = normalised(norm)
    scaled = rescaled(network, 3.0)
    torch.testing.assert_close(scaled(task.test.inputs), network(task.test.inputs), rtol=1e-9, atol=1e-11)

    own = {n: p / 9 if n.startswith("hidden.0.") else p for n, p in network.prior_precision.items()}

    def evidence(method: Laplace, which: Network) -> float:
        return float(method.fit(task, [which], context(Fixed())).report.facts["evidence_nats"])

    tangent = Laplace(structure=structure, mode="tangent", tangent_passes=5000)
    before = evidence(tangent, network)
    assert evidence(tangent, replace(scaled, prior_precision=own)) == pytest.approx(before, rel=1e-6)
    assert abs(evidence(tangent, scaled) - before) > 1, "one precision for all groups sees the scale"
    at_w = Laplace(structure=structure)
    assert abs(evidence(at_w, scaled) - evidence(at_w, network)) > 1, "so does the evidence at w*"


@pytest.mark.parametrize("norm", ["batch", "layer", "none"])
def test_scale_invariant_layers_are_found_and_the_network_is_left_as_it_was(norm: Any) -> None:
    """Planted bugs: frozen statistics (no invariance there); the output layer taken in; buffers written to."""
    expected = set() if norm == "none" else {"hidden.0", "hidden.1"}
    task, network = normalised(norm)
    buffers = {n: b.clone() for n, b in network.buffers.items()}
    modes = [m.training for m in network.module.modules()]
    eps = [getattr(m, "eps", None) for m in network.module.modules()]
    found = scale_invariant(network, task.train.inputs, tuple(network.parameters)).names
    assert {name.rpartition(".")[0] for name in found} == expected
    assert all(name in found for owner in expected for name in (f"{owner}.weight", f"{owner}.bias"))
    assert all(torch.equal(b, network.buffers[n]) for n, b in buffers.items())
    assert [m.training for m in network.module.modules()] == modes
    assert [getattr(m, "eps", None) for m in network.module.modules()] == eps


def test_groupwise_gives_each_invariant_group_its_own_precision_and_the_rest_one() -> None:
    task, network = normalised()
    posterior = Laplace(structure="full").fit(task, [network], context(Evidence(family="groupwise")))
    chosen = posterior.report.facts["prior_precisions"]
    invariant = set(posterior.report.facts["scale_invariant"])
    rest = {value for name, value in chosen.items() if name not in invariant}
    assert len(rest) == 1 and len({chosen[name] for name in invariant}) > 1
    plain = Laplace(structure="full").fit(*_plain(), context(Evidence(family="groupwise")))
    assert plain.report.facts["prior_precision"] is not None, "without invariant groups it is one precision"


def _plain() -> tuple[Task, list[Network]]:
    task, network = small("classification", num_train=30)
    return task, [network]
