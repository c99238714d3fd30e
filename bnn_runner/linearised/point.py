"""Where the evidence is taken, and the precisions chosen there: at w*, or at the tangent model's optimum v*."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bnn_runner.hyper import Choice, HyperRule, PrecisionProblem
from bnn_runner.linearised.algebra import wide
from bnn_runner.linearised.evidence import Curvature, log_likelihood, squared_norms
from bnn_runner.linearised.tangent import TangentModel, TangentOptimum

Mode = Literal["network", "tangent", "auto"]
At = Callable[[Tensor], tuple[float, Tensor]]
"""From precisions [T] to Σ log p(y | ·) (nats, original units) and the squared norms [T] of the groups at the point."""


@dataclass(frozen=True)
class Point:
    """What was decided at w* or v*: the choice, its evidence and log-likelihood in nats, and what to tell."""

    mode: Literal["network", "tangent"]
    choice: Choice
    evidence: float
    loglik: float
    report: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def at_network(
    tangent: TangentModel, curvature: Curvature, problem_at: Callable[[At], PrecisionProblem], rule: HyperRule
) -> Point:
    """Everything at the trained weights w*."""
    network = tangent.jacobians.network
    loglik, squares = log_likelihood(tangent.task, network), squared_norms(tangent.jacobians, curvature.groups)
    return _chosen("network", rule, problem_at(lambda _: (loglik, squares)), loglik)


def at_tangent_optimum(
    tangent: TangentModel,
    curvature: Curvature,
    problem_at: Callable[[At], PrecisionProblem],
    rule: HyperRule,
    tolerance: float,
    budget: int,
) -> Point:
    """The evidence as a function of Λ with v* = v*(Λ) in it, and the precisions that the rule chooses on that.

    v* is a stationary point of the evidence in v, so the derivative in Λ is the partial one at v*
    (envelope theorem), and the joint optimum of v and Λ is what a rule finds that climbs it (Antorán et
    al. 2022, alternate between the two). The report says how many passes over the data that
    took, what relative gradient is left at the end, and whether it is within `tolerance`.
    """
    sizes = [g.size(tangent.jacobians.sizes()) for g in curvature.groups]
    shift = len(tangent.task.train) * float(wide(tangent.task.target_scale).log().sum())
    first = tangent.passes
    found: dict[tuple[float, ...], TangentOptimum] = {}
    last = [tangent.centre]

    def optimum(precisions: Tensor) -> TangentOptimum:
        at = precisions.detach().expand(len(sizes))
        key = tuple(at.tolist())
        if key not in found:
            diagonal = at.repeat_interleave(torch.tensor(sizes)).to(tangent.centre)
            left = max(budget - (tangent.passes - first), 1)
            with torch.no_grad():
                found[key] = tangent.optimum(diagonal, curvature.gaussian(at), last[0], tolerance, left)
            last[0] = found[key].weights
        return found[key]

    def at(precisions: Tensor) -> tuple[float, Tensor]:
        here = optimum(precisions)
        return here.loglik - shift, torch.stack([p.square().sum() for p in here.weights.split(sizes)]).cpu()

    point = _chosen("tangent", rule, problem_at(at), None)
    end = optimum(point.choice.precisions)
    passes, settled = tangent.passes - first, end.gradient <= tolerance
    report = {"tangent_gradient": end.gradient, "tangent_passes": passes, "tangent_settled": settled}
    notes: tuple[str, ...] = ()
    if not settled:
        notes = (
            f"method.mode=tangent: v* is not reached, its relative gradient is {end.gradient:.1g} after {passes} "
            "passes over the data; raise method.tangent_passes",
        )
    return replace(point, loglik=end.loglik - shift, report=report, notes=notes)


def _chosen(
    mode: Literal["network", "tangent"], rule: HyperRule, problem: PrecisionProblem, loglik: float | None
) -> Point:
    with torch.enable_grad():
        choice = rule.choose(problem)
        evidence = float(problem.evidence(choice.precisions))
    return Point(mode, choice, evidence, math.nan if loglik is None else loglik)
