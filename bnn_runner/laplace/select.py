"""From a fitted curvature and a hyperparameter rule to the posterior's Gaussian, with the facts that every row has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bnn_runner.base import HyperRule, Network, uses_evidence
from bnn_runner.curvature.base import Curvature, WeightGaussian
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.parameter_subset import Basis
from bnn_runner.curvature.psd import Repairs, wide
from bnn_runner.laplace.evidence import constant_facts, log_likelihood
from bnn_runner.laplace.evidence_point import EvidencePoint, Mode, at_optimum, at_weights
from bnn_runner.laplace.newton_decrement import decrement_notes, far, newton_decrement
from bnn_runner.laplace.noise_evidence import EvidenceWithNoise, NoisyCurvature, with_noise
from bnn_runner.laplace.prior_family import PriorFamily
from bnn_runner.laplace.scale_invariance import ScaleInvariance, scale_invariant
from bnn_runner.laplace.tangent_optimum import TangentModel
from bnn_runner.laplace.validation_score import Validation, validation_scores
from bnn_runner.laplace.weak_prior import refuse_too_weak
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.runtime.console import Progress
from bnn_runner.tasks import Task

AUTO_PASSES = 200
"""Passes over the data for v* that mode=auto spends at most, where method.tangent_passes is null."""
FAR_NATS = 1.0
"""A selected noise that costs the trained network more than this gets a note."""


@dataclass(frozen=True)
class Selection:
    """What a rule selected at an evidence point, and the posterior's Gaussian there.

    Where the rule selected the noise too, `curvature`, `jacobians` and `precisions` [T] are those of the network with
    that noise; `searched` [T] are the precisions as the rule searched them, with the noise as trained. `facts` are
    for the row.
    """

    point: EvidencePoint
    searched: Tensor
    precisions: Tensor
    curvature: Curvature
    jacobians: Jacobians
    gaussian: WeightGaussian
    facts: Mapping[str, Any]
    notes: tuple[str, ...]


def select_precisions(
    task: Task,
    jacobians: Jacobians,
    basis: Basis,
    curvature: Curvature,
    rule: HyperRule,
    repairs: Repairs,
    mode: Mode = "network",
    tolerance: float = 1e-7,
    passes: int | None = None,
    progress: Progress = lambda stage, done, total: None,
    validation: Validation = validation_scores,
) -> Selection:
    """Let `rule` select the prior precisions, and fit the Gaussian at them.

    Args:
        task: its training set is what the evidence is of.
        jacobians: of the network with respect to the weights of the basis.
        basis: these weights in words, and notes on them.
        curvature: H, fitted over the basis.
        rule: the hyperparameter rule.
        repairs: counts numerical repairs.
        mode: where the evidence is taken: at w* (network), v* (tangent), or v* where it is needed and reached (auto).
        tolerance: relative gradient at which v* counts as reached.
        passes: most passes over the data for v*; None is the tangent model's own default.
        progress: reports the stage, and how far it is.
        validation: scores candidate precisions by the method's own predictive.

    Raises:
        RunFailed: the training prior, the curvature or the likelihood does not fit the rule's family, or the prior is
            weaker than the curvature's rounding allows.
    """
    few = task.train.gather(torch.arange(min(8, len(task.train))))[0]
    # Part of a tensor can be rescaled on its own, which no normalisation layer undoes.
    whole = not jacobians.chosen
    invariant = scale_invariant(jacobians.network, few, jacobians.names) if whole else ScaleInvariance()
    scored = partial(validation, progress=progress)
    family = PriorFamily.of(task, jacobians, curvature, rule, invariant.names, repairs, scored)
    tangent = TangentModel(task, jacobians, progress, repairs)
    found = _Modes(family, tangent, rule, tolerance, passes, invariant.names).select(mode)
    point, parts = found.point, found.parts
    constant, below = constant_facts(parts.log_evidence, task, point.search is not None or found.decrement <= FAR_NATS)
    facts = {
        "weights_in_basis": sum(jacobians.sizes().values()),
        "mode": point.mode,
        "mode_reason": found.reason,
        "evidence_nats": parts.log_evidence,
        "evidence_over": basis.described,
        **constant,
        "train_loglik_nats": parts.log_likelihood,
        "newton_decrement_nats": found.decrement,
        "scale_invariant": list(invariant.names),
        "effective_dimension": found.dimension,
        **parts.facts,
        "selected_by": "validation" if rule.needs_validation else "evidence" if uses_evidence(rule) else "given",
        "hyper_status": point.choice.status,
        **point.choice.facts,
        **({} if point.search is None else point.search.facts),
    }
    notes = (*basis.notes, *invariant.notes, *point.choice.notes, *found.notes, *parts.notes)
    if not rule.needs_validation:  # of a precision selected by predictions, nobody asked for the evidence
        notes = (*notes, *decrement_notes(found.decrement, point.mode), *below)
    return Selection(
        point,
        point.choice.precisions,
        parts.precisions,
        parts.curvature,
        parts.jacobians,
        found.gaussian,
        facts,
        notes,
    )


@dataclass(frozen=True)
class _Found:
    """A selection at one evidence point, the posterior's Gaussian there, and why the evidence is taken there."""

    point: EvidencePoint
    parts: _Parts
    gaussian: WeightGaussian
    decrement: float
    dimension: float
    reason: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Modes:
    """Selections with the evidence at w*, at v*, or at the one of them that is right (`method.mode`)."""

    family: PriorFamily
    tangent: TangentModel
    rule: HyperRule
    tolerance: float
    passes: int | None
    invariant: Sequence[str]

    def select(self, mode: Mode) -> _Found:
        """At w* (network), at v* (tangent), or by need (auto).

        auto takes w* where the rule does not use the evidence. Otherwise it takes v* where some weights are
        scale-invariant, since then w* is no optimum of any log posterior, or where the Newton decrement at w* is `far`;
        and w* where v* was not reached, or where the noise selected at v* does not fit the network's own outputs.
        """
        if mode == "network":
            return self._at_weights("method.mode=network")
        if mode == "tangent":
            found = self._at_optimum("method.mode=tangent", self.passes)
            search = found.point.search
            lacking = search is not None and not search.reached
            return replace(found, notes=(search.note("the evidence is too low"),)) if search and lacking else found
        if not uses_evidence(self.rule):
            return self._at_weights("the hyper rule does not use the evidence")
        if self.invariant:
            plain, reason = None, f"{len(self.invariant)} tensors are scale-invariant"
        else:
            plain = self._at_weights("")
            limit = far(plain.dimension)
            words = "at most" if plain.decrement <= limit else "above"
            reason = f"the Newton decrement at w*, {plain.decrement:.2g} nats, is {words} {limit:.2g}"
            if plain.decrement <= limit:
                return replace(plain, reason=reason)
        found = self._at_optimum(reason, self.passes or min(AUTO_PASSES, self.tangent.max_passes))
        if found.point.reached and not found.parts.notes:  # the only note is on a noise that does not fit w*
            return found
        plain = plain or self._at_weights("")
        if found.point.reached:
            return replace(plain, reason=f"{reason}, but the noise selected at v* does not fit the network's outputs")
        assert found.point.search is not None
        note = found.point.search.note("the evidence is taken at w*")
        return replace(plain, reason=f"{reason}, but v* was not reached", notes=(note,))

    def _at_weights(self, reason: str) -> _Found:
        return self._found(at_weights(self.tangent, self.family, self.rule), reason)

    def _at_optimum(self, reason: str, passes: int | None) -> _Found:
        return self._found(at_optimum(self.tangent, self.family, self.rule, self.tolerance, passes), reason)

    def _found(self, point: EvidencePoint, reason: str) -> _Found:
        parts = _parts(self.family, point)
        gaussian = parts.curvature.gaussian(parts.precisions)
        refuse_too_weak(gaussian, parts.precisions, self.rule)
        prior = self.family.prior.diagonal(parts.precisions)
        decrement = newton_decrement(self.family.task, parts.jacobians, prior, gaussian)
        dimension = float(parts.curvature.effective_dimensions(parts.precisions).sum())
        return _Found(point, parts, gaussian, decrement, dimension, reason)


