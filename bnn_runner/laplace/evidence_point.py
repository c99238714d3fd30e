"""Where the evidence is taken, at w* or at the tangent model's optimum v*, and the precisions that a rule selects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bnn_runner.base import Choice, HyperRule
from bnn_runner.laplace.evidence import EvidenceAtWeights, LogEvidence, log_likelihood
from bnn_runner.laplace.prior_family import PriorFamily
from bnn_runner.laplace.tangent_evidence import EvidenceAtOptimum
from bnn_runner.laplace.tangent_optimum import TangentModel

Mode = Literal["network", "tangent", "auto"]


@dataclass(frozen=True)
class TangentSearch:
    """How the search of v* ended at the selected precisions.

    `gradient` is relative, `gap` in nats (see `TangentOptimum`), `passes` are those over the data of all
    searches together.
    """

    gradient: float
    gap: float
    passes: int
    reached: bool

    @property
    def facts(self) -> Mapping[str, Any]:
        """For the row."""
        return {
            "tangent_gradient": self.gradient,
            "tangent_gap_nats": self.gap,
            "tangent_passes": self.passes,
            "tangent_settled": self.reached,
        }

    def note(self, consequence: str) -> str:
        """For a reader, where v* was not reached."""
        return (
            f"method.mode: v* was not reached, so {consequence}: after {self.passes} passes over the data its relative "
            f"gradient is {self.gradient:.1g}, and at most {self.gap:.2g} nats are left to gain. Raise "
            "method.tangent_passes, or accept a larger method.tangent_tolerance"
        )


@dataclass(frozen=True)
class EvidencePoint:
    """What a rule selected with the evidence taken at w* (mode network) or at v* (mode tangent).

    `evidence` is the function that the rule searched, `log_evidence` its value in nats at the `choice`;
    `search` is None at w*.
    """

    mode: Literal["network", "tangent"]
    evidence: LogEvidence
    choice: Choice
    log_evidence: float
    search: TangentSearch | None = None

    @property
    def reached(self) -> bool:
        """Whether the point is the one that was asked for: v* may not be reached, at the end or during the search."""
        return self.search is None or (self.search.reached and self.choice.status != "v* not reached")


def at_weights(tangent: TangentModel, family: PriorFamily, rule: HyperRule) -> EvidencePoint:
    """Everything at the trained weights w*."""
    loglik = log_likelihood(tangent.task, tangent.jacobians.network)
    plain = EvidenceAtWeights(family.curvature, family.prior, tangent.centre, loglik)
    evidence = family.with_noise(plain)
    choice, log_evidence = _select(family, evidence, rule)
    return EvidencePoint("network", evidence, choice, log_evidence)


def at_optimum(
    tangent: TangentModel, family: PriorFamily, rule: HyperRule, tolerance: float, max_passes: int | None
) -> EvidencePoint:
    """Everything at v*, which is searched again for every precision that the rule looks at."""
    plain = EvidenceAtOptimum(tangent, family.curvature, family.prior, tolerance, max_passes)
    evidence = family.with_noise(plain)
    choice, log_evidence = _select(family, evidence, rule)
    end = plain.optimum(choice.precisions)
    search = TangentSearch(end.gradient, end.gap, plain.passes, plain.reached(end))
    return EvidencePoint("tangent", evidence, choice, log_evidence, search)


def _select(family: PriorFamily, evidence: LogEvidence, rule: HyperRule) -> tuple[Choice, float]:
    with torch.enable_grad():
        choice = rule.choose(family.problem(evidence))
        return choice, float(evidence(choice.precisions))
