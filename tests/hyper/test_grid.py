"""hyper=grid: how far it searches, what it selects by, and what it says at an end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bnn_runner.base import PrecisionProblem, ValidationScore
from bnn_runner.errors import UserError
from bnn_runner.hyper.grid import HIGHEST, LOWEST, Grid
from bnn_runner.hyper.validation_choice import paired, preferred
from bnn_runner.tasks import TaskSpec


def problem(score: Callable[[float], float], calls: list[Any] | None = None) -> PrecisionProblem:
    """Two groups; every score of a precision λ is `score(log10 λ)` at each of three points."""

    def validation(
        candidates: Sequence[Tensor], scores: Sequence[ValidationScore], points: int | None
    ) -> list[dict[ValidationScore, Tensor]]:
        if calls is not None:
            calls.append(([float(c[0]) for c in candidates], tuple(scores), points))
        values = [score(math.log10(float(c[0]))) for c in candidates]
        return [{name: torch.full((1, 3), v, dtype=torch.float64) for name in scores} for v in values]

    return PrecisionProblem(
        names=("a", "b"),
        start=torch.tensor([0.5, 2.0], dtype=torch.float64),
        evidence=lambda p: p.sum(),
        validation=validation,
        effective_dimensions=lambda p: torch.ones(2, dtype=torch.float64),
        squares=lambda p: torch.ones(2, dtype=torch.float64),
        validation_points=3,
    )


@pytest.mark.parametrize("best", [-7.1, -3.6, 1.3, 6.6, 9.2, 11.7])
def test_the_grid_goes_on_until_the_best_is_inside(best: float) -> None:
    """Planted bugs: the ends of the grid as bounds; one extension only; an extension in one direction only."""
    choice = Grid().choose(problem(lambda x: -((x - best) ** 2)))
    assert choice.status == "converged" and not choice.notes
    assert abs(math.log10(float(choice.precisions[0])) - best) <= 0.125 + 1e-9  # steps of 0.5, halved once
    low, high = choice.facts["grid_searched"]
    assert LOWEST <= low < 10**best < high <= HIGHEST * (1 + 1e-9)


def test_refining_halves_the_step_and_none_keeps_it() -> None:
    calls: list[Any] = []
    choice = Grid(refine=3, num=5, low=1e-2, high=1e2).choose(problem(lambda x: -((x - 0.3) ** 2), calls))
    assert float(choice.precisions[0]) == pytest.approx(10**0.25)
    assert [round(math.log10(v), 3) for v in calls[1][0]] == [-0.75, -0.5, -0.25, 0.25, 0.5, 0.75]
    plain = Grid(refine=0, num=5, low=1e-2, high=1e2).choose(problem(lambda x: -((x - 0.3) ** 2)))
    assert float(plain.precisions[0]) == pytest.approx(1.0) and plain.facts["grid_points"] == 5


@pytest.mark.parametrize(("slope", "bound"), [(1.0, HIGHEST), (-1.0, LOWEST)])
def test_a_choice_at_the_final_bound_is_told(slope: float, bound: float) -> None:
    choice = Grid().choose(problem(lambda x: slope * x))
    assert choice.status == "at bound" and float(choice.precisions[0]) == pytest.approx(bound)
    assert "end of the search, which goes to 1e-08 and 1e+12" in choice.notes[0]
    fixed = Grid(extend=False).choose(problem(lambda x: slope * x))
    assert fixed.status == "at bound" and "hyper.extend=true" in fixed.notes[0]
    assert float(fixed.precisions[0]) == pytest.approx(1e6 if slope > 0 else 1e-2)


def test_the_search_ends_where_the_posterior_is_the_network_itself() -> None:
    """The score tends to the network's like −1/λ. Planted bug: a search up to the bound, for 1e-10 nats."""
    calls: list[Any] = []
    choice = Grid(high=1e3).choose(problem(lambda x: -(10.0**-x), calls))
    assert choice.status == "converged" and "prefers the trained network without uncertainty" in choice.notes[0]
    assert choice.facts["grid_searched"][1] < 1e10 and len(calls) == 3
    # 5e-4 nats are no difference: λ is 1 / 5e-4, on the finer grid around it
    assert 2000 <= float(choice.precisions[0]) < 2000 * 10**0.25
    exact = Grid(high=1e3, standard_errors=0).choose(problem(lambda x: -(10.0**-x)))
    assert float(exact.precisions[0]) > 1e5


