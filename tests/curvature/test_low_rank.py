"""Low-rank Laplace against the dense curvature's leading eigenpairs, float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.curvature import low_rank
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.cnn import CNN
from bnn_runner.runtime.memory import limited_memory
from tests.laplace.test_identities import dense_curvature, dense_jacobian, small
from tests.problems import context, make_network, make_task

KINDS = ["regression", "classification"]


@pytest.fixture(params=["whole", "iterated"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By one decomposition, or by subspace iteration, which on these small problems may take all passes it wants."""
    if request.param == "iterated":
        monkeypatch.setattr(low_rank, "EXACT_UP_TO", 0)
        monkeypatch.setattr(low_rank, "MOST_PASSES", 60)
        monkeypatch.setattr(low_rank, "ENOUGH", 1e-13)
    return str(request.param)


def lambdas(network: Network) -> Tensor:
    values = [network.prior_precision[n] for n in network.parameters]
    counts = torch.tensor([p.numel() for p in network.parameters.values()])
    return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [3, 12])
def test_evidence_and_covariance_are_those_of_the_leading_eigenpairs(kind: str, rank: int, way: str) -> None:
    """By numpy, one precision a layer. Planted bugs: the smallest eigenpairs; eigenvalues for their roots; the
    whitened curvature's eigenpairs in place of the curvature's own; a pass that starts from the last one's sum."""
    task, network = small(kind, num_train=25, layerwise=True)
    posterior = Laplace(structure="low_rank", rank=rank).fit(task, [network], context())
    values, vectors = np.linalg.eigh(dense_curvature(task, network).numpy())
    leading = torch.from_numpy((vectors[:, -rank:] * values[-rank:]) @ vectors[:, -rank:].T)
    lam = lambdas(network)
    precision = leading + torch.diag(lam)
    rows = dense_jacobian(network, task.test.inputs)
    expected = rows @ torch.linalg.solve(precision, rows.T)
    torch.testing.assert_close(posterior.joint_covariance(task.test), expected, rtol=1e-6, atol=1e-9)
    squares = torch.cat([p.flatten() for p in network.parameters.values()]).square()
    log_det = float(torch.logdet(precision) - lam.log().sum())
    evidence = posterior.report.facts["train_loglik_nats"] - 0.5 * (float(lam @ squares) + log_det)
    assert posterior.report.facts["evidence_nats"] == pytest.approx(evidence, rel=1e-7)
    assert posterior.report.facts["trace_kept"] == pytest.approx(values[-rank:].sum() / values.sum(), rel=1e-7)
    assert (
        posterior.report.facts["low_rank_passes"] == 0
        if way == "whole"
        else posterior.report.facts["low_rank_passes"] > 1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_all_eigenpairs_are_the_full_curvature(kind: str, way: str) -> None:
    """Also under a rule that searches. Planted bug: a rank that also counts the directions outside it."""
    task, network = small(kind, num_train=15)
    for rule in (Fixed(0.5), Evidence(family="layerwise")):
        full = Laplace(structure="full").fit(task, [network], context(rule))
        made = Laplace(structure="low_rank", rank=10**6).fit(task, [network], context(rule))
        assert made.report.facts["evidence_nats"] == pytest.approx(full.report.facts["evidence_nats"], rel=1e-6)
        torch.testing.assert_close(
            made.joint_covariance(task.test), full.joint_covariance(task.test), rtol=1e-4, atol=1e-7
        )
        assert made.report.facts["trace_kept"] == pytest.approx(1)
        assert made.report.facts["effective_dimension"] == pytest.approx(
            full.report.facts["effective_dimension"], rel=1e-5
        )


@pytest.mark.parametrize("exact_up_to", [3000, 0])
def test_what_is_dropped_makes_the_posterior_wider_and_is_bounded(
    exact_up_to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the iteration's own budget, settled or not. Planted bug: Ritz pairs, which can exceed the curvature."""
    monkeypatch.setattr(low_rank, "EXACT_UP_TO", exact_up_to)
    task = make_task("classification", (1, 8, 8), 3, num_train=20)
    network = make_network(CNN(channels=[3, 4], kernels=[3, 3]), task)
    full = Laplace(structure="full").fit(task, [network], context(Fixed(0.3)))
    for rank in (2, 15):
        made = Laplace(structure="low_rank", rank=rank).fit(task, [network], context(Fixed(0.3)))
        excess = made.report.facts["evidence_nats"] - full.report.facts["evidence_nats"]
        assert 0 < excess <= made.report.facts["evidence_too_high_by_at_most_nats"] < 60 * excess
        assert any("low rank" in note for note in made.report.notes)
        assert set(made.treatment.values()) == {"leading eigenpairs of the full curvature"}
        wider = made.joint_covariance(task.test) - full.joint_covariance(task.test)
        assert float(torch.linalg.eigvalsh(wider)[0]) > -1e-9
        values = torch.linalg.eigvalsh(dense_curvature(task, network))
        best = float(values[-rank:].sum() / values.sum())
        assert 0.97 * best < made.report.facts["trace_kept"] <= best + 1e-9


def test_draws_have_the_covariance() -> None:
    task, network = small("classification", num_train=25)
    posterior = Laplace(structure="low_rank", rank=4).fit(task, [network], context(Fixed(0.5)))
    draws = posterior.draws(4000, 2)(task.test.inputs).flatten(1)
    variance = posterior.joint_covariance(task.test).diagonal()
    assert float(((draws.var(0) - variance) / (variance * (2 / 4000) ** 0.5)).abs().max()) < 5


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bug: a rank given to a structure that has none, ignored in silence."""
    method: dict[str, Any] = {"structure": "kfac", "rank": 5}
    for changes in (method, {"structure": "low_rank", "rank": 0}):
        with pytest.raises(UserError, match=r"method\.rank"):
            Laplace(**changes)
    task, network = small("classification")
    monkeypatch.setattr(low_rank, "EXACT_UP_TO", 0)
    with limited_memory(1e-5), pytest.raises(RunFailed, match=r"method\.rank"):
        Laplace(structure="low_rank").fit(task, [network], context())
    problems = Laplace(structure="low_rank").problems(task.spec, Evidence(family="g"))  # type: ignore[arg-type]
    assert any("low_rank" in problem for problem in problems)
