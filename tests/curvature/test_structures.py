"""Structures, output curvatures and rules of Laplace against the dense curvature, by another route (float64)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev

from bnn_runner.base import Network
from bnn_runner.curvature import full
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.fixed_point import FixedPoint
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.mlp import MLP
from bnn_runner.tasks import TaskSpec
from tests.laplace.test_identities import dense_curvature, dense_jacobian, linear_gaussian, problem_of, small
from tests.problems import context, make_network, make_task


def layer_blocks(matrix: Tensor, network: Network) -> dict[str, Tensor]:
    """The diagonal block of each module's tensors."""
    sizes: dict[str, int] = {}
    for name, p in network.parameters.items():
        owner = name.rpartition(".")[0]
        sizes[owner] = sizes.get(owner, 0) + p.numel()
    found, start = {}, 0
    for owner, size in sizes.items():
        found[owner] = matrix[start : start + size, start : start + size]
        start += size
    return found


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_block_is_the_exact_block_of_each_layer(kind: str) -> None:
    """Planted bugs: weight and bias in blocks of their own; the bias's columns next to another layer's weight."""
    task, network = small(kind, num_train=30)
    posterior = Laplace(structure="block").fit(task, [network], context(Fixed(0.5)))
    blocks = layer_blocks(dense_curvature(task, network), network)
    covariance = torch.block_diag(*[torch.linalg.inv(b + 0.5 * torch.eye(len(b)).double()) for b in blocks.values()])
    rows = dense_jacobian(network, task.test.inputs)
    torch.testing.assert_close(posterior.joint_covariance(task.test), rows @ covariance @ rows.T, rtol=1e-8, atol=1e-10)
    log_det = sum(float(torch.logdet(b / 0.5 + torch.eye(len(b)).double())) for b in blocks.values())
    squares = sum(float(p.square().sum()) for p in network.parameters.values())
    expected = posterior.report.facts["train_loglik_nats"] - 0.5 * (0.5 * squares + log_det)
    assert posterior.report.facts["evidence_nats"] == pytest.approx(expected, rel=1e-9)
    assert set(posterior.treatment.values()) == {"own block (exact, by layer)"}


def curvature_of(posterior: Any, network: Network, precision: float) -> Tensor:
    """The whole H [P, P] that a posterior stands on: the inverse of the covariance of its weights, less Λ."""
    size = network.num_parameters
    covariance = posterior.gaussian.product(torch.eye(size, dtype=torch.float64))
    return torch.linalg.inv(covariance) - precision * torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize("bias", ["separate", "joint"])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_ekfac_is_nearer_to_the_curvature_than_kfac(kind: str, bias: Any) -> None:
    """In Frobenius norm, on each block (George et al. 2018). Planted bugs: eigenvalues of another pass, in
    the transposed order; a basis that is not KFAC's."""
    task, network = small(kind, num_train=30)
    exact = dense_curvature(task, network)
    distances = []
    for structure in ("kfac", "ekfac"):
        method = Laplace(structure=structure, bias=bias)  # type: ignore[arg-type]
        made = curvature_of(method.fit(task, [network], context(Fixed(0.5))), network, 0.5)
        sizes = [p.numel() for p in network.parameters.values()]
        mask = torch.block_diag(*[torch.ones(s, s).double() for s in sizes])
        if bias == "joint":
            mask = torch.block_diag(
                *[torch.ones(len(b), len(b)).double() for b in layer_blocks(exact, network).values()]
            )
        torch.testing.assert_close(made * (1 - mask), torch.zeros_like(made), atol=1e-7, rtol=0)
        distances.append(float(((made - exact) * mask).norm()))
        if structure == "ekfac":
            assert float(made.trace()) == pytest.approx(float(exact.trace()), rel=1e-8)
    assert distances[1] < 0.9 * distances[0]


