"""What a curvature and a hyperparameter rule come to: the posterior's Gaussian, and the facts that every row has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bnn_runner.base import HyperRule, Network
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.parameter_subset import Basis
from bnn_runner.curvature.psd import Repairs, wide
from bnn_runner.laplace.evidence import Curvature, log_evidence, log_likelihood
from bnn_runner.laplace.evidence_point import EvidencePoint, Mode, evidence_point
from bnn_runner.laplace.newton_decrement import decrement_notes, newton_decrement
from bnn_runner.laplace.noise_evidence import NoisyCurvature, with_noise
from bnn_runner.laplace.posterior import WeightGaussian
from bnn_runner.laplace.prior_family import PriorFamily
from bnn_runner.laplace.scale_invariance import scale_invariant
from bnn_runner.laplace.tangent_optimum import TangentModel
from bnn_runner.laplace.validation_score import Validation, validation_logliks
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.tasks import Task

FAR_NATS = 1.0
"""A selected noise that costs the trained network more than this gets a note."""


@dataclass(frozen=True)
class Decision:
    """What the rule chose, `chosen` [T], and what comes of it: facts for the row, and what is to be told.

    Where the noise was chosen too, `curvature` and `jacobians` are those of the network with it and `precisions` [T]
    go with them; else they are those given and chosen.
    """

    chosen: Tensor
    precisions: Tensor
    curvature: Curvature
    jacobians: Jacobians
    gaussian: WeightGaussian
    report: dict[str, Any]
    notes: list[str]


def select_precisions(
    task: Task,
    jacobians: Jacobians,
    chosen: Basis,
    curvature: Curvature,
    rule: HyperRule,
    repairs: Repairs,
    mode: Mode = "network",
    tolerance: float = 1e-7,
    passes: int | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    validation: Validation = validation_logliks,
) -> Decision:
    """`mode`, with `tolerance` and `passes` of the tangent model's optimum, as `Laplace` has them.

    `validation` scores candidates by the method's own predictive.
    """
    few = task.train.gather(torch.arange(min(8, len(task.train))))[0]
    # A part of a tensor can be scaled by itself: that no normalisation takes out again.
    invariant = () if jacobians.chosen else scale_invariant(jacobians.network, few, jacobians.names)
    setting = PriorFamily.of(task, jacobians, curvature, rule, invariant, repairs, validation)
    point = evidence_point(mode, TangentModel(task, jacobians, progress, repairs), setting, rule, tolerance, passes)
    settled = selected(setting, point)
    gaussian = settled.curvature.gaussian(settled.precisions)
    prior = setting.prior.diagonal(settled.precisions)
    decrement = newton_decrement(task, settled.jacobians, prior, gaussian)
    report = {
        "weights_in_basis": sum(jacobians.sizes().values()),
        "mode": point.mode,
        "evidence_nats": settled.evidence,
        "evidence_over": chosen.described,
        "train_loglik_nats": settled.loglik,
        "newton_decrement_nats": decrement,
        "scale_invariant": list(invariant),
        "effective_dimension": float(settled.curvature.effective_dimensions(settled.precisions).sum()),
        **settled.report,
        **point.choice.report,
        **point.report,
    }
    notes = [*chosen.notes, *point.choice.notes, *point.notes, *settled.notes]
    notes += decrement_notes(decrement, point.mode)
    return Decision(
        point.choice.precisions,
        settled.precisions,
        settled.curvature,
        settled.jacobians,
        gaussian,
        report,
        notes,
    )


@dataclass(frozen=True)
class Selection:
    """Curvature, Jacobians (with the noise chosen), precisions, evidence, log-likelihood (nats), facts for the row."""

    curvature: Curvature
    jacobians: Jacobians
    precisions: Tensor
    evidence: float
    loglik: float
    report: dict[str, Any]
    notes: tuple[str, ...] = ()


def selected(family: PriorFamily, point: EvidencePoint) -> Selection:
    """The posterior's parts at the precisions (and the noise) selected at `point`."""
    choice, groups = point.choice, family.curvature.groups
    report: dict[str, Any] = {"hyper_family": family.family}
    if family.family == "g":
        report["held_for_want_of_curvature"] = family.prior.held
    report |= precision_report(choice.precisions, groups)
    if family.noise is None:
        return Selection(family.curvature, family.jacobians, choice.precisions, point.evidence, point.loglik, report)
    if choice.report["hyper_status"] == "diverged":  # the noise keeps its start value too
        beta, loglik = 1.0, point.at(choice.precisions)[0]
        evidence = float(log_evidence(*point.at(choice.precisions), family.curvature, choice.precisions))
    else:
        evidence = point.evidence
        beta, loglik = family.noise.settled(choice.precisions, point.at)
    network = with_noise(family.jacobians.network, beta)
    notes: tuple[str, ...] = ()
    if point.mode == "tangent" and (lost := loglik - log_likelihood(family.task, network)) > FAR_NATS:
        notes = (
            "hyper.noise=evidence: the noise is that of the tangent model's optimum, and predictions lie around "
            "the network's own outputs, which under it make the training targets "
            f"{lost:.3g} nats less likely. Train to the optimum (schedule.epochs), or use method.mode=network",
        )
    if family.family != "g":  # λ of the g-prior stays what it is: diag(βH) is its unit
        report |= precision_report(beta * choice.precisions, groups)
    return Selection(
        NoisyCurvature(family.curvature, beta),
        Jacobians.from_state(family.jacobians.state() | {"network": network}),
        beta * choice.precisions,
        evidence,
        loglik,
        report
        | {
            "noise": "evidence",
            "noise_sigma": _sigma(network, family.task),
            "noise_sigma_trained": _sigma(family.jacobians.network, family.task),
        },
        notes,
    )


def _sigma(network: Network, task: Task) -> list[float]:
    """Noise standard deviation of each output in the target's own units."""
    assert isinstance(network.likelihood, Gaussian)
    sigma = wide(network.likelihood.log_noise).exp() * wide(task.target_scale)
    return sigma.expand(task.spec.num_outputs).tolist()


def precision_report(precisions: Tensor, groups: Sequence[Group]) -> dict[str, Any]:
    """For the row: the one precision, that of each group by name, or of one a weight the quartiles."""
    if bool((precisions == precisions[0]).all()):
        return {"prior_precision": float(precisions[0])}
    if len(precisions) == len(groups):
        named = zip((g.name for g in groups), precisions.tolist(), strict=True)
        return {"prior_precision": None, "prior_precisions": dict(named)}
    ordered = precisions.sort().values
    quartiles = [float(ordered[round(q * (len(ordered) - 1))]) for q in (0, 0.25, 0.5, 0.75, 1)]
    return {"prior_precision": None, "prior_precision_quartiles": quartiles}
