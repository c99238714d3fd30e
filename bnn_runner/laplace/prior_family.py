"""A family of prior precisions over a fitted curvature: what a hyperparameter rule searches.

Also which structures support which family, and which tasks a selected noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bnn_runner.base import HyperRule, Network, PrecisionProblem
from bnn_runner.curvature.base import Curvature
from bnn_runner.curvature.groups import Group
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.psd import Repairs
from bnn_runner.curvature.structures import supporting, supports
from bnn_runner.errors import RunFailed
from bnn_runner.hyper.tied_precisions import family_of
from bnn_runner.laplace.evidence import LogEvidence
from bnn_runner.laplace.g_prior import g_prior
from bnn_runner.laplace.noise_evidence import EvidenceWithNoise, NoiseTerms
from bnn_runner.laplace.prior_diagonal import PriorShape
from bnn_runner.laplace.validation_score import Validation, validation_scores
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.tasks import Task, TaskSpec


def noise_of(rule: HyperRule | None) -> str:
    """How a rule treats the regression noise: trained (it is kept) or evidence (it is selected)."""
    return str(getattr(rule, "noise", "trained"))


_WHY = {
    "parameter": "Only under a diagonal curvature has the best precision of each weight a closed form; otherwise every "
    "step would factorise the whole curvature. ",
    "g": "Scaled by its own diagonal, this curvature keeps neither its eigenbasis nor its form. ",
}
"""Why most structures do not support a family."""


def family_problems(structure: str, curvature: str, spec: TaskSpec, rule: HyperRule) -> list[str]:
    """Why a structure, an output curvature and a task do not support a rule (empty when they do)."""
    problems = []
    family = family_of(rule)
    if not supports(structure, family):
        problems.append(
            f"method.structure={structure} does not support hyper.family={family}. {_WHY.get(family, '')}"
            f"Use method.structure={supporting(family)}, or another hyper.family."
        )
    if noise_of(rule) == "evidence":
        if spec.kind == "classification":
            problems.append(
                f"hyper.noise=evidence requires a regression; data={spec.name} has classes. Use hyper.noise=trained."
            )
        if curvature == "empirical_fisher":
            problems.append(
                "hyper.noise=evidence does not support method.curvature=empirical_fisher, which is not proportional to "
                "the noise precision. Use method.curvature=ggn or mc_fisher."
            )
    return problems


@dataclass(frozen=True)
class PriorFamily:
    """A curvature under a family of priors.

    `curvature` and `prior` are those of the family (scaled ones under the g-prior), `start` [T] the precisions of the
    training prior, `invariant` the tensors whose scale a normalisation layer removes, and `noise` is None
    where the regression noise stays as trained.
    """

    task: Task
    jacobians: Jacobians
    name: str
    curvature: Curvature
    prior: PriorShape
    start: Tensor
    invariant: Sequence[str]
    noise: NoiseTerms | None
    validation: Validation = validation_scores

    @classmethod
    def of(
        cls,
        task: Task,
        jacobians: Jacobians,
        curvature: Curvature,
        rule: HyperRule,
        invariant: Sequence[str],
        repairs: Repairs,
        validation: Validation = validation_scores,
    ) -> PriorFamily:
        """The family that `rule` chooses in.

        Raises:
            RunFailed: the training prior, the curvature or the likelihood does not fit the rule's family.
        """
        network, name = jacobians.network, family_of(rule)
        sizes = tuple(g.size(jacobians.sizes()) for g in curvature.groups)
        noise = None
        if noise_of(rule) == "evidence":
            if not isinstance(network.likelihood, Gaussian):
                raise RunFailed("hyper.noise=evidence requires a regression with likelihood.form=homoscedastic.")
            noise = NoiseTerms.of(task, network.likelihood)
        if name == "g":
            scaled = g_prior(curvature, len(task.train), repairs)
            prior, start = PriorShape(sizes, scaled.shape), torch.ones(len(sizes), dtype=torch.float64)
            return cls(task, jacobians, name, scaled.curvature, prior, start, invariant, noise, validation)
        start = _training_prior(network, curvature.groups)
        return cls(task, jacobians, name, curvature, PriorShape(sizes), start, invariant, noise, validation)

    def with_noise(self, evidence: LogEvidence) -> LogEvidence:
        """The evidence at the best noise for each precision where the rule selects the noise too, else `evidence`."""
        return evidence if self.noise is None else EvidenceWithNoise(evidence, self.curvature, self.noise)

    def problem(self, evidence: LogEvidence) -> PrecisionProblem:
        """What the rule sees."""
        curvature = self.curvature
        return PrecisionProblem(
            names=tuple(g.name for g in curvature.groups),
            start=self.start,
            evidence=evidence,
            validation=partial(self.validation, self.task, self.jacobians, curvature),
            effective_dimensions=curvature.effective_dimensions,
            squares=evidence.squares,
            invariant=tuple(g.name for g in curvature.groups if g.members[0] in self.invariant),
            diagonal=getattr(curvature, "diagonal", None),
            sizes=self.prior.sizes,
            dimension_samples=getattr(curvature, "dimension_samples", None),
            gap=evidence.gap,
            exhausted=lambda: evidence.exhausted,
            validation_points=len(self.task.val),
        )


def _training_prior(network: Network, groups: Sequence[Group]) -> Tensor:
    """The training prior's precision of each group, [T] float64. Raises `RunFailed` if a group has several."""
    start = []
    for group in groups:
        values = {network.prior_precision[name] for name in group.members}
        if len(values) > 1:
            raise RunFailed(
                f"{group.name} is one block of the posterior, so its tensors must have the same prior precision; got "
                f"{sorted(values)}. Use prior=isotropic, or a structure with a block for each tensor "
                "(method.structure=kfac method.bias=separate)."
            )
        start.append(values.pop())
    return torch.tensor(start, dtype=torch.float64)
