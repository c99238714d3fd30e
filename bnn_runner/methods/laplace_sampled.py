"""Sampled Laplace: the full GGN posterior of the tangent model by its draws, each one solved linear problem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bnn_runner.base import FitContext, FitReport, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.jacobians import CHECKED_POINTS, Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature, OutputCurvatureKind, samples_problems
from bnn_runner.curvature.parameter_subset import HeldKind, select_basis
from bnn_runner.curvature.psd import Repairs
from bnn_runner.errors import RunFailed, raise_all
from bnn_runner.hyper.evidence import Evidence
from bnn_runner.hyper.tied_precisions import family_of
from bnn_runner.laplace.dual_solver import DualSolver, affordable
from bnn_runner.laplace.evidence_point import Mode
from bnn_runner.laplace.log_det import spectrum_of
from bnn_runner.laplace.posterior import SampledLaplace
from bnn_runner.laplace.prior_family import noise_of
from bnn_runner.laplace.sampled import SampledCurvature
from bnn_runner.laplace.select import select_precisions
from bnn_runner.laplace.solvers import ConjugateGradients, Descent, Objective, Solver
from bnn_runner.laplace.sources import sources
from bnn_runner.runtime.torch_state import true_float32
from bnn_runner.tasks import Task, TaskSpec

CG_UP_TO = 4096
"""Training points up to which auto takes conjugate gradients where the rows are too many to keep."""
LARGE_ERROR = 1.0
"""Error of draws by gradient descent, in posterior standard deviations, above which a note says so."""


@dataclass(frozen=True)
class LaplaceSampled:
    """Draws of N(w*, (H + Λ)⁻¹), H the full GGN, by sample-then-optimise (Antorán et al. 2023), without P × P matrices.

    The attributes that are not listed are those of `Laplace`.

    Attributes:
        solver: dual (the exact solution in the space of the outputs), cg (conjugate gradients), sgd (gradient descent),
            or auto: cg where the Jacobian of all points fits into 1 GiB; else dual where points times outputs are at
            most 6,000 and fewer than the weights; else cg up to 4,096 points, and sgd.
        tolerance: cg and dual stop once no output is off by more than this fraction of its posterior standard
            deviation.
        passes: most passes of cg over the data.
        objective: of sgd, low_variance or noisy_targets (see `solvers.Descent`).
        sgd_passes: passes of sgd over the data; iterates are averaged over the last half.
        sgd_step: in units of the inverse of the largest curvature of a minibatch.
        sgd_momentum: Nesterov's.
        sgd_batch_size: points per minibatch.
        samples: draws that the fit solves for effective dimensions; draws for predictions are solved when needed.
        probes: of the log determinant in the evidence (which is exact where the Jacobian is kept and has at most
            3,000 rows or columns); 0 omits the evidence.
        lanczos_steps: most per probe, until bounds on the log determinant agree; without such bounds the evidence is
            omitted.
    """

    curvature: OutputCurvatureKind = "ggn"
    fisher_samples: int = 1
    weights: Literal["all", "last_layer"] = "all"
    hold: tuple[HeldKind, ...] = ()
    mode: Mode = "network"
    tangent_tolerance: float = 1e-7
    tangent_passes: int | None = None
    solver: Literal["auto", "dual", "cg", "sgd"] = "auto"
    tolerance: float = 0.01
    passes: int = 500
    objective: Objective = "low_variance"
    sgd_passes: int = 20
    sgd_step: float = 0.5
    sgd_momentum: float = 0.9
    sgd_batch_size: int = 256
    samples: int = 16
    probes: int = 8
    lanczos_steps: int = 200
    predictive: ClassVar[Predictive] = "draws"
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("mackay1992", "khan2019", "immer2021", "antoran2023")

    def __post_init__(self) -> None:
        problems = [
            f"method.{name} must be at least {least}; got {value}."
            for name, value, least in (
                ("tangent_passes", 1 if self.tangent_passes is None else self.tangent_passes, 1),
                ("passes", self.passes, 3),
                ("sgd_passes", self.sgd_passes, 3),
                ("sgd_batch_size", self.sgd_batch_size, 1),
                ("samples", self.samples, 2),
                ("lanczos_steps", self.lanczos_steps, 2),
            )
            if value < least
        ]
        if self.probes < 0 or self.probes == 1:
            problems.append(f"method.probes must be at least 2, or 0 for no evidence; got {self.probes}.")
        if not 0 < self.tolerance < 1:
            problems.append(
                f"method.tolerance must be between 0 and 1 (of a standard deviation); got {self.tolerance}."
            )
        if not 0 < self.tangent_tolerance < 1:
            problems.append(
                f"method.tangent_tolerance must be between 0 and 1 (a relative gradient); got {self.tangent_tolerance}."
            )
        if not 0 < self.sgd_step < 1.3:
            problems.append(
                f"method.sgd_step must be between 0 and 1.3; got {self.sgd_step}. With momentum, steps above 4/3 of "
                "the inverse curvature diverge."
            )
        if not 0 <= self.sgd_momentum < 1:
            problems.append(f"method.sgd_momentum must be in [0, 1); got {self.sgd_momentum}.")
        if self.solver in ("cg", "dual") and self.objective != "low_variance":
            problems.append(
                f"method.objective=noisy_targets requires method.solver=sgd; got {self.solver}, for which both "
                "objectives are the same linear problem. Set method.solver=sgd, or remove method.objective."
            )
        problems += samples_problems(self.curvature, self.fisher_samples)
        raise_all(problems)

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        if hyper is None:
            return ["This method requires a hyper rule. Add hyper=fixed, hyper=fixed_point or hyper=evidence."]
        if (family := family_of(hyper)) == "parameter":
            return [
                "method=laplace_sampled does not support hyper.family=parameter: samples do not give the effective "
                "dimension of each weight. Use hyper.family=isotropic, layerwise, groupwise or g, or "
                "method=laplace_diag."
            ]
        if noise_of(hyper) == "evidence":
            return [
                "method=laplace_sampled does not support hyper.noise=evidence, which requires more precise log "
                "determinants than samples give. Use hyper.noise=trained, or method=laplace_kfac or laplace_full."
            ]
        if isinstance(hyper, Evidence) and family not in ("isotropic", "g"):
            return [
                f"method=laplace_sampled does not support hyper=evidence with hyper.family={family}: one stochastic "
                "spectrum has no gradient in several precisions. Use hyper=fixed_point with that family, or "
                "hyper.family=isotropic or g."
            ]
        if isinstance(hyper, Evidence) and not self.probes:
            return ["hyper=evidence requires the evidence, which method.probes=0 omits. Use method.probes=8."]
        return []

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0)]

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> SampledLaplace:
        with true_float32(), torch.no_grad():
            return self._fit(task, networks[0], context)

    def _fit(self, task: Task, network: Network, context: FitContext) -> SampledLaplace:
        assert context.hyper is not None
        basis = select_basis(network, task, self.weights, self.hold)
        jacobians = Jacobians(network, basis.names)
        few = task.train.gather(torch.arange(min(8, len(task.train))))[0]
        jacobians.learn_shapes(few[:CHECKED_POINTS])
        repairs = Repairs()
        output_curvature = OutputCurvature(self.curvature, self.fisher_samples, context.seed)
        rows = GGNOperator.of(task, jacobians, output_curvature, context.progress, repairs)
        solver = self._solver(rows)
        spectrum = spectrum_of(rows, context.seed, self.probes, self.lanczos_steps, repairs)
        dtype = network.parameters[jacobians.names[0]].dtype
        plain = SampledCurvature(rows, solver, context.seed, self.samples, spectrum, dtype)
        selection = select_precisions(
            task, jacobians, basis, plain, context.hyper, repairs,
            self.mode, self.tangent_tolerance, self.tangent_passes, context.progress,
        )  # fmt: skip
        curvature = selection.curvature
        assert isinstance(curvature, SampledCurvature)
        dimensions = curvature.dimension_samples(selection.precisions).sum(1)
        facts = curvature.facts(selection.precisions)
        notes = list(selection.notes)
        if isinstance(solver, Descent) and facts["sample_error_sd"] > LARGE_ERROR:
            notes.append(
                f"draws are off by up to {facts['sample_error_sd']:.2g} posterior standard deviations after "
                f"{self.sgd_passes} passes of gradient descent, so they do not represent the posterior; raise "
                "method.sgd_passes, or use method.solver=cg"
            )
        if isinstance(solver, ConjugateGradients) and facts["sample_error_sd"] > self.tolerance:
            notes.append(
                f"draws are off by up to {facts['sample_error_sd']:.2g} of a posterior standard deviation "
                f"(method.tolerance={self.tolerance}) after {self.passes} passes of conjugate gradients; raise "
                "method.passes, or the prior precision"
            )
        if isinstance(solver, DualSolver) and facts["sample_error_sd"] > self.tolerance:
            notes.append(
                f"draws are off by up to {facts['sample_error_sd']:.2g} of a posterior standard deviation "
                f"(method.tolerance={self.tolerance}), by rounding; raise the prior precision"
            )
        known = dict(selection.facts)
        if spectrum is None:
            del known["evidence_nats"], known["evidence_over"], known["evidence_below_constant"]
        else:
            of_evidence, unbounded = self._evidence_error(curvature, selection.precisions, known["evidence_nats"])
            if unbounded and isinstance(context.hyper, Evidence):
                raise RunFailed(
                    f"hyper=evidence requires a bounded evidence; got one that {unbounded}. Use hyper=fixed_point, "
                    "which takes effective dimensions from samples, or raise method.lanczos_steps."
                )
            if unbounded:
                del known["evidence_nats"], known["evidence_below_constant"]
                notes.append(
                    f"the evidence is omitted: it {unbounded}. Raise method.lanczos_steps, or the prior precision"
                )
            known |= of_evidence
        row: dict[str, Any] = {
            "structure": "sampled",
            "output_curvature": self.curvature,
            "solver": _described(solver),
            "samples": self.samples,
            "draws_solved": "on demand",
            **facts,
            **known,
            "effective_dimension_standard_error": float(dimensions.std()) / self.samples**0.5,
            "passes_over_data": round(rows.passes, 1),
        }
        report = FitReport(row, tuple(notes), dict(repairs), sources(row))
        treatment = basis.treatment | dict.fromkeys(jacobians.names, "full curvature, by sampling")
        return SampledLaplace(jacobians, selection.gaussian, network.likelihood, report, treatment)

    def _solver(self, rows: GGNOperator) -> Solver:
        few = self.solver == "auto" and not rows.keeps and self.objective == "low_variance" and affordable(rows)
        if self.solver == "dual" or few:
            return DualSolver(self.tolerance)
        cg = self.solver == "cg" or (self.solver == "auto" and (rows.keeps or len(rows) <= CG_UP_TO))
        if cg:
            return ConjugateGradients(self.tolerance, self.passes)
        return Descent(self.sgd_step, self.sgd_momentum, self.sgd_batch_size, self.sgd_passes, self.objective)

    def _evidence_error(
        self, curvature: SampledCurvature, precisions: Tensor, evidence: float
    ) -> tuple[dict[str, Any], str]:
        """The errors of the evidence for the row; and in words its bounds, where they are not close."""
        bracket = curvature.bracket(precisions)
        facts: dict[str, Any] = {
            "evidence_standard_error_nats": bracket.error,
            "evidence_truncation_nats": bracket.truncation,
            "evidence_status": "exact" if bracket.exact else "bounded" if bracket.close else "not bounded",
        }
        if bracket.close:
            return facts, ""
        low, high = evidence - bracket.truncation, evidence + bracket.truncation
        facts["evidence_bounds_nats"] = [low, high]
        return facts, f"lies between {low:.6g} and {high:.6g} nats after method.lanczos_steps={self.lanczos_steps}"


def _described(solver: Solver) -> str:
    if isinstance(solver, Descent):
        return f"sgd ({solver.passes} passes)"
    return "dual" if isinstance(solver, DualSolver) else "cg"