def test_joint_kronecker_factors_of_a_linear_model_are_its_whole_curvature() -> None:
    """Planted bugs: the one put above the inputs instead of below; a bias row taken for a column in the draws."""
    exact = linear_gaussian()
    for structure in ("kfac", "ekfac"):
        method = Laplace(structure=structure, bias="joint")  # type: ignore[arg-type]
        posterior = method.fit(exact.task, [exact.network], context(Fixed()))
        assert posterior.report.facts["evidence_nats"] == pytest.approx(exact.evidence(), rel=1e-9)
        _, covariance = exact.predictive(exact.task.test.inputs)
        torch.testing.assert_close(posterior.joint_covariance(exact.task.test), covariance, rtol=1e-7, atol=1e-10)
        draws = posterior.draws(4000, 0)(exact.task.test.inputs)[..., 0]
        error = covariance.diagonal() * math.sqrt(2 / 4000)
        assert float(((draws.var(0) - covariance.diagonal()) / error).abs().max()) < 5


class PooledCNN(nn.Module):
    """A linear network with shared weights: convolution, mean over positions, linear layer."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.out = nn.Linear(3, num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(x).mean((-2, -1)))


@dataclass(frozen=True)
class Pooled:
    def problems(self, spec: TaskSpec) -> list[str]:
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        return PooledCNN(spec.num_outputs)


def test_reduce_is_exact_for_a_linear_network_with_mean_pooling_and_expand_is_not() -> None:
    """Eschenhagen et al. (2023), at N = 1. Planted bugs: inputs summed, derivatives averaged."""
    task = make_task("classification", (1, 5, 5), 3, num_train=1)
    network = make_network(Pooled(), task)
    exact = dense_curvature(task, network)[:27, :27]
    errors = {}
    for sharing in ("expand", "reduce"):
        method = Laplace(structure="kfac", sharing=sharing)  # type: ignore[arg-type]
        made = curvature_of(method.fit(task, [network], context(Fixed(0.5))), network, 0.5)[:27, :27]
        errors[sharing] = float((made - exact).norm() / exact.norm())
    assert errors["reduce"] < 1e-9 and errors["expand"] > 0.05


# -------------------------------------------------------------------------------------- output curvature


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_sampled_fisher_has_the_exact_one_as_its_mean(kind: str) -> None:
    """20,000 samples, 5 standard errors of each entry. Planted bugs: the score at the observed target; √M left out."""
    task, network = small(kind, num_train=4)
    x, y = task.train.gather(torch.arange(4))
    outputs, samples = network(x), 20_000
    fisher = OutputCurvature("mc_fisher", samples, seed=3)
    uniforms = fisher.uniforms(task)
    assert y is not None and uniforms is not None
    root = fisher.root(network.likelihood, outputs, y, uniforms)
    exact = network.likelihood.curvature_root(outputs)
    products = samples * root.unsqueeze(2) * root.unsqueeze(1)  # [B, K, K, M]
    error = products.std(-1) / math.sqrt(samples)
    assert float(((products.mean(-1) - exact @ exact.mT) / error).abs().max()) < 5


def test_the_sampled_fisher_is_one_and_the_same_however_the_data_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: samples drawn batch by batch, so that the memory at hand changes the numbers."""
    task, network = small("classification", num_train=30)
    method = Laplace(structure="kfac", curvature="mc_fisher", fisher_samples=3)
    whole = method.fit(task, [network], context(Fixed()))
    monkeypatch.setattr(Jacobians, "batch_size", lambda *_, **__: 7)
    parts = method.fit(task, [network], context(Fixed()))
    assert whole.report.facts["evidence_nats"] == pytest.approx(parts.report.facts["evidence_nats"], rel=1e-12)
    other = method.fit(task, [network], replace(context(Fixed()), seed=1))
    assert abs(other.report.facts["evidence_nats"] - whole.report.facts["evidence_nats"]) > 1e-3


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_empirical_fisher_is_the_sum_of_squared_gradients(kind: str) -> None:
    task, network = small(kind, num_train=30)
    posterior = Laplace(structure="full", curvature="empirical_fisher").fit(task, [network], context(Fixed(0.5)))
    x, y = task.train.inputs, task.train.targets
    assert y is not None
    module = network.module.eval()

    def logliks(parameters: dict[str, Tensor]) -> Tensor:
        return network.likelihood.log_prob(functional_call(module, {**parameters, **network.buffers}, (x,)), y)

    rows = torch.cat([j.flatten(1) for j in jacrev(logliks)(network.parameters).values()], -1)
    torch.testing.assert_close(curvature_of(posterior, network, 0.5), rows.T @ rows, rtol=1e-6, atol=1e-7)


