"""Deep ensembles: networks trained from different initial weights and data orders, equally weighted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bnn_runner.base import FitContext, FitReport, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.errors import RunFailed, UserError
from bnn_runner.posteriors.networks import NetworkEnsemble, member_distances
from bnn_runner.tasks import Task, TaskSpec


@dataclass(frozen=True)
class Ensemble:
    """`size` members (Lakshminarayanan et al. 2017, without adversarial training); member 0 is the MAP network."""

    size: int = 5
    finite: ClassVar[bool] = True
    uses_hyper: ClassVar[bool] = False
    predictive: ClassVar[Predictive] = "draws"
    cites: ClassVar[tuple[str, ...]] = ("lakshminarayanan2017",)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"method.size must be at least 1; got {self.size}.")

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        return []

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(member) for member in range(self.size)]

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> NetworkEnsemble:
        distance = member_distances(networks)
        if len(networks) > 1 and distance == 0.0:
            raise RunFailed("ensemble members must differ, but all have the same weights: their seeds are equal")
        report = FitReport({"members": len(networks), "member_distance": distance})
        return NetworkEnsemble(tuple(networks), report, first_is_map=True)