@dataclass(frozen=True)
class _Parts:
    """Curvature, Jacobians and precisions in the noise of the posterior; evidence and log-likelihood in nats."""

    curvature: Curvature
    jacobians: Jacobians
    precisions: Tensor
    log_evidence: float
    log_likelihood: float
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()


def _parts(family: PriorFamily, point: EvidencePoint) -> _Parts:
    precisions = point.choice.precisions
    facts: dict[str, Any] = {"hyper_family": family.name}
    if family.name == "g":
        facts["held_for_want_of_curvature"] = family.prior.held
    facts |= precision_facts(precisions, family.curvature.groups)
    if isinstance(point.evidence, EvidenceWithNoise):
        return _noisy_parts(family, point, point.evidence, facts)
    loglik = point.evidence.log_likelihood(precisions)
    return _Parts(family.curvature, family.jacobians, precisions, point.log_evidence, loglik, facts)


def _noisy_parts(
    family: PriorFamily, point: EvidencePoint, evidence: EvidenceWithNoise, facts: dict[str, Any]
) -> _Parts:
    """With the noise that belongs to the selected precisions; after a diverged search with the noise as trained."""
    precisions, groups = point.choice.precisions, family.curvature.groups
    with torch.no_grad():
        if point.choice.status == "diverged":
            beta, loglik = 1.0, evidence.inner.log_likelihood(precisions)
            log_evidence = float(evidence.inner(precisions))
        else:
            beta, loglik = float(evidence.factor(precisions)), evidence.log_likelihood(precisions)
            log_evidence = point.log_evidence
    network = with_noise(family.jacobians.network, beta)
    notes: tuple[str, ...] = ()
    if point.mode == "tangent" and (lost := loglik - log_likelihood(family.task, network)) > FAR_NATS:
        notes = (
            "hyper.noise=evidence: the noise was selected at the tangent model's optimum, but predictions are centred "
            "on the network's own outputs, and this noise makes the training targets "
            f"{lost:.3g} nats less likely there. Train to the optimum (schedule.epochs), or use method.mode=network",
        )
    if family.name != "g":  # λ of the g-prior stays what it is: diag(βH) is its unit
        facts = facts | precision_facts(beta * precisions, groups)
    facts = facts | {
        "noise": "evidence",
        "noise_sigma": _sigma(network, family.task),
        "noise_sigma_trained": _sigma(family.jacobians.network, family.task),
    }
    return _Parts(
        NoisyCurvature(family.curvature, beta),
        Jacobians.from_state(family.jacobians.state() | {"network": network}),
        beta * precisions,
        log_evidence,
        loglik,
        facts,
        notes,
    )


def _sigma(network: Network, task: Task) -> list[float]:
    """Noise standard deviation of each output in the target's own units."""
    assert isinstance(network.likelihood, Gaussian)
    sigma = wide(network.likelihood.log_noise).exp() * wide(task.target_scale)
    return sigma.expand(task.spec.num_outputs).tolist()


def precision_facts(precisions: Tensor, groups: Sequence[Group]) -> dict[str, Any]:
    """For the row: the one precision; of several, each group's by name; of one a weight, their quartiles."""
    if bool((precisions == precisions[0]).all()):
        return {"prior_precision": float(precisions[0])}
    if len(precisions) == len(groups):
        named = zip((g.name for g in groups), precisions.tolist(), strict=True)
        return {"prior_precision": None, "prior_precisions": dict(named)}
    ordered = precisions.sort().values
    quartiles = [float(ordered[round(q * (len(ordered) - 1))]) for q in (0, 0.25, 0.5, 0.75, 1)]
    return {"prior_precision": None, "prior_precision_quartiles": quartiles}