# --------------------------------------------------------------------------------------- Newton decrement


def test_the_newton_decrement_is_what_the_log_posterior_would_gain() -> None:
    """Exact where the log posterior is quadratic. Planted bugs: the prior's gradient left out, mean for sum, no ½."""
    exact = linear_gaussian()
    at_optimum = Laplace(structure="full").fit(exact.task, [exact.network], context(Fixed()))
    assert at_optimum.report.facts["newton_decrement_nats"] < 1e-18
    assert not any("decrement" in note or "method.mode" in note for note in at_optimum.report.notes)
    moved = {n: p + 0.3 for n, p in exact.network.parameters.items()}
    network = replace(exact.network, parameters=moved)
    y = exact.task.train.targets

    def log_posterior(which: Network) -> float:
        assert y is not None
        loglik = float(which.likelihood.log_prob(which(exact.task.train.inputs), y).sum())
        return loglik - 0.5 * exact.precision * sum(float(p.square().sum()) for p in which.parameters.values())

    posterior = Laplace(structure="full").fit(exact.task, [network], context(Fixed()))
    gap = log_posterior(exact.network) - log_posterior(network)
    assert posterior.report.facts["newton_decrement_nats"] == pytest.approx(gap, rel=1e-9)
    assert any("Newton decrement" in note for note in posterior.report.notes)
    other = Laplace(structure="kfac", bias="joint").fit(exact.task, [network], context(Fixed()))
    assert other.report.facts["newton_decrement_nats"] == pytest.approx(gap, rel=1e-8)


def test_the_newton_decrement_uses_the_chosen_precisions_and_the_basis() -> None:
    task, network = small("classification", layerwise=True)
    jacobians = Jacobians(network, ("out.weight", "out.bias"))
    method = Laplace(structure="full", weights="last_layer")
    posterior = method.fit(task, [network], context(Fixed()))
    precisions = torch.tensor([network.prior_precision[n] for n in jacobians.names], dtype=torch.float64)
    x, y = task.train.inputs, task.train.targets
    chosen = {n: network.parameters[n].clone().requires_grad_() for n in jacobians.names}
    with torch.enable_grad():
        outputs = functional_call(network.module.eval(), network.tensors | chosen, (x,))
        assert y is not None
        loss = -network.likelihood.log_prob(outputs, y).sum()
        loss = loss + sum(
            0.5 * float(lam) * p.square().sum() for lam, p in zip(precisions, chosen.values(), strict=True)
        )
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(chosen.values()))])
    start = sum(p.numel() for n, p in network.parameters.items() if n not in chosen)
    lam = torch.cat(
        [torch.full((chosen[n].numel(),), float(v)).double() for n, v in zip(chosen, precisions, strict=True)]
    )
    hessian = dense_curvature(task, network)[start:, start:] + torch.diag(lam)
    expected = 0.5 * float(gradient @ torch.linalg.solve(hessian, gradient))
    assert posterior.report.facts["newton_decrement_nats"] == pytest.approx(expected, rel=1e-7)


# ------------------------------------------------------------------------------------------- fixed point


