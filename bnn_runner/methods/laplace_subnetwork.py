"""Linearised Laplace over a subset of single weights, the rest held at MAP (Daxberger et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from bnn_runner.base import FitContext, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.curvature.block_curvature import BlockCurvature
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvatureKind
from bnn_runner.curvature.parameter_subset import Basis
from bnn_runner.curvature.psd import Repairs
from bnn_runner.curvature.structures import SingleWeightStructure, fit_structure
from bnn_runner.curvature.subnetwork import Chosen, Select, candidate_names, choose
from bnn_runner.errors import raise_all
from bnn_runner.laplace.evidence_point import Mode
from bnn_runner.laplace.posterior import LinearisedLaplace, NetworkLaplace
from bnn_runner.methods.laplace import Laplace
from bnn_runner.runtime.torch_state import true_float32
from bnn_runner.tasks import Task, TaskSpec


@dataclass(frozen=True)
class LaplaceSubnetwork:
    """N(w*, (H_S + Λ_S)⁻¹) over a set S of single weights; the evidence is over these weights alone.

    The attributes that are not listed are those of `Laplace`.

    Attributes:
        num_weights: number of weights, a share of the candidates (below 1), or all of them (None).
        select: largest_variance takes the weights with the largest marginal variance under a diagonal Laplace (which
            costs a pass over the data), random takes them by the seed.
        modules: modules or tensors whose weights are the candidates; all weights where it is empty.
        structure: of the curvature over the selected weights.
    """

    num_weights: int | float | None = 1000
    select: Select = "largest_variance"
    modules: tuple[str, ...] = ()
    structure: SingleWeightStructure = "full"
    curvature: OutputCurvatureKind = "ggn"
    fisher_samples: int = 1
    predict: Literal["draws", "closed_form", "bridge", "network"] = "draws"
    mode: Mode = "network"
    tangent_tolerance: float = 1e-7
    tangent_passes: int | None = None
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("mackay1992", "khan2019", "immer2021", "daxberger2021subnetwork")

    def __post_init__(self) -> None:
        problems = []
        share = isinstance(self.num_weights, float)
        if self.num_weights is not None and not (0 < self.num_weights < 1 if share else self.num_weights >= 1):
            problems.append(
                "method.num_weights must be a number of weights (at least 1), a share of them (between 0 and 1), or "
                f"null for all candidates; got {self.num_weights}."
            )
        if self.num_weights is None and not self.modules:
            problems.append(
                "method.num_weights=null requires method.modules; without them it selects every weight. Set "
                "method.modules or a number, or use method=laplace_full."
            )
        raise_all(problems)
        self._laplace()  # checks the other settings

    def _laplace(self) -> Laplace:
        """The method with the same settings over all weights."""
        return Laplace(
            structure=self.structure,
            curvature=self.curvature,
            fisher_samples=self.fisher_samples,
            predict=self.predict,
            mode=self.mode,
            tangent_tolerance=self.tangent_tolerance,
            tangent_passes=self.tangent_passes,
        )

    @property
    def predictive(self) -> Predictive:
        return self._laplace().predictive

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        return self._laplace().problems(spec, hyper)

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0)]

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> LinearisedLaplace | NetworkLaplace:
        network = networks[0]
        with true_float32(), torch.no_grad():
            chosen = self._chosen(task, network, context)
            jacobians = Jacobians(network, tuple(chosen.places), chosen.places)
            held = dict.fromkeys(network.parameters, "held at MAP (outside the basis)")
            words = f"{chosen.size} of {network.num_parameters} weights, {self._words(chosen)}"
            notes: tuple[str, ...] = ()
            if chosen.never_reached:
                notes = (
                    f"{chosen.never_reached} weights do not influence any output at a training point (dead pixels or "
                    "units); they are held at MAP",
                )
            posterior = self._laplace().over(Basis(jacobians.names, words, held, notes), jacobians, task, context)
        whole = {name: network.parameters[name].numel() for name in chosen.places}
        treatment = {
            name: f"{rule} over {len(chosen.places[name])} of its {whole[name]} weights, the rest held at MAP"
            if name in whole
            else rule
            for name, rule in posterior.treatment.items()
        }
        facts = {"subnetwork": self._words(chosen), "subnetwork_never_reached": chosen.never_reached}
        return replace(posterior, report=posterior.report.extended(facts), treatment=treatment)

    def _words(self, chosen: Chosen) -> str:
        among = f" in {', '.join(self.modules)}" if self.modules else ""
        if chosen.size == chosen.candidates:
            return f"all{among}"
        return f"{'of largest marginal variance' if self.select == 'largest_variance' else 'at random'}{among}"

    def _chosen(self, task: Task, network: Network, context: FitContext) -> Chosen:
        names = candidate_names(network, self.modules)
        diagonal = None
        if self.select == "largest_variance":
            everything = Jacobians(network, names)
            passes = self._laplace().passes(everything, task, context, Repairs())
            found = fit_structure("diag", passes)
            assert isinstance(found, BlockCurvature)
            diagonal = {g.name: b.spectrum for g, b in zip(found.groups, found.blocks, strict=True)}
        return choose(network, names, self.num_weights, self.select, diagonal, context.seed)
