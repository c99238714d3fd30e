"""Linearised Laplace (MacKay 1992; Khan et al. 2019; Immer et al. 2021; Daxberger et al. 2021)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch

from bnn_runner.base import FitContext, Network, Predictive, Task, TaskSpec, TrainingSpec
from bnn_runner.errors import RunFailed
from bnn_runner.hyper import HyperRule, PrecisionProblem
from bnn_runner.linearised.algebra import Repairs
from bnn_runner.linearised.blocks import BlockCurvature, fit_diagonal, fit_kfac
from bnn_runner.linearised.evidence import log_evidence, log_likelihood, validation_logliks
from bnn_runner.linearised.full import FullCurvature, bytes_needed, fit_full
from bnn_runner.linearised.jacobians import BatchJacobians, Jacobians
from bnn_runner.linearised.posterior import LinearisedLaplace, NetworkLaplace, last_layer_names
from bnn_runner.modes import true_float32

FULL_UP_TO = 3000


@dataclass(frozen=True)
class Laplace:
    """Gaussian posterior N(w*, (H + Λ)⁻¹) with H the GGN at the MAP weights.

    structure: full, kfac, diag, or auto (full where its smaller side has at most 3,000 rows, else
    kfac). weights: all or last_layer; the rest stay at their MAP values. norm: scale and shift of
    norm layers have a block of their own, or are held at MAP. predictive: draws of the tangent
    model; closed_form (exact Gaussian; probit for classes); bridge (classes); network (draws
    through the network itself, for comparison).
    """

    structure: Literal["auto", "full", "kfac", "diag"] = "auto"
    weights: Literal["all", "last_layer"] = "all"
    norm: Literal["block", "map"] = "block"
    predict: Literal["draws", "closed_form", "bridge", "network"] = "draws"
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = True

    @property
    def predictive(self) -> Predictive:
        return "draws" if self.predict == "network" else self.predict

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        problems = []
        if self.predict == "bridge" and spec.kind != "classification":
            problems.append(
                f"method.predict=bridge needs classes, and data={spec.name} is a regression. "
                "The bridge approximates a softmax. Use method.predict=closed_form, which is exact there."
            )
        if hyper is None:
            problems.append("this method needs a hyperparameter rule. Add hyper=fixed, hyper=grid or hyper=evidence.")
        return problems

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0)]

    def settled(self, task: Task, network: Network) -> Laplace:
        if self.structure != "auto":
            return self
        return replace(self, structure=self._structure(task, Jacobians(network, self._basis(network, task)[0])))

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> LinearisedLaplace | NetworkLaplace:
        network = networks[0]
        with true_float32(), torch.no_grad():
            return self._fit(task, network, context)

    def _fit(self, task: Task, network: Network, context: FitContext) -> LinearisedLaplace | NetworkLaplace:
        names, treatment = self._basis(network, task)
        jacobians = Jacobians(network, names)
        jacobians.learn_shapes(task.train.gather(torch.arange(1))[0])
        repairs = Repairs()
        structure = self._structure(task, jacobians)
        curvature = self._curvature(structure, task, jacobians, repairs, context)
        for name in names:
            treatment[name] = _rule(structure, jacobians, name)

        loglik = log_likelihood(task, network)
        weights = [network.parameters[n] for n in names]
        start = torch.tensor([network.prior_precision[n] for n in names], dtype=torch.float64)
        evidence = partial(log_evidence, loglik, weights, curvature)
        assert context.hyper is not None
        problem = PrecisionProblem(
            names=names,
            start=start,
            evidence=evidence,
            validation=partial(validation_logliks, task, jacobians, curvature),
        )
        with torch.enable_grad():
            choice = context.hyper.choose(problem)
        precisions = choice.precisions
        report: dict[str, Any] = {
            "structure": structure,
            "weights_in_basis": sum(jacobians.sizes().values()),
            "evidence_nats": float(evidence(precisions)),
            "evidence_over": "all weights" if self.weights == "all" else "last-layer weights",
            "train_loglik_nats": loglik,
            "effective_dimension": curvature.effective_dimension(precisions),
            "prior_precision": float(precisions[0]) if bool((precisions == precisions[0]).all()) else None,
            **choice.report,
            "repairs": dict(repairs),
            "notes": list(choice.notes),
        }
        if report["prior_precision"] is None:
            report["prior_precisions"] = dict(zip(names, precisions.tolist(), strict=True))
        kind = NetworkLaplace if self.predict == "network" else LinearisedLaplace
        return kind(
            jacobians=jacobians,
            gaussian=curvature.gaussian(precisions),
            likelihood=network.likelihood,
            report=report,
            treatment=treatment,
        )

    def _basis(self, network: Network, task: Task) -> tuple[tuple[str, ...], dict[str, str]]:
        """Names of the tensors in the basis, and every tensor's treatment (those of the basis are told later)."""
        names = tuple(network.parameters)
        if self.weights == "last_layer":
            x, _ = task.train.gather(torch.arange(min(2, len(task.train))))
            names = last_layer_names(network, x)
        treatment = dict.fromkeys(network.parameters, "held at MAP (outside the basis)")
        if self.norm == "map":
            everything = Jacobians(network)
            held = {n for n in names if everything.rule(n) == "norm"}
            treatment |= dict.fromkeys(held, "held at MAP (method.norm=map)")
            names = tuple(n for n in names if n not in held)
        if not names:
            raise RunFailed(
                "no weight is left for the posterior: method.weights and method.norm hold all of them at MAP."
            )
        return names, treatment

    def _structure(self, task: Task, jacobians: Jacobians) -> Literal["auto", "full", "kfac", "diag"]:
        if self.structure != "auto":
            return self.structure
        size, rows = sum(jacobians.sizes().values()), len(task.train) * _directions(task)
        small = min(size, rows) <= FULL_UP_TO and bytes_needed(size, rows) < 2**30
        return "full" if small else "kfac"

    def _curvature(
        self, structure: str, task: Task, jacobians: Jacobians, repairs: Repairs, context: FitContext
    ) -> BlockCurvature | FullCurvature:
        batches = _batches(task, jacobians, context)
        if structure == "full":
            return fit_full(jacobians, batches, len(task.train) * _directions(task), repairs)
        if structure == "kfac":
            return fit_kfac(jacobians, batches, repairs)
        return fit_diagonal(jacobians, batches)


def _directions(task: Task) -> int:
    """Columns of the curvature root: K − 1 for classes (the softmax curvature is singular), else K."""
    return task.spec.num_outputs - (task.spec.kind == "classification")


def _batches(task: Task, jacobians: Jacobians, context: FitContext) -> Iterator[BatchJacobians]:
    """Jacobians over the clean training set in order, no point dropped."""
    root = jacobians.network.likelihood.curvature_root
    total, done = len(task.train), 0
    for x, _ in task.train.batches(jacobians.batch_size(_directions(task))):
        context.progress("curvature", done, total)
        yield jacobians(x, root)
        done += len(x)
    context.progress("curvature", total, total)


def _rule(structure: str, jacobians: Jacobians, name: str) -> str:
    """How a tensor of the basis is treated, in words."""
    if structure == "full":
        return "full GGN"
    if structure == "diag":
        return "diagonal"
    kinds = {
        "matrix": "Kronecker factors",
        "bias": "own block (output factor)",
        "norm": "own block (exact)",
        "general": "own diagonal (exact)",
    }
    return kinds[jacobians.rule(name)]
