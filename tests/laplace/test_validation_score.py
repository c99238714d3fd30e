"""Validation scores of candidate precisions: against definitions, and near the network itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from bnn_runner.base import Network
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.psd import Repairs
from bnn_runner.curvature.structures import fit_structure
from bnn_runner.errors import RunFailed
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.laplace import validation_score
from bnn_runner.laplace.validation_score import network_validation_scores, validation_scores
from bnn_runner.methods.laplace import Laplace
from bnn_runner.tasks import Split, Task
from tests.laplace.test_identities import small
from tests.problems import context

SCORES: Any = ("marginal", "dyadic", "joint")


def fitted(structure: Any = "full") -> tuple[Task, Network, Jacobians, Any]:
    """A network of classes with 20 validation points, and its curvature."""
    task, network = small("classification", num_train=30)
    x = torch.randn(20, *task.train.inputs.shape[1:], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = network(x).argmax(-1).roll(1)
    task = replace(task, val=Split(x, y, torch.arange(20)))
    method = Laplace(structure=structure)
    jacobians = Jacobians(network)
    with torch.no_grad():
        jacobians.learn_shapes(task.train.inputs[:4])
        passes = method.passes(jacobians, task, context(Fixed()), Repairs())
        return task, network, jacobians, fit_structure(structure, passes)


def at(curvature: Any, value: float) -> torch.Tensor:
    return torch.full((len(curvature.groups),), value, dtype=torch.float64)


@pytest.mark.parametrize("structure", ["full", "kfac", "diag"])
def test_scores_under_a_strong_prior_are_those_of_the_network(structure: Any) -> None:
    """Marginal, dyadic and joint tend to the network's own, exactly; the change is of the order 1/λ.

    Planted bugs: draws that are not mirrored, whose noise is of the order λ^-½; a constant left out.
    """
    task, network, jacobians, curvature = fitted(structure)
    assert task.val.targets is not None and isinstance(task.val.inputs, torch.Tensor)
    own = network.likelihood.log_prob(network(task.val.inputs), task.val.targets)
    limit, near, nearer = validation_scores(
        task, jacobians, curvature, [at(curvature, v) for v in (1e12, 1e5, 1e6)], SCORES
    )
    torch.testing.assert_close(limit["marginal"], own.unsqueeze(0), rtol=0, atol=1e-9)
    assert limit["dyadic"].shape == (10, 10) and limit["joint"].shape == (10, 2)
    for score in SCORES:
        total = float(limit[score].mean())
        labels = {"marginal": 1, "dyadic": 10, "joint": 10}[score]
        if score != "dyadic":  # of a dyadic score only on average over the repeats
            assert total == pytest.approx(labels * float(own.mean()), rel=1e-8)
        change, smaller = (float((row[score] - limit[score]).mean()) for row in (near, nearer))
        assert change / smaller == pytest.approx(10, rel=0.01)


def test_joint_scores_are_those_of_the_mirrored_draws() -> None:
    """By loops over blocks and draws. Planted bugs: one mean over all draws' points; counts that are left out."""
    task, network, jacobians, curvature = fitted()
    [found] = validation_scores(task, jacobians, curvature, [at(curvature, 2.0)], SCORES)
    posterior = Laplace(structure="full").fit(task, [network], context(Fixed(2.0)))
    x, y = task.val.inputs, task.val.targets
    assert isinstance(x, torch.Tensor) and y is not None
    plus = posterior.draws(validation_score.VALIDATION_DRAWS // 2, 0)(x)
    each = network.likelihood.log_prob(torch.cat([plus, 2 * network(x) - plus]), y)  # [S, V]
    for score in ("dyadic", "joint"):
        for r, blocks in enumerate(validation_score._blocks(score, task.val.ids)):
            counts = torch.ones_like(blocks.anchors) if blocks.counts is None else blocks.counts
            assert bool((counts.sum(1) == 10).all())
            for m in range(len(blocks.anchors)):
                terms = (each[:, blocks.anchors[m]] * counts[m]).sum(1)
                expected = float(torch.logsumexp(terms, 0)) - math.log(len(each))
                assert float(found[score][r, m]) == pytest.approx(expected, rel=1e-6)
    marginal = torch.logsumexp(each, 0) - math.log(len(each))  # by other draws: of each point's outputs
    assert float((found["marginal"][0] - marginal).abs().mean()) < 0.1


def test_chunks_of_draws_and_candidates_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task, _, jacobians, curvature = fitted("kfac")
    candidates = [at(curvature, v) for v in (0.5, 5.0, 50.0)]
    whole = validation_scores(task, jacobians, curvature, candidates, SCORES)
    monkeypatch.setattr(validation_score, "DRAW_FLOATS", 37 * sum(jacobians.sizes().values()))
    for one, other in zip(whole, validation_scores(task, jacobians, curvature, candidates, SCORES), strict=True):
        for score in SCORES:
            torch.testing.assert_close(one[score], other[score])


@pytest.mark.parametrize("scores", [("marginal",), ("dyadic",)])
def test_progress_is_reported_and_stops_the_search(scores: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted bugs: a long search without a word; more steps done than there are."""
    task, _, jacobians, curvature = fitted("kfac")
    monkeypatch.setattr(validation_score, "DRAW_FLOATS", 37 * sum(jacobians.sizes().values()))
    told: list[tuple[int, int]] = []
    candidates = [at(curvature, v) for v in (0.5, 5.0)]
    validation_scores(task, jacobians, curvature, candidates, scores, None, lambda stage, *at: told.append(at))
    assert told and told[-1][0] == told[-1][1] and [a for a, _ in told] == sorted(a for a, _ in told)

    def stop(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        validation_scores(task, jacobians, curvature, candidates, scores, None, stop)


def test_at_most_so_many_points_and_the_same_ones_for_every_candidate() -> None:
    task, _, jacobians, curvature = fitted()
    one, other = (validation_scores(task, jacobians, curvature, [at(curvature, v)], SCORES, 12)[0] for v in (1e12, 1e9))
    assert one["marginal"].shape == (1, 12) and one["dyadic"].shape == (10, 6)
    torch.testing.assert_close(one["marginal"], other["marginal"], rtol=0, atol=1e-6)
    networks = network_validation_scores(task, jacobians, curvature, [at(curvature, 1e12)], SCORES, 12)[0]
    torch.testing.assert_close(networks["marginal"], one["marginal"], rtol=0, atol=1e-4)
    torch.testing.assert_close(networks["dyadic"], one["dyadic"], rtol=0, atol=1e-2)


def test_too_few_points_for_a_block_and_a_prior_that_is_too_weak() -> None:
    task, _, jacobians, curvature = fitted()
    with pytest.raises(RunFailed, match=r"hyper\.score=joint requires at least 10 validation points; there are 7"):
        validation_scores(task, jacobians, curvature, [at(curvature, 1.0)], ("joint",), 7)
    weak, usable = validation_scores(task, jacobians, curvature, [at(curvature, 1e-14), at(curvature, 1.0)])
    assert bool(weak["marginal"].isnan().all()) and bool(usable["marginal"].isfinite().all())
