"""What a search of precisions calls converged, where several of them begin, and how those that run away are held."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import Network
from bnn_runner.hyper.em import EM
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.fixed_point import FixedPoint
from bnn_runner.hyper.search_end import GRADIENT_NATS, status_of
from bnn_runner.methods.laplace import Laplace
from bnn_runner.models.mlp import MLP
from bnn_runner.tasks import Task
from tests.laplace.test_prior_families import synthetic
from tests.problems import context, make_network, make_task

RULES = (Evidence, FixedPoint, EM)
TANGENT = Laplace(structure="full", mode="tangent")


def normalised() -> tuple[Task, Network]:
    """A batchnorm network that is far from any optimum of its own."""
    task = make_task("regression", (1,), 1, num_train=40)
    return task, make_network(MLP(hidden=(12, 12), norm="batch"), task)


def fitted(rule: Any, task: Task, network: Network, passes: int | None = None) -> tuple[dict[str, Any], str]:
    report = replace(TANGENT, tangent_passes=passes).fit(task, [network], context(rule)).report
    return dict(report.facts), "\n".join(report.notes)


def evidence_at(task: Task, network: Network, logs: Tensor) -> float:
    """The evidence at given log precisions, v* searched for them alone."""
    given = replace(network, prior_precision=dict(zip(network.parameters, logs.exp().tolist(), strict=True)))
    return float(TANGENT.fit(task, [given], context(Fixed())).report.facts["evidence_nats"])


def derivative(task: Task, network: Network, facts: dict[str, Any]) -> float:
    """Of the evidence in the logarithm of the one precision, by central differences."""
    at = torch.full((len(network.parameters),), math.log(facts["prior_precision"]), dtype=torch.float64)
    return (evidence_at(task, network, at + 1e-3) - evidence_at(task, network, at - 1e-3)) / 2e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("passes", [2, 12, 24, 48, None])
def test_converged_is_a_derivative_of_zero_at_a_v_that_is_reached(rule: Any, passes: int | None) -> None:
    """Against finite differences. Planted bug: a frozen v* after the last pass, at which the rule then settles."""
    task, network = normalised()
    facts, notes = fitted(rule(), task, network, passes)
    found = derivative(task, network, facts)
    if facts["hyper_status"] == "converged":
        assert facts["tangent_settled"] and abs(found) <= GRADIENT_NATS
    else:
        assert facts["hyper_status"] == "v* not reached" and "method.tangent_passes" in notes
        assert not facts["tangent_settled"] or abs(found) > GRADIENT_NATS
    if facts["tangent_settled"]:
        assert facts["hyper_gradient"] == pytest.approx(abs(found), abs=1e-4)
    assert passes is not None or facts["hyper_status"] == "converged"
    assert passes != 2 or facts["hyper_status"] == "v* not reached"


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["groupwise", "layerwise"])
def test_several_precisions_end_where_all_rules_do_and_above_the_best_single_one(family: Any) -> None:
    """Of a normalised network, whose evidence has many maxima and groups without one. Planted bugs: a search from the
    training prior; groups that ran away set back to it, which cost 15 nats of the evidence of one precision."""
    task, network = normalised()
    single = fitted(Evidence(), task, network)[0]["evidence_nats"]
    ends = [fitted(rule(family=family, steps=2000), task, network, 20_000) for rule in RULES]
    values = [facts["evidence_nats"] for facts, _ in ends]
    assert min(values[:2]) > single + 0.1 and values[0] == pytest.approx(values[1], abs=0.2)
    assert min(values[:2]) > values[2] - 0.05
    for facts, notes in ends[:2]:
        assert facts["hyper_status"] == "at bound" and facts["hyper_gradient"] <= GRADIENT_NATS
        assert "ran away" in notes and "hidden.0.bias" in notes  # it has no effect before a batchnorm


def test_a_group_that_runs_away_is_held_where_the_evidence_levels_off() -> None:
    """γ = h/(h + λ) without weights: E = ½ log(λ/(λ + h)) grows for ever. Planted bugs: the bound; a status of
    converged at a derivative that is small because all is flat."""

    def evidence(p: Tensor) -> Tensor:
        each = p.expand(2)
        return -0.5 * (torch.log1p(1 / each[0]) + (each[1].log() - 1.0).square())

    def dimensions(p: Tensor) -> Tensor:
        return torch.stack([1 / (1 + p[0]), 2 - p[1].log() + 1.0])

    problem = replace(synthetic(evidence, dimensions), squares=lambda p: torch.stack([0 * p[0], 2.0 / p[1]]))
    for rule in (Evidence(family="layerwise"), FixedPoint(family="layerwise", steps=500)):
        choice = rule.choose(problem)
        assert choice.status == "at bound"
        assert any("precision of a ran away" in n and "does not depend on it" in n for n in choice.notes)
        assert 0.5 / (1 + float(choice.precisions[0])) <= GRADIENT_NATS < 0.5 / (1 + float(choice.precisions[0]) / 11)
        assert float(choice.precisions[1].log()) == pytest.approx(1.0, abs=1e-3)


def test_the_status_is_decided_by_one_table() -> None:
    small, large = GRADIENT_NATS / 2, 2 * GRADIENT_NATS
    assert status_of(small, 0.0, exhausted=False, held=False) == "converged"
    assert status_of(small, 0.0, exhausted=True, held=False) == "converged"
    assert status_of(small, large, exhausted=False, held=False) == "v* not reached"
    assert status_of(large, 0.0, exhausted=True, held=False) == "v* not reached"
    assert status_of(large, 0.0, exhausted=False, held=True) == "not converged"
    assert status_of(small, 0.0, exhausted=False, held=True) == "at bound"
    assert status_of(math.nan, 0.0, exhausted=False, held=False) == "not converged"
    assert status_of(small, math.nan, exhausted=False, held=False) == "v* not reached"
    assert status_of(small, 0.0, exhausted=False, held=False, diverged=True) == "diverged"


def test_a_fixed_point_that_goes_back_and_forth_settles() -> None:
    """γ = 2 λ^-1.5 and ‖w‖² = 1: each full step overshoots by half as much again. Planted bug: full steps."""
    problem = synthetic(lambda p: -(2 / 1.5) * p.pow(-1.5).sum() / 2 - 0.5 * p.sum(), lambda p: 2 * p.pow(-1.5))
    choice = FixedPoint(family="layerwise").choose(replace(problem, sizes=()))
    assert choice.status == "converged"
    torch.testing.assert_close(choice.precisions, torch.full((2,), 2**0.4, dtype=torch.float64), rtol=1e-5, atol=0)