def test_a_score_that_is_not_finite_is_skipped_and_counted() -> None:
    choice = Grid(refine=0).choose(problem(lambda x: math.nan if x > 1.2 else x))
    assert choice.facts["grid_not_finite"] == 5 and float(choice.precisions[0]) == pytest.approx(10.0)


def scores(*several: Sequence[float]) -> list[Tensor]:
    return [torch.tensor([each], dtype=torch.float64) for each in several]


def test_a_standard_error_is_that_of_the_difference_at_each_point() -> None:
    """Points differ by nats, precisions at each point by hundredths. Planted bugs: the error of the scores themselves,
    by which every precision is near; a gap that is skipped; the largest precision in place of the smallest."""
    base = torch.tensor([0.0, -1.0, -2.0, -3.0], dtype=torch.float64)
    noise = torch.tensor([0.02, -0.02, 0.01, -0.01], dtype=torch.float64)
    near, far = (base + noise - 0.005).tolist(), (base + noise - 0.02).tolist()
    difference, error = paired(torch.tensor([near], dtype=torch.float64), base.unsqueeze(0))
    assert difference == pytest.approx(-0.005) and error == pytest.approx(float(noise.std()) / 2)
    several = scores(near, far, near, near, base.tolist(), near)
    assert preferred(several, 0) == 4 and preferred(several, 1) == 2
    assert preferred(several, 0.5) == 4 and preferred(several, 3) == 0
    little = (base - 4e-4).tolist()
    assert preferred(scores(little, base.tolist()), 0.5) == 0 and preferred(scores(little, base.tolist()), 0) == 1
    assert preferred(scores(far, base.tolist()), 0.5, labels=50) == 0
    assert preferred(scores([math.nan] * 3), 1) is None and preferred(scores([math.nan] * 3, near), 1) == 1


def test_permutations_make_an_error_no_smaller() -> None:
    each = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    assert paired(each, 0 * each) == paired(each.expand(7, 3), 0 * each) == (1.0, pytest.approx(1 / math.sqrt(3)))


def test_the_rule_of_standard_errors_ends_at_the_training_prior() -> None:
    """The best is inside, and everything below it is within one error. Planted bug: the end of the search, 1e-8."""
    each = torch.tensor([[5.0, -5.0, 1.0]], dtype=torch.float64)

    def validation(
        candidates: Sequence[Tensor], scores: Sequence[ValidationScore], points: int | None
    ) -> list[dict[ValidationScore, Tensor]]:
        logs = [math.log10(float(c[0])) for c in candidates]
        return [dict.fromkeys(scores, (x if x < 1 else 2 - x) * each) for x in logs]

    noisy = replace(problem(lambda x: 0.0), validation=validation)
    assert float(Grid(standard_errors=0).choose(noisy).precisions[0]) == pytest.approx(10)
    choice = Grid(standard_errors=1).choose(noisy)  # the training prior's precisions are 0.5 and 2
    assert choice.status == "converged" and float(choice.precisions[0]) == pytest.approx(10**-0.25)
    weak = Grid(standard_errors=1, low=1e2).choose(noisy)  # whose choice is at its low end at first
    assert float(weak.precisions[0]) == pytest.approx(10**-0.25)


def test_score_and_points_reach_the_problem() -> None:
    calls: list[Any] = []
    Grid(score="dyadic", points=7).choose(problem(lambda x: -(x**2), calls))
    assert {(scores, points) for _, scores, points in calls} == {(("dyadic",), 7)}


def test_wrong_settings_and_tasks_are_refused() -> None:
    with pytest.raises(UserError) as error:
        Grid(low=2.0, high=1.0, num=1, refine=-1, points=0, standard_errors=-1)
    assert len(error.value.problems) == 5
    spec = TaskSpec("yacht", "regression", (6,), 1, 0.1)
    [refused] = Grid(score="dyadic").problems(spec)
    assert "requires classes" in refused and "hyper.score=marginal" in refused
    assert not Grid(standard_errors=1).problems(spec)
