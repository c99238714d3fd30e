"""Laplace in function space: exact draws from the dual side, a subset of the data, or Nyström features (ELLA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch

from bnn_runner.base import FitContext, FitReport, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.curvature.full import FullCurvature
from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.jacobians import CHECKED_POINTS, Jacobians
from bnn_runner.curvature.output_curvature import OutputCurvature, OutputCurvatureKind, samples_problems
from bnn_runner.curvature.parameter_subset import HeldKind, select_basis
from bnn_runner.curvature.psd import Repairs
from bnn_runner.errors import RunFailed, raise_all
from bnn_runner.hyper.tied_precisions import family_of
from bnn_runner.laplace.functional import (
    DualCurvature,
    NystromCurvature,
    NystromGaussian,
    PlainOutputs,
    off_the_features,
)
from bnn_runner.laplace.posterior import LinearisedLaplace
from bnn_runner.laplace.prior_family import noise_of
from bnn_runner.laplace.select import select_precisions
from bnn_runner.rng import generator
from bnn_runner.runtime.torch_state import true_float32
from bnn_runner.tasks import Task, TaskSpec

EXACT_ROWS = 3000
"""Rows (points times outputs) up to which auto is exact."""


@dataclass(frozen=True)
class LaplaceFunctional:
    """The linearised posterior as a Gaussian process with the tangent kernel J Λ⁻¹ Jᵀ.

    The attributes that are not listed are those of `Laplace`.

    Attributes:
        form: exact: prior draws conditioned on all training rows (Matheron's rule); nystrom: the posterior within
            leading features of the tangent kernel (ELLA, Deng et al. 2022), whose draws lack the variance off the
            features, which is measured and reported; auto: exact up to 3,000 rows.
        points: size of a random subset of the training points to condition on; None is all of them.
        features: number of Nyström features.
        pivots: training points that the features are computed at.
    """

    form: Literal["auto", "exact", "nystrom"] = "auto"
    points: int | None = None
    features: int = 50
    pivots: int = 1000
    curvature: OutputCurvatureKind = "ggn"
    fisher_samples: int = 1
    weights: Literal["all", "last_layer"] = "all"
    hold: tuple[HeldKind, ...] = ()
    predictive: ClassVar[Predictive] = "draws"
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = True
    cites: ClassVar[tuple[str, ...]] = ("khan2019", "immer2021", "deng2022")

    def __post_init__(self) -> None:
        problems = [
            f"method.{name} must be at least 1; got {value}."
            for name, value in (
                ("points", self.points),
                ("features", self.features),
                ("pivots", self.pivots),
            )
            if value is not None and value < 1
        ]
        problems += samples_problems(self.curvature, self.fisher_samples)
        raise_all(problems)

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        if hyper is None:
            return ["This method requires a hyper rule. Add hyper=fixed, hyper=grid or hyper=evidence."]
        problems = []
        if (family := family_of(hyper)) in ("parameter", "g"):
            problems.append(
                f"method=laplace_functional does not support hyper.family={family}, which requires the curvature's "
                "diagonal. Use hyper.family=isotropic, or method=laplace_diag."
            )
        elif family != "isotropic" and self.form == "nystrom":
            problems.append(
                f"method.form=nystrom does not support hyper.family={family}, which requires new features at each step "
                "of the search. Use hyper.family=isotropic, or method.form=exact."
            )
        if noise_of(hyper) == "evidence":
            problems.append(
                "method=laplace_functional does not support hyper.noise=evidence. Use hyper.noise=trained, or "
                "method=laplace_full."
            )
        return problems

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(0)]

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> LinearisedLaplace:
        with true_float32(), torch.no_grad():
            return self._fit(task, networks[0], context)

    def _fit(self, task: Task, network: Network, context: FitContext) -> LinearisedLaplace:
        assert context.hyper is not None
        total, repairs = len(task.train), Repairs()
        basis = select_basis(network, task, self.weights, self.hold)
        if self.points is not None and self.points < total:
            picked = torch.randperm(total, generator=generator(context.seed, "fit points"))[: self.points]
            task = replace(task, train=task.train.subset(picked.sort().values))
            basis = replace(basis, described=f"{basis.described}; {self.points} of {total} training points")
        jacobians = Jacobians(network, basis.names)
        jacobians.learn_shapes(task.train.gather(torch.arange(min(CHECKED_POINTS, len(task.train))))[0])
        output_curvature = OutputCurvature(self.curvature, self.fisher_samples, context.seed)
        rows = GGNOperator.of(task, jacobians, output_curvature, context.progress, repairs)
        exact = self.form == "exact" or (self.form == "auto" and len(rows) * rows.columns <= EXACT_ROWS and rows.keeps)
        if not exact and family_of(context.hyper) != "isotropic":
            raise RunFailed(
                f"hyper.family={family_of(context.hyper)} requires the exact form, which supports at most "
                f"{EXACT_ROWS:,} rows; there are {len(rows) * rows.columns:,}. Nyström features would change at each "
                "step of the search. Use hyper.family=isotropic, or fewer points with method.points=..."
            )
        curvature = self._exact(rows, repairs) if exact else self._nystrom(task, rows, repairs, context)
        selection = select_precisions(task, jacobians, basis, curvature, context.hyper, repairs)
        facts: dict[str, Any] = {"structure": "functional", "form": "exact" if exact else "nystrom"}
        facts |= {"fit_points": len(task.train), "output_curvature": self.curvature}
        notes = list(selection.notes)
        if len(task.train) < total:
            notes.append(
                f"the posterior is conditioned on {len(task.train)} of {total} training points (method.points), "
                "selected by the seed, so it is wider than that of all points"
            )
        if isinstance(selection.gaussian, NystromGaussian):
            splits = [("train", task.train), *((f"ood/{n}", s) for n, s in task.ood.items())]
            measured = off_the_features(jacobians, selection.gaussian, splits)
            facts |= {"features": selection.gaussian.vectors.shape[1], "pivots": len(curvature.pivots)}  # type: ignore[union-attr]
            facts["variance_off_the_features"] = {n: v[0] for n, v in measured.items()}
            facts["variance_on_the_features"] = {n: v[1] for n, v in measured.items()}
            words = ", ".join(f"{n} {off:.3g} ({on:.3g})" for n, (off, on) in measured.items())
            notes.append(
                "Nyström features omit the variance off them; in the prior it is on average (in brackets that of the "
                f"draws): {words}; raise method.features and method.pivots, or use method.form=exact"
            )
        rule = "full curvature, dual side" if exact else "Nyström features; no variance off them"
        return LinearisedLaplace(
            jacobians=jacobians,
            gaussian=selection.gaussian,
            likelihood=network.likelihood,
            report=FitReport({**facts, **selection.facts}, tuple(notes), dict(repairs)),
            treatment=basis.treatment | dict.fromkeys(jacobians.names, rule),
        )

    def _exact(self, rows: GGNOperator, repairs: Repairs) -> DualCurvature:
        if not rows.keeps:
            raise RunFailed(
                f"method.form=exact keeps {len(rows) * rows.columns:,} rows of {rows.size:,} weights, which must fit "
                f"into 1 GiB; they take about {8 * len(rows) * rows.columns * rows.size / 2**30:.0f} GiB. "
                "Use method.form=nystrom, fewer points with method.points=..., or method=laplace_sampled."
            )
        ((_, batch),) = rows.batches(1)
        assert batch.kept is not None
        dtype = rows.jacobians.network.parameters[rows.jacobians.names[0]].dtype
        return DualCurvature(FullCurvature(batch.kept.flatten(0, 1), None, rows.jacobians.sizes(), dtype, repairs))

    def _nystrom(self, task: Task, rows: GGNOperator, repairs: Repairs, context: FitContext) -> NystromCurvature:
        chosen = torch.randperm(len(rows), generator=generator(context.seed, "pivots"))[: self.pivots]
        subset = replace(task, train=task.train.subset(chosen.sort().values))
        pivots = GGNOperator.of(subset, rows.jacobians, PlainOutputs(), context.progress, repairs)
        dtype = rows.jacobians.network.parameters[rows.jacobians.names[0]].dtype
        return NystromCurvature(pivots, rows, self.features, dtype, repairs)
