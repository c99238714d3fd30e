"""Maximisation of a smooth function of a few bounded variables: projected BFGS with a backtracking line search.

Meant for log precisions: a handful of variables, a value in nats, a gradient from autograd. The
inverse Hessian is a small dense matrix (Nocedal & Wright 2006, §6.1; §16.7 for the projection).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST_STEP = 2.0
"""Most that any variable moves in one step: a factor e² in a precision."""
_TOLERANCE = 1e-6
_ROUNDING = 1e-15
"""Of the objective: a smaller expected gain is lost in rounding."""


@dataclass(frozen=True)
class Ascent:
    """Where a search ended: the point [G], the largest free gradient there, and the number of iterations.

    `finite` is False where the search met a value that is not finite.
    """

    point: Tensor
    gradient: float
    iterations: int
    finite: bool = True


def _never(point: Tensor) -> bool:
    return False


def maximise(
    objective: Callable[[Tensor], Tensor],
    start: Tensor,
    free: Tensor,
    low: float,
    high: float,
    steps: int,
    unknown: Callable[[Tensor], bool] = _never,
) -> Ascent:
    """The maximum of `objective` over its free variables, each between `low` and `high`.

    Args:
        objective: from the variables [G] to a scalar, differentiable.
        start: the first point [G].
        free: which variables may move, [G] bool.
        low: lower bound of every variable.
        high: upper bound of every variable.
        steps: most iterations.
        unknown: whether the objective is not known at a point; the search ends before the first such point.
    """
    point = start.clone()
    value, gradient = _value_and_gradient(objective, point)
    inverse = torch.eye(len(point), dtype=point.dtype)
    movable = _movable(point, gradient, free, low, high)
    for iteration in range(steps):
        if not _is_finite(value, gradient):
            return Ascent(point, float("nan"), iteration, finite=False)
        largest = float((gradient * movable).abs().max())
        if largest < _TOLERANCE:
            return Ascent(point, largest, iteration)
        direction = (inverse @ (gradient * movable)) * movable
        if float(direction @ gradient) <= 0:
            inverse = torch.eye(len(point), dtype=point.dtype)
            direction = gradient * movable
        direction = direction * min(1.0, LONGEST_STEP / float(direction.abs().max()))
        found = _line_search(objective, point, value, gradient, direction, low, high, unknown)
        if found is None:  # no step gains more than rounding, or the objective is unknown there
            return Ascent(point, largest, iteration)
        new_point, new_value, new_gradient = found
        inverse = _updated(inverse, (new_point - point) * movable, (gradient - new_gradient) * movable)
        point, value, gradient = new_point, new_value, new_gradient
        before, movable = movable, _movable(point, gradient, free, low, high)
        if not torch.equal(before, movable):
            inverse = torch.eye(len(point), dtype=point.dtype)
    return Ascent(point, float((gradient * movable).abs().max()), steps)


def _value_and_gradient(objective: Callable[[Tensor], Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
    point = point.detach().requires_grad_()
    value = objective(point)
    (gradient,) = torch.autograd.grad(value, point)
    return value.detach(), gradient


def _is_finite(value: Tensor, gradient: Tensor) -> bool:
    return bool(torch.isfinite(value)) and bool(torch.isfinite(gradient).all())


def _movable(point: Tensor, gradient: Tensor, free: Tensor, low: float, high: float) -> Tensor:
    """1 where a variable may move: free, and its gradient does not push it against a bound."""
    pressed = ((point >= high) & (gradient > 0)) | ((point <= low) & (gradient < 0))
    return (free & ~pressed).to(point.dtype)


def _line_search(
    objective: Callable[[Tensor], Tensor],
    point: Tensor,
    value: Tensor,
    gradient: Tensor,
    direction: Tensor,
    low: float,
    high: float,
    unknown: Callable[[Tensor], bool],
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The first of the steps 1, ½, ¼ … that gains enough (Armijo, 1e-4); None if none does, up to rounding."""
    length = 1.0
    for _ in range(40):
        candidate = (point + length * direction).clamp(low, high)
        gain = float(gradient @ (candidate - point))
        if gain <= _ROUNDING * abs(float(value)):
            return None
        new_value, new_gradient = _value_and_gradient(objective, candidate)
        if unknown(candidate):
            return None
        if (
            _is_finite(new_value, new_gradient)
            and float(new_value - value) >= 1e-4 * gain
            and not torch.equal(candidate, point)
        ):
            return candidate, new_value, new_gradient
        length /= 2
    return None


def _updated(inverse: Tensor, move: Tensor, change: Tensor) -> Tensor:
    """BFGS update of the inverse Hessian of −objective; unchanged where the curvature has the wrong sign."""
    product = float(move @ change)
    if product <= 1e-12:
        return inverse
    identity = torch.eye(len(move), dtype=move.dtype)
    left = identity - torch.outer(move, change) / product
    return left @ inverse @ left.T + torch.outer(move, move) / product
