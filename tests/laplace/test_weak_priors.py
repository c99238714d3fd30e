"""One posterior at every prior precision: draws, closed form, roots and products agree with its singular values.

Or the precision is refused, with the smallest one that is right.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.curvature import full
from bnn_runner.curvature.full import FullCurvature
from bnn_runner.curvature.psd import Repairs
from bnn_runner.errors import RunFailed
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.laplace.evidence import log_likelihood
from bnn_runner.methods.laplace import Laplace
from bnn_runner.methods.laplace_functional import LaplaceFunctional
from bnn_runner.models.mlp import MLP
from bnn_runner.tasks import Task
from tests.curvature.test_float32 import converted
from tests.laplace.test_identities import dense_jacobian
from tests.problems import context, make_network, make_task

PRECISIONS = tuple(10.0**e for e in range(-8, 9, 2))
METHODS: dict[str, Any] = {
    "primal": Laplace(structure="full"),
    "dual": Laplace(structure="full"),
    "functional": LaplaceFunctional(form="exact"),
    "low_rank": Laplace(structure="low_rank", rank=1000),
    "kfac": Laplace(structure="kfac"),
    "block": Laplace(structure="block"),
    "diag": Laplace(structure="diag"),
}
EXACT = ("primal", "dual", "functional", "low_rank")
DRAWS = 2000


@pytest.fixture
def problem() -> tuple[Task, Network]:
    """A spectrum of many orders of magnitude: one input, smooth features, little noise."""
    task = make_task("regression", (1,), 1, num_train=40)
    return task, make_network(MLP(hidden=(15, 15), activation="tanh"), task, noise=0.01)


def at(network: Network, precision: float) -> Network:
    return replace(network, prior_precision=dict.fromkeys(network.parameters, precision))


def reference(task: Task, network: Network, precision: float) -> tuple[Tensor, float]:
    """Variances [B] of the test points and the evidence (nats), from the singular values of the Jacobian."""
    scale = network.likelihood.log_noise.exp()  # type: ignore[attr-defined]
    rows, new = dense_jacobian(network, task.train.inputs) / scale, dense_jacobian(network, task.test.inputs)
    _, sizes, right = torch.linalg.svd(rows, full_matrices=False)
    within = new @ right.T
    off = new - within @ right
    variances = (within.square() / (precision + sizes.square())).sum(1) + off.square().sum(1) / precision
    squares = sum(float(p.square().sum()) for p in network.parameters.values())
    log_det = float(torch.log1p(sizes.square() / precision).sum())
    return variances, log_likelihood(task, network) - 0.5 * (precision * squares + log_det)


@pytest.mark.parametrize("name", METHODS)
def test_a_posterior_agrees_with_itself_or_is_refused(
    name: str, problem: tuple[Task, Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted bugs: eigenvalues below 1e-13 of the largest taken for zero; a null space with rounded information."""
    if name in ("primal", "dual"):
        monkeypatch.setattr(full, "side", lambda *_: name)
    task, network = problem
    x, agreed = task.test.inputs, 0
    for precision in PRECISIONS:
        try:
            posterior = METHODS[name].fit(task, [at(network, precision)], context(Fixed()))
        except RunFailed as error:
            least = re.search(r"at least ([^;]+);", str(error))
            assert least is not None and float(least[1]) > precision
            METHODS[name].fit(task, [at(network, float(least[1]))], context(Fixed()))
            continue
        agreed += 1
        closed = posterior.moments(x).covariance[:, 0, 0]
        draws = posterior.draws(DRAWS, 0)(x)[..., 0]
        scores = (draws.var(0) / closed - 1) / (2 / DRAWS) ** 0.5
        assert float(scores.abs().max()) < 5
        joint = posterior.joint_covariance(task.test).diagonal()
        torch.testing.assert_close(joint, closed, rtol=2e-3, atol=0)
        rows = dense_jacobian(network, x)
        torch.testing.assert_close((rows * posterior.gaussian.product(rows)).sum(1), closed, rtol=2e-3, atol=0)
        if name in EXACT:
            variances, evidence = reference(task, network, precision)
            torch.testing.assert_close(closed, variances, rtol=2e-3, atol=0)
            error = posterior.report.facts.get("evidence_too_high_by_at_most_nats", 0.0)
            assert posterior.report.facts["evidence_nats"] == pytest.approx(evidence, rel=1e-9, abs=1e-2 + error)
    assert agreed >= (len(PRECISIONS) if name in ("dual", "functional", "diag") else 6)


def test_a_float32_network_is_refused_where_its_derivatives_are_rounding(problem: tuple[Task, Network]) -> None:
    """However the curvature is factored; the message is typeable. Planted bug: the singular values trusted."""
    task, network = converted(*problem, torch.float32)
    for method in (METHODS["dual"], METHODS["functional"], METHODS["kfac"]):
        with pytest.raises(RunFailed, match=r"must be at least .*; got 1e-10"):
            method.fit(task, [network], context(Fixed(1e-10)))
        method.fit(task, [network], context(Fixed(1e-3)))
    with pytest.raises(RunFailed, match="the selected prior precision must be at least"):
        METHODS["kfac"].fit(task, [at(network, 1e-12)], context(Evidence(low=1e-13, high=2e-12)))


def test_unequal_weak_precisions_by_singular_values() -> None:
    """Log determinant, its derivative and effective dimensions, against those of float64 algebra with scaled rows."""
    rows = torch.randn(6, 20, dtype=torch.float64) * torch.logspace(0, 5, 6, dtype=torch.float64)[:, None]
    curvature = FullCurvature(rows, None, {"a": 8, "b": 12}, torch.float64, Repairs())
    precisions = torch.tensor([1e-4, 3e-2], dtype=torch.float64, requires_grad=True)
    assert curvature.weak(precisions) and not curvature.weak(torch.tensor([1e4, 1e4]).double())
    value = curvature.log_det_ratio(precisions)
    value.backward()
    scaled = rows / precisions.detach().repeat_interleave(torch.tensor([8, 12])).sqrt()
    _, sizes, right = torch.linalg.svd(scaled, full_matrices=False)
    shrunk = right.T.square() @ (sizes.square() / (1 + sizes.square()))
    dimensions = torch.stack([shrunk[:8].sum(), shrunk[8:].sum()])
    assert float(value.detach()) == pytest.approx(float(torch.log1p(sizes.square()).sum()), rel=1e-12)
    torch.testing.assert_close(precisions.grad, -dimensions / precisions.detach(), rtol=1e-9, atol=0)
    torch.testing.assert_close(curvature.effective_dimensions(precisions.detach()), dimensions, rtol=1e-9, atol=0)
