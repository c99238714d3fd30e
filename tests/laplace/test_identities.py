"""Where linearised Laplace must be exact, it is compared with the exact answer, reached by another route (float64)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal
from torch.func import functional_call, jacrev

from bnn_runner.base import Choice, HyperRule, Network, Posterior, PrecisionProblem
from bnn_runner.curvature import full
from bnn_runner.curvature.block_curvature import BlockCurvature
from bnn_runner.curvature.blocks import FullBlock
from bnn_runner.curvature.groups import each_tensor
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.structures import STRUCTURES
from bnn_runner.errors import RunFailed
from bnn_runner.evaluation.evaluate import evaluate
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.grid import Grid
from bnn_runner.laplace import validation_score
from bnn_runner.laplace.evidence import log_evidence
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.map import MAP
from bnn_runner.metrics.joint import Joint
from bnn_runner.metrics.marginal import Marginal
from bnn_runner.models.lenet import LeNet
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.models.mlp import MLP
from bnn_runner.rng import generator
from bnn_runner.scoring import Evaluation
from bnn_runner.tasks import Task
from tests.problems import context, make_network, make_task


def dense_curvature(task: Task, network: Network) -> Tensor:
    """Σ_n J_nᵀ B_n J_n, [P, P], by reverse-mode derivatives and the Hessian of −log p."""
    module = network.module.eval()

    def outputs(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(module, {**parameters, **network.buffers}, (task.train.inputs,))

    rows = torch.cat([j.flatten(2) for j in jacrev(outputs)(network.parameters).values()], -1)  # [N, K, P]
    out, y = network(task.train.inputs), task.train.targets
    assert y is not None
    total = torch.zeros(rows.shape[-1], rows.shape[-1], dtype=torch.float64)
    for n in range(len(out)):
        hessian = jacrev(jacrev(lambda f, n=n: -network.likelihood.log_prob(f.unsqueeze(0), y[n : n + 1]).sum()))(
            out[n]
        )
        total += rows[n].T @ hessian @ rows[n]
    return total


def dense_jacobian(network: Network, x: Tensor) -> Tensor:
    """[B·K, P]."""
    module = network.module.eval()
    made = jacrev(lambda p: functional_call(module, {**p, **network.buffers}, (x,)))(network.parameters)
    return torch.cat([j.flatten(2) for j in made.values()], -1).flatten(0, 1)


def places(network: Network, jacobians: Jacobians) -> Tensor:
    """The chosen weights in the vector of all of them."""
    found, start = [], 0
    for name, p in network.parameters.items():
        if name in jacobians.chosen:
            found.append(start + jacobians.chosen[name])
        start += p.numel()
    return torch.cat(found)


STRUCTURE_NAMES = tuple(STRUCTURES)


@pytest.fixture(params=["primal", "dual"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The side on which the full curvature is factored, whichever is smaller."""
    monkeypatch.setattr(full, "side", lambda *_: request.param)
    return str(request.param)


# ------------------------------------------------------------------- exact Bayesian linear regression


