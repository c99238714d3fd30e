"""Linearised Laplace: a Gaussian over the weights at the MAP network, propagated through the tangent model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from bnn_runner.base import FitContext, FitReport, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.curvature.base import Approximation
from bnn_runner.curvature.jacobians import CHECKED_POINTS, Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature, OutputCurvatureKind, samples_problems
from bnn_runner.curvature.parameter_subset import Basis, HeldKind, select_basis
from bnn_runner.curvature.psd import Repairs
from bnn_runner.curvature.structures import STRUCTURES, Structure, decided, fit_structure
from bnn_runner.curvature.training_passes import TrainingPasses
from bnn_runner.errors import raise_all
from bnn_runner.laplace.evidence_point import Mode
from bnn_runner.laplace.posterior import LinearisedLaplace, NetworkLaplace
from bnn_runner.laplace.prior_family import family_problems
from bnn_runner.laplace.select import select_precisions
from bnn_runner.laplace.sources import sources
from bnn_runner.laplace.validation_score import network_validation_scores, validation_scores
from bnn_runner.runtime.torch_state import true_float32
from bnn_runner.tasks import Task, TaskSpec

FULL_UP_TO = 3000
RANK = 100


@dataclass(frozen=True)
class Laplace:
    """Gaussian posterior N(w*, (H + Λ)⁻¹) with H a curvature at the MAP weights w*.

    The predictive mean is f(x, w*) in every mode.

    Attributes:
        structure: an entry of `STRUCTURES`: full, block (one exact block per layer), kfac, ekfac, diag, low_rank (the
            leading eigenpairs of the full curvature); or auto: full where its smaller side has at most 3,000 rows,
            else kfac.
        curvature: ggn (exact), mc_fisher (sampled targets) or empirical_fisher (observed targets).
        fisher_samples: sampled targets per point.
        sharing: how Kronecker factors treat the positions of a convolution, expand or reduce.
        bias: separate blocks for biases, or joint with the weight's Kronecker factors.
        rank: number of eigenpairs of low_rank.
        weights: all or last_layer; the others are held at their MAP values.
        hold: kinds of weights that are held too (norm, bias, embedding, attention; see `kinds_of`).
        predict: draws of the tangent model; closed_form (exact Gaussian in regression; probit for classes, which
            mistakes the logits' common shift, on which data have no influence, for uncertainty, so that its
            probabilities are too even); bridge (classes); network (draws of the network itself, for comparison).
        mode: where the evidence is taken: at w* (network), at the tangent model's own optimum v* (tangent), or at v*
            where that is needed and reached and else at w* (auto, the default on the command line; see
            `laplace.select`).
        tangent_tolerance: relative gradient at which v* is reached.
        tangent_passes: most passes over the data for v*; None is 2,000 where the Jacobians fit in memory, else 100, and
            at most 200 in mode auto.
    """

    structure: Structure | Literal["auto"] = "auto"
    curvature: OutputCurvatureKind = "ggn"
    fisher_samples: int = 1
    sharing: Literal["expand", "reduce"] = "expand"
    bias: Literal["separate", "joint"] = "separate"
    rank: int = RANK
    weights: Literal["all", "last_layer"] = "all"
    hold: tuple[HeldKind, ...] = ()
    predict: Literal["draws", "closed_form", "bridge", "network"] = "draws"
    mode: Mode = "network"
    tangent_tolerance: float = 1e-7
    tangent_passes: int | None = None
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("mackay1992", "khan2019", "immer2021", "daxberger2021")

    def __post_init__(self) -> None:
        problems, spec = [], STRUCTURES.get(self.structure)  # None for auto
        if self.tangent_passes is not None and self.tangent_passes < 1:
            problems.append(f"method.tangent_passes must be at least 1, or null; got {self.tangent_passes}.")
        if not 0 < self.tangent_tolerance < 1:
            problems.append(
                f"method.tangent_tolerance must be between 0 and 1 (a relative gradient); got {self.tangent_tolerance}."
            )
        problems += samples_problems(self.curvature, self.fisher_samples)
        if self.rank < 1:
            problems.append(f"method.rank must be at least 1; got {self.rank}.")
        elif self.rank != RANK and (spec is None or not spec.ranked):
            problems.append(
                f"method.rank={self.rank} requires method.structure=low_rank; got {self.structure}. "
                "Set method.structure=low_rank, or remove method.rank."
            )
        if spec is not None and not spec.kronecker:
            problems += [
                f"method.{key}={value} requires Kronecker factors; got method.structure={self.structure}. Set "
                f"method.structure=kfac or ekfac, or remove method.{key}."
                for key, value, default in (("sharing", self.sharing, "expand"), ("bias", self.bias, "separate"))
                if value != default
            ]
        raise_all(problems)

    @property
    def predictive(self) -> Predictive:
        return "draws" if self.predict == "network" else self.predict

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        problems = []
        if self.predict == "bridge" and spec.kind != "classification":
            problems.append(
                f"method.predict=bridge requires classes; data={spec.name} is a regression. "
                "Use method.predict=closed_form, which is exact there."
            )
        if hyper is not None:
            problems += family_problems(self.structure, self.curvature, spec, hyper)
        else:
            problems.append("This method requires a hyper rule. Add hyper=fixed, hyper=grid or hyper=evidence.")
        return problems

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0)]

    def decided(self, task: Task, network: Network) -> Laplace:
        if self.structure != "auto":
            return self
        return replace(self, structure=self._structure(task, Jacobians(network, self._basis(network, task).names)))

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> LinearisedLaplace | NetworkLaplace:
        network = networks[0]
        with true_float32(), torch.no_grad():
            return self._fit(task, network, context)

    def _fit(self, task: Task, network: Network, context: FitContext) -> LinearisedLaplace | NetworkLaplace:
        basis = self._basis(network, task)
        return self.over(basis, Jacobians(network, basis.names), task, context)

    @property
    def ties_tensors(self) -> bool:
        """Whether several tensors share a block, and so one prior precision."""
        spec = STRUCTURES.get(self.structure)
        return self.bias == "joint" or (spec is not None and spec.by_layer)

    def passes(self, jacobians: Jacobians, task: Task, context: FitContext, repairs: Repairs) -> TrainingPasses:
        """What a curvature with these settings is fitted from, in whichever structure."""
        return TrainingPasses(
            task,
            jacobians,
            OutputCurvature(self.curvature, self.fisher_samples, context.seed),
            self.sharing,
            self.bias == "joint",
            self.rank,
            repairs,
            context.progress,
        )

    def over(
        self, basis: Basis, jacobians: Jacobians, task: Task, context: FitContext
    ) -> LinearisedLaplace | NetworkLaplace:
        """The posterior over the weights of a basis. Call it without gradients and in true float32.

        Args:
            basis: the weights, in words.
            jacobians: with respect to them.
            task: the training set.
            context: of the fit.
        """
        treatment = dict(basis.treatment)
        jacobians.learn_shapes(task.train.gather(torch.arange(min(CHECKED_POINTS, len(task.train))))[0])
        repairs = Repairs()
        structure = self._structure(task, jacobians)
        spec = STRUCTURES[structure]
        curvature = fit_structure(structure, self.passes(jacobians, task, context, repairs))
        for group in curvature.groups:
            treatment |= dict.fromkeys(group.members, spec.treatment(jacobians, group))

        assert context.hyper is not None
        selection = select_precisions(
            task,
            jacobians,
            basis,
            curvature,
            context.hyper,
            repairs,
            self.mode,
            self.tangent_tolerance,
            self.tangent_passes,
            context.progress,
            network_validation_scores if self.predict == "network" else validation_scores,
        )
        facts = {"structure": structure, "output_curvature": self.curvature, **selection.facts}
        report = FitReport(facts, selection.notes, dict(repairs), (*spec.cites, *sources(facts)))
        if isinstance(curvature, Approximation):
            report = report.extended(*curvature.dropped(selection.searched))
        kind = NetworkLaplace if self.predict == "network" else LinearisedLaplace
        return kind(
            jacobians=selection.jacobians,
            gaussian=selection.gaussian,
            likelihood=selection.jacobians.network.likelihood,
            report=report,
            treatment=treatment,
        )

    def _basis(self, network: Network, task: Task) -> Basis:
        return select_basis(network, task, self.weights, self.hold)

    def _structure(self, task: Task, jacobians: Jacobians) -> Structure:
        size = sum(jacobians.sizes().values())
        rows = len(task.train) * OutputCurvature(self.curvature, self.fisher_samples).columns(task, jacobians.network)
        return decided(self.structure, size, rows, FULL_UP_TO)
