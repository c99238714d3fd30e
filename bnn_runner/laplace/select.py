"""What a curvature and a hyperparameter rule come to: the posterior's Gaussian, and the facts that every row has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bnn_runner.base import HyperRule
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.parameter_subset import Basis
from bnn_runner.curvature.psd import Repairs
from bnn_runner.laplace.evidence import Curvature
from bnn_runner.laplace.evidence_point import Mode, evidence_point
from bnn_runner.laplace.newton_decrement import decrement_notes, newton_decrement
from bnn_runner.laplace.posterior import WeightGaussian
from bnn_runner.laplace.prior_family import PriorFamily
from bnn_runner.laplace.scale_invariance import scale_invariant
from bnn_runner.laplace.tangent_optimum import TangentModel
from bnn_runner.laplace.validation_score import Validation, validation_logliks
from bnn_runner.tasks import Task


@dataclass(frozen=True)
class Decision:
    """What the rule chose, `chosen` [T], and what comes of it: facts for the row, and what is to be told.

    Where the noise was chosen too, `curvature` and `jacobians` are those of the network with it and `precisions` [T]
    go with them; else they are those given and chosen.
    """

    chosen: Tensor
    precisions: Tensor
    curvature: Curvature
    jacobians: Jacobians
    gaussian: WeightGaussian
    report: dict[str, Any]
    notes: list[str]


def select_precisions(
    task: Task,
    jacobians: Jacobians,
    chosen: Basis,
    curvature: Curvature,
    rule: HyperRule,
    repairs: Repairs,
    mode: Mode = "network",
    tolerance: float = 1e-7,
    passes: int | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    validation: Validation = validation_logliks,
) -> Decision:
    """`mode`, with `tolerance` and `passes` of the tangent model's optimum, as `Laplace` has them.

    `validation` scores candidates by the method's own predictive.
    """
    few = task.train.gather(torch.arange(min(8, len(task.train))))[0]
    # A part of a tensor can be scaled by itself: that no normalisation takes out again.
    invariant = () if jacobians.chosen else scale_invariant(jacobians.network, few, jacobians.names)
    setting = PriorFamily.of(task, jacobians, curvature, rule, invariant, repairs, validation)
    point = evidence_point(mode, TangentModel(task, jacobians, progress, repairs), setting, rule, tolerance, passes)
    settled = setting.settled(point)
    gaussian = settled.curvature.gaussian(settled.precisions)
    prior = setting.prior.diagonal(settled.precisions)
    decrement = newton_decrement(task, settled.jacobians, prior, gaussian)
    report = {
        "weights_in_basis": sum(jacobians.sizes().values()),
        "mode": point.mode,
        "evidence_nats": settled.evidence,
        "evidence_over": chosen.described,
        "train_loglik_nats": settled.loglik,
        "newton_decrement_nats": decrement,
        "scale_invariant": list(invariant),
        "effective_dimension": float(settled.curvature.effective_dimensions(settled.precisions).sum()),
        **settled.report,
        **point.choice.report,
        **point.report,
    }
    notes = [*chosen.notes, *point.choice.notes, *point.notes, *settled.notes]
    notes += decrement_notes(decrement, point.mode)
    return Decision(
        point.choice.precisions,
        settled.precisions,
        settled.curvature,
        settled.jacobians,
        gaussian,
        report,
        notes,
    )
