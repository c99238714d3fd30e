"""Where the evidence is taken, and the precisions chosen there: at w*, or at the tangent model's optimum v*."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from bnn_runner.base import Choice, HyperRule, PrecisionProblem
from bnn_runner.curvature.full import FullCurvature
from bnn_runner.curvature.psd import wide
from bnn_runner.laplace.evidence import At, log_likelihood
from bnn_runner.laplace.prior_family import PriorFamily
from bnn_runner.laplace.tangent_optimum import GAP_NATS, TangentModel, TangentOptimum

Mode = Literal["network", "tangent", "auto"]


@dataclass(frozen=True)
class EvidencePoint:
    """What was decided at w* or v*, which `at` gives: the choice, its evidence and log-likelihood, and what to tell."""

    mode: Literal["network", "tangent"]
    at: At
    choice: Choice
    evidence: float
    loglik: float
    report: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def evidence_point(
    mode: Mode, tangent: TangentModel, setting: PriorFamily, rule: HyperRule, tolerance: float, max_passes: int | None
) -> EvidencePoint:
    """Where the evidence is taken. auto: at v* where it is settled, else at w*, with a note."""
    if mode == "network":
        return at_network(tangent, setting, rule)
    point = at_tangent_optimum(tangent, setting, rule, tolerance, max_passes)
    if mode == "tangent" or point.report["tangent_settled"]:
        return point
    network = at_network(tangent, setting, rule)
    return replace(network, notes=(*network.notes, _not_reached(point.report, "the evidence is at w*")))


def at_network(tangent: TangentModel, setting: PriorFamily, rule: HyperRule) -> EvidencePoint:
    """Everything at the trained weights w*."""
    loglik = log_likelihood(tangent.task, tangent.jacobians.network)

    def at(precisions: Tensor) -> tuple[float, Tensor]:
        return loglik, setting.prior.squares(tangent.centre, precisions)

    return _chosen("network", at, rule, setting.problem(at), loglik)


def at_tangent_optimum(
    tangent: TangentModel, setting: PriorFamily, rule: HyperRule, tolerance: float, max_passes: int | None
) -> EvidencePoint:
    """The evidence as a function of Λ with v* = v*(Λ) in it, and the precisions that the rule chooses on that.

    v* is a stationary point of the evidence in v, so the derivative in Λ is the partial one at v*
    (envelope theorem), and the joint optimum of v and Λ is what a rule finds that climbs it (Antorán et
    al. 2022, alternate between the two). The report says how many passes over the data that
    took, what relative gradient is left at the end and how many nats it stands for, and whether v* is
    settled: within `tolerance`, or within 0.001 nats.
    """
    max_passes, tolerance = max_passes or tangent.max_passes, tangent.reachable(tolerance)
    shift = len(tangent.task.train) * float(wide(tangent.task.target_scale).log().sum())
    curvature, prior, first = setting.curvature, setting.prior, tangent.passes
    found: dict[bytes, TangentOptimum] = {}
    last = [tangent.centre]

    def optimum(precisions: Tensor) -> TangentOptimum:
        at = precisions.detach().cpu()
        at = at.expand(len(prior.sizes)) if len(at) == 1 else at
        key = at.contiguous().numpy().tobytes()
        if key not in found:
            diagonal = prior.diagonal(at).to(tangent.centre)
            left = max(max_passes - (tangent.passes - first), 1)
            with torch.no_grad():
                guess = curvature.gaussian(at) if isinstance(curvature, FullCurvature) else None
                found[key] = tangent.optimum(diagonal, last[0], tolerance, left, guess)
            last[0] = found[key].weights
        return found[key]

    def at(precisions: Tensor) -> tuple[float, Tensor]:
        here = optimum(precisions)
        return here.loglik - shift, prior.squares(here.weights, precisions)

    point = _chosen("tangent", at, rule, setting.problem(at), None)
    end = optimum(point.choice.precisions)
    passes, settled = tangent.passes - first, end.gradient <= tolerance or end.gap <= GAP_NATS
    report = {
        "tangent_gradient": end.gradient,
        "tangent_gap_nats": end.gap,
        "tangent_passes": passes,
        "tangent_settled": settled,
    }
    point = replace(point, loglik=end.loglik - shift, report=report)
    return (
        point if settled else replace(point, notes=(*point.notes, _not_reached(report, "the evidence is a lower one")))
    )


def _not_reached(report: Mapping[str, Any], so: str) -> str:
    """What is told of a v* that was not found within the max_passes."""
    return (
        f"method.mode: v* is not reached, {so}: after {report['tangent_passes']} passes over the data its relative "
        f"gradient is {report['tangent_gradient']:.1g}, and at most {report['tangent_gap_nats']:.2g} nats are left to "
        "gain. Raise method.tangent_passes, or accept a larger method.tangent_tolerance"
    )


def _chosen(
    mode: Literal["network", "tangent"], at: At, rule: HyperRule, problem: PrecisionProblem, loglik: float | None
) -> EvidencePoint:
    with torch.enable_grad():
        choice = rule.choose(problem)
        evidence = float(problem.evidence(choice.precisions))
    return EvidencePoint(mode, at, choice, evidence, math.nan if loglik is None else loglik)