@dataclass(frozen=True)
class Exact:
    """y = Φ w + noise with w ~ N(0, I/λ): everything in standardised units, on the dual side."""

    task: Task
    network: Network
    precision: float
    sigma: float

    def features(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)

    def evidence(self) -> float:
        """log N(y; 0, ΦΦᵀ/λ + σ²I) in original target units."""
        phi = self.features(self.task.train.inputs)
        covariance = phi @ phi.T / self.precision + self.sigma**2 * torch.eye(len(phi), dtype=torch.float64)
        y = self.task.train.targets
        assert y is not None
        value = MultivariateNormal(torch.zeros(len(phi), dtype=torch.float64), covariance).log_prob(y[:, 0])
        return float(value) - len(phi) * math.log(float(self.task.target_scale))

    def predictive(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [B] and covariance [B, B] of f(x), as a Gaussian process."""
        phi, new = self.features(self.task.train.inputs), self.features(x)
        gram = phi @ phi.T / self.precision + self.sigma**2 * torch.eye(len(phi), dtype=torch.float64)
        cross, y = new @ phi.T / self.precision, self.task.train.targets
        assert y is not None
        covariance = new @ new.T / self.precision - cross @ torch.linalg.solve(gram, cross.T)
        return cross @ torch.linalg.solve(gram, y[:, 0]), covariance


def linear_gaussian(num_train: int = 30, precision: float = 0.7, sigma: float = 0.6) -> Exact:
    """A linear network at the exact posterior mean."""
    task = make_task("regression", (4,), 1, num_train=num_train)
    network = make_network(MLP(hidden=()), task, precision=precision)
    exact = Exact(task, network, precision, sigma)
    phi, y = exact.features(task.train.inputs), task.train.targets
    assert y is not None
    mean = torch.linalg.solve(
        phi.T @ phi / sigma**2 + precision * torch.eye(5, dtype=torch.float64), phi.T @ y[:, 0] / sigma**2
    )
    parameters = {"out.weight": mean[:4].unsqueeze(0), "out.bias": mean[4:]}
    noise = Gaussian(torch.tensor([math.log(sigma)], dtype=torch.float64))
    return replace(exact, network=replace(network, parameters=parameters, likelihood=noise))


@pytest.mark.parametrize("num_train", [30, 3])
def test_a_linear_gaussian_task_gives_the_exact_posterior(num_train: int, side: str) -> None:
    """Planted bugs: N counted twice, σ for σ², the prior's normaliser left out, target units, means for sums."""
    exact = linear_gaussian(num_train)
    posterior = Laplace(structure="full").fit(exact.task, [exact.network], context(Fixed()))
    assert posterior.report.facts["evidence_nats"] == pytest.approx(exact.evidence(), rel=1e-10)
    x = exact.task.test.inputs
    mean, covariance = exact.predictive(x)
    moments = posterior.moments(x)
    torch.testing.assert_close(moments.mean[:, 0], mean, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(moments.covariance[:, 0, 0], covariance.diagonal(), rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(posterior.joint_covariance(exact.task.test), covariance, rtol=1e-8, atol=1e-11)
    phi = exact.features(exact.task.train.inputs)
    spectrum = torch.linalg.eigvalsh(phi.T @ phi) / exact.sigma**2
    assert posterior.report.facts["effective_dimension"] == pytest.approx(
        float((spectrum / (spectrum + exact.precision)).sum()), rel=1e-8
    )


def test_another_precision_gives_the_evidence_at_the_same_weights(side: str) -> None:
    """Planted bug: the evidence of a chosen λ with the penalty of the training λ. At other weights than the mean the
    Laplace evidence is the exact one less ½ (w − m)ᵀ(H + Λ)(w − m)."""
    exact = linear_gaussian()
    other = replace(exact, precision=3.1)
    posterior = Laplace(structure="full").fit(exact.task, [exact.network], context(Fixed(3.1)))
    phi, y = exact.features(exact.task.train.inputs), exact.task.train.targets
    assert y is not None
    precision = phi.T @ phi / exact.sigma**2 + 3.1 * torch.eye(5, dtype=torch.float64)
    gap = torch.cat([exact.network.parameters["out.weight"][0], exact.network.parameters["out.bias"]])
    gap = gap - torch.linalg.solve(precision, phi.T @ y[:, 0] / exact.sigma**2)
    assert posterior.report.facts["evidence_nats"] == pytest.approx(
        other.evidence() - 0.5 * float(gap @ precision @ gap), rel=1e-10
    )


def test_the_exact_joint_score_through_the_whole_evaluation() -> None:
    """Planted bugs: noise missing from the joint, or put between different points; marginals multiplied; units."""
    exact = linear_gaussian()
    posterior = Laplace(structure="full").fit(exact.task, [exact.network], context(Fixed()))
    evaluation = evaluate(exact.task, posterior, "draws", num_draws=4000, seed=1, batch_size=5, max_ood=10)
    mean, covariance = exact.predictive(exact.task.test.inputs)
    scale, size = float(exact.task.target_scale), len(exact.task.test)
    noisy = scale**2 * (covariance + exact.sigma**2 * torch.eye(size, dtype=torch.float64))
    joint = evaluation.gaussian_joint
    assert joint is not None
    torch.testing.assert_close(joint.mean, scale * mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(joint.covariance, noisy, rtol=1e-8, atol=1e-10)

    y = evaluation.test.targets
    assert y is not None
    whole = MultivariateNormal(scale * mean, noisy).log_prob(y[:, 0])
    singles = Normal(scale * mean, noisy.diagonal().sqrt()).log_prob(y[:, 0])
    scores = {(s.metric, s.tau): s for s in Joint(taus=(1, size), repeats=3, tolerance=0.01)(evaluation, 0)}
    assert scores["joint_loglik", size].value == pytest.approx(float(whole), rel=1e-8)
    assert scores["joint_loglik", 1].value == pytest.approx(float(singles.mean()), rel=1e-8)
    marginal = {(s.metric, s.split): s.value for s in Marginal()(evaluation, 0)}["marginal_loglik", "test"]
    assert marginal == pytest.approx(float(singles.mean()), rel=1e-8)
    assert abs(float(whole - singles.sum())) > 0.1, "points that share a function are not independent"
    # The same number by draws: log of a mean of 4,000 weights, within 5 standard errors; the row takes its bias off.
    loglik = evaluation.test.loglik
    assert loglik is not None
    weights = (loglik.sum(1) - whole).exp()
    assert abs(float(weights.mean()) - 1) < 5 * float(weights.std()) / math.sqrt(len(weights))
    shares = weights / weights.sum()
    bias = (float(shares.square().sum()) - 1 / len(weights)) / 2
    by_draws = scores["joint_loglik_by_draws", size]
    assert by_draws.value == pytest.approx(float(whole + weights.mean().log()) + bias, abs=1e-4)


def test_closed_form_evaluation_is_exact_too() -> None:
    exact = linear_gaussian()
    method = Laplace(structure="full", predict="closed_form")
    evaluation = evaluate(
        exact.task, method.fit(exact.task, [exact.network], context(Fixed())), "closed_form", 1, 0, 5, 10
    )
    mean, covariance = exact.predictive(exact.task.test.inputs)
    scale = float(exact.task.target_scale)
    expected = Normal(scale * mean, scale * (covariance.diagonal() + exact.sigma**2).sqrt())
    assert evaluation.test.loglik is not None and evaluation.test.targets is not None
    torch.testing.assert_close(
        evaluation.test.loglik[0], expected.log_prob(evaluation.test.targets[:, 0]), rtol=1e-9, atol=1e-9
    )
    assert not evaluation.has_joint


# -------------------------------------------------------------------------- draws and their covariance

STRUCTURES: dict[str, tuple[Laplace, str, bool]] = {  # method, kind, one precision a tensor
    "full primal": (Laplace(structure="full"), "regression", False),
    "full dual": (Laplace(structure="full"), "classification", False),
    "full primal layerwise": (Laplace(structure="full"), "classification", True),
    "full dual layerwise": (Laplace(structure="full"), "regression", True),
    "kfac": (Laplace(structure="kfac"), "regression", False),
    "kfac layerwise": (Laplace(structure="kfac"), "classification", True),
    "diag": (Laplace(structure="diag"), "classification", False),
    "diag layerwise": (Laplace(structure="diag"), "regression", True),
    "last_layer": (Laplace(structure="full", weights="last_layer"), "classification", False),
    "last_layer kfac": (Laplace(structure="kfac", weights="last_layer"), "regression", False),
    "block": (Laplace(structure="block"), "classification", False),
    "ekfac layerwise": (Laplace(structure="ekfac"), "classification", True),
    "kfac joint bias": (Laplace(structure="kfac", bias="joint"), "classification", False),
    "ekfac joint bias": (Laplace(structure="ekfac", bias="joint"), "regression", False),
    "kfac of sampled targets": (Laplace(structure="kfac", curvature="mc_fisher"), "classification", False),
    "full empirical Fisher": (Laplace(structure="full", curvature="empirical_fisher"), "regression", False),
}


def small(kind: str, num_train: int = 20, layerwise: bool = False, norm: Any = "none") -> tuple[Task, Network]:
    task = make_task(kind, (3,), 2 if kind == "regression" else 3, num_train=num_train, num_test=6)
    network = make_network(MLP(hidden=(5, 4), norm=norm), task)
    if layerwise:
        network = replace(network, prior_precision={n: 0.3 + 0.4 * i for i, n in enumerate(network.parameters)})
    return task, network


@pytest.mark.parametrize("name", STRUCTURES)
def test_draws_have_the_stated_covariance(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs (PITFALLS A13): the factor transposed, its inverse, variance for standard deviation, one λ for all.
    50 random projections of the outputs at all test points, 4,000 draws, 5 standard errors."""
    method, kind, layerwise = STRUCTURES[name]
    for word in ("primal", "dual"):
        if word in name:
            monkeypatch.setattr(full, "side", lambda *_, word=word: word)
    task, network = small(kind, layerwise=layerwise)
    posterior = method.fit(task, [network], context(Fixed()))
    stated = posterior.joint_covariance(task.test)
    outputs = posterior.draws(4000, 1)(task.test.inputs).flatten(1)  # [S, N·K]
    moments = posterior.moments(task.test.inputs)
    size = task.spec.num_outputs
    for i in range(len(task.test)):
        block = stated[i * size : (i + 1) * size, i * size : (i + 1) * size]
        # Eigenvectors of the dual side are as orthogonal as their eigenvalues allow; the joint covariance sees it.
        torch.testing.assert_close(moments.covariance[i], block, rtol=1e-7 if "dual" in name else 1e-9, atol=1e-12)
    directions = torch.randn(50, outputs.shape[1], generator=generator(0, "projections"), dtype=torch.float64)
    projected, count = outputs @ directions.T, len(outputs)
    variances = torch.einsum("pi,ij,pj->p", directions, stated, directions)
    z_variance = (projected.var(0) / variances - 1) / math.sqrt(2 / (count - 1))
    z_mean = (projected.mean(0) - directions @ moments.mean.flatten()) / (variances / count).sqrt()
    assert float(z_variance.abs().max()) < 5 and float(z_mean.abs().max()) < 5
    assert float(variances.max() / variances.min()) > 3, "projections that are all alike would see little"


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_full_posterior_is_the_inverse_of_the_dense_precision(kind: str, layerwise: bool, side: str) -> None:
    """Planted bug: a stated covariance and draws that agree with each other, and not with (H + Λ)⁻¹."""
    task, network = small(kind, layerwise=layerwise)
    posterior = Laplace(structure="full").fit(task, [network], context(Fixed()))
    curvature = dense_curvature(task, network)
    lam = torch.cat(
        [
            torch.full((p.numel(),), network.prior_precision[n], dtype=torch.float64)
            for n, p in network.parameters.items()
        ]
    )
    covariance = torch.linalg.inv(curvature + torch.diag(lam))
    rows = dense_jacobian(network, task.test.inputs)
    torch.testing.assert_close(posterior.joint_covariance(task.test), rows @ covariance @ rows.T, rtol=1e-7, atol=1e-10)
    weights = torch.cat([p.flatten() for p in network.parameters.values()])
    log_prior = 0.5 * (lam.log().sum() - (lam * weights.square()).sum())
    expected = posterior.report.facts["train_loglik_nats"] + log_prior - 0.5 * torch.logdet(curvature + torch.diag(lam))
    assert posterior.report.facts["evidence_nats"] == pytest.approx(float(expected), rel=1e-9)


@pytest.mark.parametrize("layerwise", [False, True])
def test_both_sides_of_the_full_curvature_are_one(layerwise: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: directions that no datum informs lose their prior variance on the dual side; a threshold that cuts
    informed ones."""
    task, network = small("classification", layerwise=layerwise)
    made: list[Posterior] = []
    for word in ("primal", "dual"):
        monkeypatch.setattr(full, "side", lambda *_, word=word: word)
        made.append(Laplace(structure="full").fit(task, [network], context(Fixed())))
    primal, dual = made
    assert primal.report.facts["evidence_nats"] == pytest.approx(dual.report.facts["evidence_nats"], rel=1e-9)
    assert primal.report.facts["effective_dimension"] == pytest.approx(
        dual.report.facts["effective_dimension"], rel=1e-8
    )
    x = torch.cat([task.test.inputs, 10 * task.test.inputs])
    torch.testing.assert_close(primal.draws(6, 2)(x), dual.draws(6, 2)(x), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(primal.moments(x).covariance, dual.moments(x).covariance, rtol=1e-6, atol=1e-8)  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------- between structures


@dataclass(frozen=True)
class Spy:
    """A rule that keeps the problem it is given."""

    seen: list[PrecisionProblem] = field(default_factory=list)
    family: str = "isotropic"
    noise: str = "trained"
    needs_validation: ClassVar[bool] = False

    def choose(self, problem: PrecisionProblem) -> Choice:
        self.seen.append(problem)
        return Choice(problem.start, "fixed")


def problem_of(method: Laplace, task: Task, network: Network, like: Evidence | None = None) -> PrecisionProblem:
    """What a rule is given; one of the family and noise of `like`."""
    spy = Spy() if like is None else Spy(family=like.family, noise=like.noise)
    method.fit(task, [network], context(spy))
    return spy.seen[0]


def blocks_of(matrix: Tensor, network: Network) -> Iterator[tuple[str, Tensor]]:
    """The diagonal blocks of [P, P], one a parameter tensor."""
    start = 0
    for name, p in network.parameters.items():
        yield name, matrix[start : start + p.numel(), start : start + p.numel()]
        start += p.numel()


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_evidence_falls_as_the_structure_gets_coarser(kind: str) -> None:
    """full ≥ layers ≥ tensors ≥ diag at the same λ (Hadamard–Fischer). Planted bug: parts of the wrong tensor."""
    task, network = small(kind, num_train=30)
    lam = torch.tensor([0.7], dtype=torch.float64)
    full_one = problem_of(Laplace(structure="full"), task, network)
    diag = problem_of(Laplace(structure="diag"), task, network)
    layers = problem_of(Laplace(structure="block"), task, network)
    blocks = tuple(FullBlock(*torch.linalg.eigh(b)) for _, b in blocks_of(dense_curvature(task, network), network))
    sizes = {n: p.numel() for n, p in network.parameters.items()}
    groups = each_tensor(tuple(sizes))
    tensors = BlockCurvature(groups, blocks, sizes, torch.float64, torch.device("cpu"))
    posterior = Laplace(structure="full").fit(task, [network], context(Fixed(0.7)))
    loglik = posterior.report.facts["train_loglik_nats"]
    squares = torch.stack([p.square().sum() for p in network.parameters.values()])
    values = [
        float(full_one.evidence(lam)),
        float(layers.evidence(lam)),
        float(log_evidence(loglik, squares, tensors, lam)),
        float(diag.evidence(lam)),
    ]
    assert all(finer > coarser + 1e-3 for finer, coarser in pairwise(values))
    assert values[0] == pytest.approx(posterior.report.facts["evidence_nats"], rel=1e-10)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_diagonal_is_that_of_the_full_curvature(kind: str) -> None:
    task, network = small(kind, norm="layer")
    lam = torch.tensor([0.4], dtype=torch.float64)
    diagonal = dense_curvature(task, network).diagonal()
    squares = sum(float(p.square().sum()) for p in network.parameters.values())
    posterior = Laplace(structure="diag").fit(task, [network], context(Fixed(0.4)))
    expected = posterior.report.facts["train_loglik_nats"] - 0.5 * (
        0.4 * squares + float(torch.log1p(diagonal / lam).sum())
    )
    assert posterior.report.facts["evidence_nats"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("case", ["one point, regression", "one point, classification", "linear model"])
def test_kfac_is_exact_where_it_must_be(case: str) -> None:
    """With N = 1 each linear layer's block is G ⊗ A itself, and in a linear model with Gaussian noise at any N.

    Planted bugs: A not divided by N, or twice; G over positions instead of summed; weight and bias in one block; rows
    and columns of the Kronecker product exchanged."""
    task, network = small(
        case.rpartition(" ")[2] if "point" in case else "regression", 20 if case == "linear model" else 1
    )
    if case == "linear model":
        network = make_network(MLP(hidden=()), task)
    posterior = Laplace(structure="kfac").fit(task, [network], context(Fixed(0.5)))
    expected = torch.zeros(len(task.test) * task.spec.num_outputs, dtype=torch.float64)
    expected = torch.diag(expected)
    rows, start, log_det = dense_jacobian(network, task.test.inputs), 0, 0.0
    for _, block in blocks_of(dense_curvature(task, network), network):
        size = len(block)
        part = rows[:, start : start + size]
        inverse = torch.linalg.inv(block + 0.5 * torch.eye(size, dtype=torch.float64))
        expected += part @ inverse @ part.T
        log_det += float(torch.logdet(block / 0.5 + torch.eye(size, dtype=torch.float64)))
        start += size
    torch.testing.assert_close(posterior.joint_covariance(task.test), expected, rtol=1e-8, atol=1e-10)
    squares = sum(float(p.square().sum()) for p in network.parameters.values())
    evidence = posterior.report.facts["train_loglik_nats"] - 0.5 * (0.5 * squares + log_det)
    assert posterior.report.facts["evidence_nats"] == pytest.approx(evidence, rel=1e-9)


METHODS = [Laplace(structure=s) for s in STRUCTURE_NAMES] + [Laplace(structure="full", weights="last_layer")]


@pytest.mark.parametrize("method", METHODS, ids=[*STRUCTURE_NAMES, "last_layer"])
def test_the_linearised_mean_is_the_map_prediction(method: Laplace) -> None:
    """Planted bugs (PITFALLS A12): the mean through sampled weights; batch statistics in batchnorm; another mode."""
    networks: list[tuple[Any, tuple[int, ...]]] = [(MLP(hidden=(6, 6), norm="batch"), (3,)), (LeNet(), (1, 16, 16))]
    for model, shape in networks[:1] if method.structure == "block" else networks:  # a LeNet's layer is a large block
        task = make_task("classification", shape, 4, num_train=6, num_test=12)
        network = make_network(model, task)
        posterior = method.fit(task, [network], context(Fixed(50.0)))
        outputs = network(task.test.inputs)
        mean = posterior.moments(task.test.inputs).mean
        torch.testing.assert_close(mean, outputs, rtol=1e-10, atol=1e-12)
        assert torch.equal(mean.argmax(-1), outputs.argmax(-1))
        draws = posterior.draws(400, 0)(task.test.inputs)
        error = (posterior.moments(task.test.inputs).covariance.diagonal(dim1=1, dim2=2) / 400).sqrt()
        assert float(((draws.mean(0) - outputs) / error).abs().max()) < 5


# -------------------------------------------------------------------------------- hyperparameter rules


@pytest.mark.parametrize(  # only the full curvature has two sides
    ("structure", "side"),
    [("full", "primal"), ("full", "dual"), ("kfac", "primal"), ("diag", "primal")],
    indirect=["side"],
)
@pytest.mark.parametrize("count", ["one", "each"])
def test_the_evidence_gradient_is_that_of_finite_differences(structure: Any, count: str, side: str) -> None:
    """Planted bug: a λ detached from the graph (a cached eigendecomposition at another λ, a float() on the way)."""
    task, network = small("classification", layerwise=True)
    problem = problem_of(Laplace(structure=structure), task, network)
    logs = (problem.start[:1] if count == "one" else problem.start).log().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: problem.evidence(t.exp()), (logs,), eps=1e-5, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("start", [1e-5, 1e-3, 1.0, 1e3, 1e7])
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_evidence_search_finds_the_best_precision_from_any_start(kind: str, start: float) -> None:
    """Planted bug: a first step that leaves the bounds, where the gradient is zero, and is taken for an optimum."""
    task, network = small(kind, num_train=30)
    problem = problem_of(Laplace(structure="full"), task, network)
    grid = torch.logspace(-6, 8, 1401, dtype=torch.float64)
    values = torch.stack([problem.evidence(v.reshape(1)).detach() for v in grid])
    best = float(grid[values.argmax()])
    choice = Evidence().choose(replace(problem, start=torch.full_like(problem.start, start)))
    assert choice.status == "converged" and choice.notes == ()
    assert float(choice.precisions[0]) == pytest.approx(best, rel=0.03)
    assert float(problem.evidence(choice.precisions[:1])) >= float(values.max()) - 1e-9


def test_layerwise_evidence_beats_one_precision() -> None:
    task, network = small("classification", num_train=30)
    one = Laplace(structure="full").fit(task, [network], context(Evidence()))
    each = Laplace(structure="full").fit(task, [network], context(Evidence(family="layerwise")))
    assert each.report.facts["hyper_status"] in ("converged", "at bound")
    assert each.report.facts["evidence_nats"] > one.report.facts["evidence_nats"] + 0.1
    assert len(set(each.report.facts["prior_precisions"].values())) > 1


def test_a_precision_that_runs_away_says_so_and_keeps_its_start_or_is_held() -> None:
    """Planted bug: λ at the bound reported as converged. Weights that are all zero want an infinite precision."""
    task, network = small("regression")
    zero = replace(network, parameters={n: torch.zeros_like(p) for n, p in network.parameters.items()})
    posterior = Laplace(structure="kfac").fit(task, [zero], context(Evidence()))
    assert posterior.report.facts["hyper_status"] == "at bound"
    assert posterior.report.facts["prior_precision"] == pytest.approx(0.7)
    assert any("ran away" in note and "start" in note for note in posterior.report.notes)

    some = replace(network, parameters=network.parameters | {"hidden.1.weight": torch.zeros(4, 5, dtype=torch.float64)})
    posterior = Laplace(structure="kfac").fit(task, [some], context(Evidence(family="layerwise")))
    assert posterior.report.facts["hyper_status"] == "at bound"
    assert 1e3 < posterior.report.facts["prior_precisions"]["hidden.1.weight"] < 1e6
    assert any("hidden.1.weight" in note for note in posterior.report.notes)
    assert posterior.report.facts["prior_precisions"]["out.weight"] != pytest.approx(0.7)


@pytest.mark.parametrize("kind", ["regression", "classification"])
@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
def test_the_grid_picks_the_best_on_validation(structure: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: test points for validation_score points; noise left out; the last of the grid instead of the best.

    Classes: against 20,000 draws of other random numbers, within 5 standard errors of the rule's own (here 5,000).
    Planted there: the probit formula, for which the logits' common shift is doubt.
    """
    task, network = small(kind, num_train=30)
    network = replace(network, parameters={n: 2 * p for n, p in network.parameters.items()})
    grid = Grid(low=1e-2, high=1e2, num=9, extend=False, refine=0, standard_errors=0)
    monkeypatch.setattr(validation_score, "VALIDATION_DRAWS", 5000)
    posterior = Laplace(structure=structure).fit(task, [network], context(grid))
    values = [10 ** (-2 + i / 2) for i in range(9)]
    scores, errors = [], []
    for value in values:
        moments = Laplace(structure=structure).fit(task, [network], context(Fixed(value))).moments(task.val.inputs)
        y = task.val.targets
        assert y is not None
        if kind == "regression":
            assert isinstance(network.likelihood, Gaussian)
            noise = torch.diag((2 * network.likelihood.log_noise).exp())
            loglik = (
                MultivariateNormal(moments.mean, moments.covariance + noise).log_prob(y) - task.target_scale.log().sum()
            )
        else:
            root = torch.linalg.cholesky(moments.covariance + 1e-9 * torch.eye(moments.mean.shape[1]))
            normal = torch.randn(20_000, *moments.mean.shape, 1, generator=generator(5, "grid"), dtype=torch.float64)
            probs = (moments.mean + (root @ normal).squeeze(-1)).softmax(-1)[:, torch.arange(len(y)), y]
            loglik = probs.mean(0).log()
            errors.append(float((probs.std(0) / probs.mean(0)).mean()) / validation_score.VALIDATION_DRAWS**0.5)
        scores.append(float(loglik.mean()))
    found, best = posterior.report.facts["grid_best_validation_loglik"], max(range(9), key=scores.__getitem__)
    if kind == "classification":
        chosen = values.index(pytest.approx(posterior.report.facts["prior_precision"]))
        assert scores[best] - scores[chosen] < 5 * errors[chosen] and abs(found - scores[chosen]) < 5 * errors[chosen]
        assert max(scores) - min(scores) > 6 * errors[chosen], "any choice would do"
        return
    assert posterior.report.facts["prior_precision"] == pytest.approx(values[best])
    assert found == pytest.approx(scores[best], rel=1e-8)
    assert posterior.report.facts["hyper_status"] == ("at bound" if best in (0, 8) else "converged")
    assert len({round(s, 6) for s in scores}) == 9


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_without_linearisation_the_grid_scores_draws_of_the_network(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against 4,000 other draws of each candidate's posterior: nearer to them than to the linearised predictive.

    Planted bug: the linearised predictive's score.
    """
    monkeypatch.setattr(validation_score, "VALIDATION_DRAWS", 4000)
    task, network = small(kind, num_train=30)
    network = replace(network, parameters={n: 2 * p for n, p in network.parameters.items()})
    grid, values = Grid(low=1e-1, high=1e1, num=2, extend=False, refine=0, standard_errors=0), [0.1, 10.0]
    posterior = Laplace(structure="full", predict="network").fit(task, [network], context(grid))
    y = task.val.targets
    assert y is not None
    scores, errors, linearised = [], [], []
    for value in values:
        rule = context(Fixed(value))
        draws = Laplace(structure="full", predict="network").fit(task, [network], rule).draws(4000, 7)
        each = network.likelihood.log_prob(draws(task.val.inputs), y).exp()  # [S, B]
        scores.append(float((each.mean(0).log() - task.target_scale.log().sum()).mean()))
        spread = each.std(0) / each.mean(0)
        errors.append(float(spread.square().mean().sqrt()) / validation_score.VALIDATION_DRAWS**0.5)
        draws_of_tangent = Laplace(structure="full").fit(task, [network], rule).draws(4000, 7)
        tangent = network.likelihood.log_prob(draws_of_tangent(task.val.inputs), y).exp()
        linearised.append(float((tangent.mean(0).log() - task.target_scale.log().sum()).mean()))
    chosen = next(i for i, v in enumerate(values) if v == pytest.approx(posterior.report.facts["prior_precision"]))
    found, best = posterior.report.facts["grid_best_validation_loglik"], max(range(2), key=scores.__getitem__)
    assert abs(found - scores[chosen]) < 5 * errors[chosen]
    assert scores[best] - scores[chosen] < 5 * errors[chosen]
    apart = abs(linearised[chosen] - scores[chosen])
    assert apart > 2.5 * errors[chosen] and abs(found - scores[chosen]) < apart / 2


@pytest.mark.parametrize("rule", [Fixed(), Evidence(), Grid()], ids=["fixed", "evidence", "grid"])
@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
def test_curvature_that_is_not_finite_names_the_tensor(structure: Any, rule: HyperRule, side: str) -> None:
    """Planted bug (PITFALLS A14): NaN that goes through the posterior into the table."""
    task, network = small("regression")
    inputs = task.train.inputs.clone()
    inputs[3, 1] = math.nan
    broken = replace(task, train=replace(task.train, inputs=inputs))
    with pytest.raises(RunFailed, match=r"curvature of .*hidden\.0\.weight"):
        Laplace(structure=structure).fit(broken, [network], context(rule))
    parameters = network.parameters | {"out.weight": network.parameters["out.weight"].clone()}
    parameters["out.weight"][0, 0] = math.inf
    with pytest.raises(RunFailed, match="curvature of"):
        Laplace(structure=structure).fit(task, [replace(network, parameters=parameters)], context(rule))


# ------------------------------------------------------------------------------ joint scores, whole path


def _whole_path(kind: str, method: Any, num_draws: int = 50) -> tuple[Task, Evaluation]:
    task = make_task(kind, (3,), 1 if kind == "regression" else 3, num_train=20)
    network = make_network(MLP(hidden=(5,)), task)
    posterior = method.fit(task, [network], context(Fixed()))
    return task, evaluate(task, posterior, method.predictive, num_draws, 0, 5, 10)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_one_draw_has_tau_times_the_marginal(kind: str) -> None:
    """Planted bugs: a joint that divides by tau; blocks of other points; the remainder counted."""
    _, evaluation = _whole_path(kind, MAP())
    marginal = {s.split: s.value for s in Marginal()(evaluation, 0) if s.metric == "marginal_loglik"}["test"]
    for score in Joint(taus=(1, 2, 3, 4, 6, 12), repeats=4, tolerance=0.01)(evaluation, 0):
        assert score.metric == "joint_loglik" and score.tau is not None and score.status == "ok"
        assert score.value == pytest.approx(score.tau * marginal, rel=1e-10)


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_the_joint_at_tau_1_is_the_marginal_and_larger_blocks_are_not(kind: str) -> None:
    """Planted bug (PITFALLS C6): the mean over draws for each point, so that the joint is tau times the marginal."""
    _, evaluation = _whole_path(kind, Laplace(structure="full"))
    marginal = {s.split: s.value for s in Marginal()(evaluation, 0) if s.metric == "marginal_loglik"}["test"]
    scores = Joint(taus=(1, 6), repeats=4, tolerance=0.01)(evaluation, 0)
    joint = {s.tau: s.value for s in scores if s.metric == "joint_loglik"}
    assert joint[1] == pytest.approx(marginal, rel=1e-10)
    assert abs(joint[6] - 6 * marginal) > 1e-3


@pytest.mark.parametrize("kind", ["regression", "classification"])
def test_laplace_through_the_network_states_nothing_of_the_tangent_model(kind: str) -> None:
    """Planted bug: the exact Gaussian joint of the linearised posterior in the row of the non-linearised one."""
    _, evaluation = _whole_path(kind, Laplace(structure="full", predict="network"))
    assert evaluation.gaussian_joint is None and evaluation.has_joint


def test_last_layer_and_held_weights_do_not_move() -> None:
    """Planted bug: weights held at MAP that are drawn from their prior."""
    task = make_task("classification", (3,), 3, num_train=20)
    network = make_network(MLP(hidden=(5,), norm="layer"), task)
    last = Laplace(structure="full", weights="last_layer").fit(task, [network], context(Fixed()))
    assert {n for n, rule in last.treatment.items() if "held" not in rule} == {"out.weight", "out.bias"}
    assert set(last.treatment) == set(network.parameters)
    held = Laplace(structure="kfac", hold=("norm",)).fit(task, [network], context(Fixed()))
    assert {n for n, rule in held.treatment.items() if "held" in rule} == {"norms.0.weight", "norms.0.bias"}
    features = torch.nn.functional.layer_norm(
        task.test.inputs @ network.parameters["hidden.0.weight"].T + network.parameters["hidden.0.bias"], (5,)
    )
    features = torch.tanh(features * network.parameters["norms.0.weight"] + network.parameters["norms.0.bias"])
    basis = torch.cat([features, torch.ones(len(features), 1, dtype=torch.float64)], 1)
    moved = last.draws(8, 0)(task.test.inputs) - network(task.test.inputs)  # [S, B, K], within the span of the features
    residual = moved - basis @ torch.linalg.lstsq(basis.expand(8, -1, -1), moved).solution
    assert float(residual.abs().max()) < 1e-9 and float(moved.abs().min()) > 0
