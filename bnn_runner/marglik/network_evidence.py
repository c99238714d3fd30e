"""The evidence of a network at its current weights during training, as a problem for a rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from bnn_runner.base import Network, PrecisionProblem
from bnn_runner.curvature.jacobians import CHECKED_POINTS, Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature, OutputCurvatureKind
from bnn_runner.curvature.psd import wide
from bnn_runner.curvature.structures import TrainingStructure, decided, fit_structure
from bnn_runner.curvature.training_passes import TrainingPasses
from bnn_runner.errors import UserError
from bnn_runner.laplace.evidence import log_likelihood
from bnn_runner.laplace.scale_invariance import scale_invariant
from bnn_runner.rng import generator
from bnn_runner.runtime.torch_state import true_float32
from bnn_runner.tasks import Task

FULL_UP_TO = 1000
"""Rows of the smaller side up to which `auto` takes the full curvature, which is refitted at every update."""


@dataclass(frozen=True)
class NetworkEvidence:
    """The evidence under a curvature over all weights.

    Attributes:
        structure: of the curvature; auto is full for small networks, else kfac.
        curvature: as in `Laplace`.
        fisher_samples: as in `Laplace`.
        points: size of a random subset of the training points for the curvature, which then counts N/points times, so
            that its expectation is that of all N; the log-likelihood is always that of all points. None: all.
    """

    structure: TrainingStructure = "auto"
    curvature: OutputCurvatureKind = "ggn"
    fisher_samples: int = 1
    points: int | None = None

    def problems(self) -> list[str]:
        """What is wrong with the settings, in terms of the keys of `hyper`."""
        found = []
        if self.fisher_samples < 1:
            found.append(f"hyper.fisher_samples must be at least 1; got {self.fisher_samples}.")
        if self.fisher_samples > 1 and self.curvature != "mc_fisher":
            found.append(
                f"hyper.fisher_samples={self.fisher_samples} requires hyper.curvature=mc_fisher; got "
                f"hyper.curvature={self.curvature}. Set hyper.curvature=mc_fisher, or remove hyper.fisher_samples."
            )
        if self.points is not None and self.points < 1:
            found.append(f"hyper.points must be at least 1, or null for all points; got {self.points}.")
        return found

    def at(self, network: Network, task: Task, seed: int) -> PrecisionProblem:
        """The problem at the network's weights and precisions; the network is not changed.

        Every parameter tensor is a group under its own name.

        Args:
            network: at its current weights.
            task: its training set.
            seed: of sampled targets and of the subset of points.
        """
        count = len(task.train)
        part, scale = task, 1.0
        if self.points is not None and self.points < count:
            chosen = torch.randperm(count, generator=generator(seed, "evidence points"))[: self.points]
            part, scale = replace(task, train=task.train.subset(chosen.sort().values)), count / self.points
        with true_float32(), torch.no_grad():
            jacobians = Jacobians(network)
            few = task.train.gather(torch.arange(min(8, count)))[0]
            jacobians.learn_shapes(few[:CHECKED_POINTS])
            output = OutputCurvature(self.curvature, self.fisher_samples, seed)
            passes = TrainingPasses(part, jacobians, output)
            size = sum(jacobians.sizes().values())
            fitted = fit_structure(decided(self.structure, size, passes.num_rows, FULL_UP_TO), passes)
            names, loglik = tuple(g.name for g in fitted.groups), log_likelihood(task, network)
            squares = torch.stack([wide(network.parameters[n]).square().sum() for n in names]).cpu()
            invariant = scale_invariant(network, few, jacobians.names).names

        def evidence(precisions: Tensor) -> Tensor:
            penalty = (precisions.expand(len(squares)) * squares).sum()
            return loglik - 0.5 * (penalty + fitted.log_det_ratio(precisions / scale).cpu())

        return PrecisionProblem(
            names=names,
            start=torch.tensor([network.prior_precision[n] for n in names], dtype=torch.float64),
            evidence=evidence,
            validation=_no_validation,
            effective_dimensions=lambda precisions: fitted.effective_dimensions(precisions / scale),
            squares=lambda _: squares,
            invariant=invariant,
        )


def _no_validation(candidates: object, scores: object, points: object) -> NoReturn:
    raise UserError("hyper rules that act during training do not support a validation score; they use the evidence.")
