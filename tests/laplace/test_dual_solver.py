"""Draws solved in the space of the outputs against the dense solution (float64)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.laplace import dual_solver
from bnn_runner.laplace.dual_solver import DualSolver, affordable
from bnn_runner.laplace.solvers import Right, Whitened
from bnn_runner.methods.laplace_sampled import LaplaceSampled
from tests.curvature.test_float32 import converted
from tests.laplace.test_tangent_scale import WIDE, wide
from tests.problems import context


def rows_of(case: str, points: int = 5) -> GGNOperator:
    task, network = wide(case, num_train=points)
    jacobians = Jacobians(network)
    jacobians.learn_shapes(task.train.gather(torch.arange(2))[0])
    return GGNOperator.of(task, jacobians, OutputCurvature(), lambda stage, done, total: None)


@pytest.mark.parametrize(("case", "memory"), [(case, "enough") for case in WIDE] + [("resnet18", "scarce")])
def test_the_solution_is_the_dense_one(case: str, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one λ a tensor and one a weight, and a multiple of the first. Planted bugs: V for its root; positions of one
    point with channels of another; the upper triangle; a Gram matrix of the last Λ."""
    monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 0)
    if memory == "scarce":
        monkeypatch.setattr(dual_solver, "PART_BYTES", 1)
    rows = rows_of(case)
    dense = rows._dense().flatten(0, 1)
    sizes = torch.tensor(list(rows.jacobians.sizes().values()))
    by_tensor = torch.linspace(0.3, 2, len(sizes), dtype=torch.float64).repeat_interleave(sizes)
    by_weight = torch.linspace(0.3, 2, rows.size, dtype=torch.float64)
    b = torch.randn(2, rows.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    solver, passes = DualSolver(1e-8), []
    for scale in (by_tensor, 3 * by_tensor, by_weight):
        matrix, before = Whitened(rows, scale), rows.passes
        found = solver(matrix, Right(b, torch.zeros_like(b)), b)
        passes.append(rows.passes - before)
        a = dense * scale
        small = torch.linalg.solve(torch.eye(len(a), dtype=torch.float64) + a @ a.T, a @ b.T)
        torch.testing.assert_close(found.values, b - (a.T @ small).T, rtol=1e-8, atol=1e-9)
        assert float(found.error.max()) < 1e-8
    assert passes[1] < passes[0], "a multiple costs no Gram matrix"
    assert memory == "enough" or passes[0] - passes[1] == len(sizes)


def test_auto_takes_it_for_few_rows_that_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    task, network = wide("lenet")
    method = LaplaceSampled(samples=2, probes=0)
    assert method.fit(task, [network], context(Fixed())).report.facts["solver"] == "cg"
    monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 0)
    found = method.fit(task, [network], context(Fixed()))
    assert found.report.facts["solver"] == "dual" and found.report.facts["sample_error_sd"] < 1e-6
    asked: Any = replace(method, solver="cg", tolerance=1e-6)
    other = asked.fit(task, [network], context(Fixed()))
    torch.testing.assert_close(found.gaussian.sample(1, 0, 2), other.gaussian.sample(1, 0, 2), rtol=1e-4, atol=1e-5)
    monkeypatch.setattr(dual_solver, "MOST_ROWS", 10)
    assert not affordable(found.gaussian.rows)


def test_float32_is_refined_below_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weak prior: after one step the draws are off by dozens of standard deviations. Planted bugs: a single step; the
    residual of the recursion instead of the true one."""
    monkeypatch.setattr("bnn_runner.runtime.memory.KEPT_BYTES", 0)
    task, network = converted(*wide("resnet18"), torch.float32)
    method = LaplaceSampled(solver="dual", samples=2, probes=0)
    report = method.fit(task, [network], context(Fixed(1e-3))).report
    assert report.facts["sample_error_sd"] < 0.01 and not any("draws are off" in note for note in report.notes)
    monkeypatch.setattr(LaplaceSampled, "_solver", lambda self, rows: DualSolver(self.tolerance, steps=1))
    report = method.fit(task, [network], context(Fixed(1e-3))).report
    assert report.facts["sample_error_sd"] > 1 and any("draws are off" in note for note in report.notes)