@pytest.mark.parametrize("family", ["isotropic", "layerwise"])
@pytest.mark.parametrize("structure", ["full", "block", "kfac", "ekfac", "diag"])
def test_the_fixed_point_is_the_optimum_of_the_gradient(structure: Any, family: Any) -> None:
    """Planted bugs: γ of another λ; the number of weights for γ; squares of all weights for those of a group."""
    task, network = small("classification", num_train=40)
    network = replace(network, parameters={n: 2 * p for n, p in network.parameters.items()})
    problem = problem_of(Laplace(structure=structure), task, network)
    climbed = Evidence(family=family).choose(problem)
    settled = FixedPoint(family=family, tolerance=1e-9, steps=2000).choose(problem)
    assert climbed.status == settled.status
    assert settled.facts["hyper_gradient"] < 1e-6
    if climbed.status == "converged":
        torch.testing.assert_close(settled.precisions.log(), climbed.precisions.log(), atol=1e-3, rtol=0)
    assert float(problem.evidence(settled.precisions)) == pytest.approx(
        float(problem.evidence(climbed.precisions)), abs=1e-4
    )


@pytest.mark.parametrize("word", ["primal", "dual"])
def test_effective_dimensions_are_the_traces_of_the_groups(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs on the dual side: a Gram matrix without its 1/λ_g; the trace of the product's transpose."""
    monkeypatch.setattr(full, "side", lambda *_: word)
    task, network = small("classification", num_train=25, layerwise=True)
    problem = problem_of(Laplace(structure="full"), task, network)
    curvature = dense_curvature(task, network)
    sizes = [p.numel() for p in network.parameters.values()]
    lam = torch.cat([torch.full((s,), float(v)).double() for s, v in zip(sizes, problem.start, strict=True)])
    whole = (curvature @ torch.linalg.inv(curvature + torch.diag(lam))).diagonal()
    expected = torch.stack([part.sum() for part in whole.split(sizes)])
    torch.testing.assert_close(problem.effective_dimensions(problem.start), expected, rtol=1e-7, atol=1e-9)


def test_a_fixed_point_that_runs_away_says_so_and_is_held() -> None:
    task, network = small("regression")
    zero = replace(network, parameters={n: torch.zeros_like(p) for n, p in network.parameters.items()})
    posterior = Laplace(structure="kfac").fit(task, [zero], context(FixedPoint()))
    assert posterior.report.facts["hyper_status"] == "at bound"
    assert posterior.report.facts["prior_precision"] == pytest.approx(0.7)
    some = replace(network, parameters=network.parameters | {"hidden.1.weight": torch.zeros(4, 5, dtype=torch.float64)})
    posterior = Laplace(structure="kfac").fit(task, [some], context(FixedPoint(family="layerwise")))
    assert 1e3 < posterior.report.facts["prior_precisions"]["hidden.1.weight"] < 1e6
    assert any("hidden.1.weight" in note for note in posterior.report.notes)


def test_settings_without_effect_and_unequal_precisions_in_a_block_are_refused() -> None:
    with pytest.raises(UserError, match="fisher_samples"):
        Laplace(fisher_samples=3)
    with pytest.raises(UserError, match="sharing"):
        Laplace(structure="diag", sharing="reduce")
    task, network = small("classification", layerwise=True)
    with pytest.raises(RunFailed, match="same prior precision"):
        Laplace(structure="block").fit(task, [network], context(Fixed()))
    with pytest.raises(RunFailed, match="same prior precision"):
        Laplace(structure="kfac", bias="joint").fit(task, [network], context(Fixed()))


def test_an_mlp_with_layernorm_in_blocks() -> None:
    """Norm layers have blocks of their own by layer, and joint biases only where there is a weight matrix."""
    task = make_task("classification", (3,), 3, num_train=20)
    network = make_network(MLP(hidden=(5,), norm="layer"), task)
    posterior = Laplace(structure="ekfac", bias="joint").fit(task, [network], context(Fixed()))
    assert posterior.treatment["norms.0.weight"] == "own block (exact)"
    assert posterior.treatment["out.bias"] == "Kronecker factors, weight and bias together"
