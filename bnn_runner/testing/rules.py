"""The contract of a rule that chooses prior precisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from bnn_runner.base import Choice, HyperRule, HyperStatus, PrecisionProblem, ValidationScore
from bnn_runner.testing.expect import require, require_plain, require_unchanged, snapshot

EIGENVALUES, SQUARES = (30.0, 2.0, 0.1), (0.5, 1.5)
"""Of the curvature of each of two groups, and the squared norms of their weights."""


def make_precision_problem() -> PrecisionProblem:
    """Two groups of three weights with a diagonal curvature, whose evidence has one maximum in each precision.

    log evidence = −½ Σ_g (λ_g ‖w_g‖² + Σ_i log(1 + h_i/λ_g)); the validation score is largest near λ = 2.
    """
    values = torch.tensor([EIGENVALUES, EIGENVALUES], dtype=torch.float64) * torch.tensor([[1.0], [5.0]])  # [T, 3]
    squares = torch.tensor(SQUARES, dtype=torch.float64)

    def spread(precisions: Tensor) -> Tensor:
        return precisions.double().expand(2) if len(precisions) == 1 else precisions.double()

    def evidence(precisions: Tensor) -> Tensor:
        each = spread(precisions)
        return -0.5 * ((each * squares).sum() + (1 + values / each[:, None]).log().sum())

    def dimensions(precisions: Tensor) -> Tensor:
        each = spread(precisions)[:, None]
        return (values / (values + each)).sum(1)

    def validation(
        candidates: Sequence[Tensor], scores: Sequence[ValidationScore], points: int | None
    ) -> list[dict[ValidationScore, Tensor]]:
        means = [-(precisions.double().log() - 0.7).square().mean() for precisions in candidates]
        return [{score: (mean + torch.tensor([[-0.1, 0.1]])).double() for score in scores} for mean in means]

    return PrecisionProblem(
        names=("layer.weight", "layer.bias"),
        start=torch.ones(2, dtype=torch.float64),
        evidence=evidence,
        validation=validation,
        effective_dimensions=dimensions,
        squares=lambda precisions: squares,
        sizes=(3, 3),
        validation_points=2,
    )


def check_rule(rule: HyperRule) -> Choice:
    """The whole contract of a rule for the prior precision; returns its choice on a small problem.

    - The precisions are [T], positive and finite; `status` is a known one, `facts` are plain values, `notes` texts.
    - The choice is a pure function of the problem: same result again, and no global state is changed.

    Raises:
        AssertionError: saying which line of the contract does not hold.
    """
    name = type(rule).__name__
    require(dataclasses.is_dataclass(rule), f"{name} must be a frozen dataclass whose fields are its YAML's keys.")
    need = getattr(rule, "needs_validation", None)
    require(isinstance(need, bool), f"{name}.needs_validation must be true or false; got {need!r}.")
    before = snapshot()
    choice = rule.choose(make_precision_problem())
    require_unchanged(before, snapshot(), f"{name}.choose")
    found = choice.precisions
    require(found.shape == (2,), f"{name} must choose one precision per group, [T] = [2]; got {list(found.shape)}.")
    positive = bool(((found > 0) & torch.isfinite(found)).all())
    require(positive, f"{name} must choose positive, finite precisions; got {found.tolist()}.")
    known = get_args(HyperStatus)
    require(choice.status in known, f"{name}: status must be one of {', '.join(known)}; got {choice.status!r}.")
    for key, value in choice.facts.items():
        require_plain(value, f"facts[{key!r}]")
    require(all(isinstance(note, str) for note in choice.notes), f"{name}: notes must be texts; got {choice.notes}.")
    again = rule.choose(make_precision_problem())
    require(torch.equal(again.precisions, found), f"{name} must choose the same precisions for the same problem.")
    return choice
