"""MAP: one network, one draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from bnn_runner.base import FitContext, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.posteriors.networks import NetworkEnsemble
from bnn_runner.tasks import Task, TaskSpec


@dataclass(frozen=True)
class MAP:
    """The minimiser of mean(−log p) + (1/2N) wᵀΛw, found by the schedule."""

    finite: ClassVar[bool] = True
    uses_hyper: ClassVar[bool] = False
    predictive: ClassVar[Predictive] = "draws"
    cites: ClassVar[tuple[str, ...]] = ("mackay1992",)

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        return []

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0)]

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> NetworkEnsemble:
        return NetworkEnsemble((networks[0],))
