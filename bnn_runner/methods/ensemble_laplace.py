"""Mixtures of Laplace approximations: each member of a deep ensemble has its own (Eschenhagen et al. 2021)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch

from bnn_runner.base import FitContext, FitReport, HyperRule, Network, Predictive, TrainingSpec
from bnn_runner.curvature.output_curvature import OutputCurvatureKind
from bnn_runner.curvature.parameter_subset import HeldKind
from bnn_runner.curvature.structures import Structure
from bnn_runner.errors import RunFailed, raise_all
from bnn_runner.laplace.evidence_point import Mode
from bnn_runner.methods.laplace import RANK, Laplace
from bnn_runner.posteriors.mixture import Mixture, predictive_log_densities, stacking_weights
from bnn_runner.posteriors.networks import member_distances
from bnn_runner.rng import derive_seed
from bnn_runner.runtime.console import Progress
from bnn_runner.runtime.torch_state import true_float32
from bnn_runner.tasks import Task, TaskSpec

BATCH = 256


@dataclass(frozen=True)
class EnsembleLaplace:
    """Σ_m w_m N(w*_m, (H_m + Λ_m)⁻¹) over `size` independently trained networks; member 0 is the MAP network.

    The hyper rule selects the precision of every member separately. A mixture is not Gaussian, so it has no closed
    form. The attributes that are not listed are those of `Laplace`.

    Attributes:
        size: number of members.
        mixture: uniform weights, or validation: those that maximise the mixture's log-likelihood of the validation
            part.
        predict: draws (of the tangent models) or network (of the networks themselves).
    """

    size: int = 5
    mixture: Literal["uniform", "validation"] = "uniform"
    structure: Structure | Literal["auto"] = "auto"
    curvature: OutputCurvatureKind = "ggn"
    fisher_samples: int = 1
    sharing: Literal["expand", "reduce"] = "expand"
    bias: Literal["separate", "joint"] = "separate"
    rank: int = RANK
    weights: Literal["all", "last_layer"] = "all"
    hold: tuple[HeldKind, ...] = ()
    predict: Literal["draws", "network"] = "draws"
    mode: Mode = "network"
    tangent_tolerance: float = 1e-7
    tangent_passes: int | None = None
    finite: ClassVar[bool] = False
    uses_hyper: ClassVar[bool] = True
    predictive: ClassVar[Predictive] = "draws"
    cites: ClassVar[tuple[str, ...]] = ("eschenhagen2021", "lakshminarayanan2017", "immer2021", "daxberger2021")

    def __post_init__(self) -> None:
        if self.size < 1:
            raise_all([f"method.size must be at least 1; got {self.size}."])
        self._laplace()  # checks the other settings

    def _laplace(self) -> Laplace:
        """The method of each member."""
        return Laplace(**{f.name: getattr(self, f.name) for f in fields(Laplace) if hasattr(self, f.name)})

    @property
    def ties_tensors(self) -> bool:
        return self._laplace().ties_tensors

    def problems(self, spec: TaskSpec, hyper: HyperRule | None) -> list[str]:
        problems = self._laplace().problems(spec, hyper)
        if self.mixture == "validation" and spec.val_fraction == 0:
            problems.append(
                "method.mixture=validation requires validation data; data.val_fraction=0 leaves none. "
                "Set data.val_fraction=0.1, or use method.mixture=uniform."
            )
        return problems

    def needs(self) -> list[TrainingSpec]:
        return [TrainingSpec(member) for member in range(self.size)]

    def decided(self, task: Task, network: Network) -> EnsembleLaplace:
        return replace(self, structure=self._laplace().decided(task, network).structure)

    def fit(self, task: Task, networks: Sequence[Network], context: FitContext) -> Mixture:
        distance = member_distances(networks)
        if len(networks) > 1 and distance == 0.0:
            raise RunFailed("ensemble members must differ, but all have the same weights: their seeds are equal")
        laplace, members = self._laplace(), []
        for m, network in enumerate(networks):
            seed = context.seed if m == 0 else derive_seed(context.seed, "member", m)
            progress = _prefixed(context.progress, f"member {m + 1} of {len(networks)}, ")
            members.append(laplace.fit(task, [network], replace(context, seed=seed, progress=progress)))
        rows = [member.report.facts for member in members]
        notes = [f"member {m}: {note}" for m, member in enumerate(members) for note in member.report.notes]
        repairs: Counter[str] = Counter()
        for member in members:
            repairs.update(member.report.repairs)
        facts: dict[str, Any] = {
            "members": len(members),
            "member_distance": distance,
            "structure": rows[0]["structure"],
            "evidence_over": f"{rows[0]['evidence_over']} of each member; a mixture has none of its own",
            "member_evidence_nats": [row["evidence_nats"] for row in rows],
            "member_prior_precision": [row["prior_precision"] for row in rows],
            "member_newton_decrement_nats": [row["newton_decrement_nats"] for row in rows],
            "member_mode": [row["mode"] for row in rows],
            "hyper_status": ", ".join(dict.fromkeys(row["hyper_status"] for row in rows)),
        }
        weights = torch.full((len(members),), 1 / len(members), dtype=torch.float64)
        if self.mixture == "validation":
            with true_float32():
                logs = predictive_log_densities(members, task.val, context.seed, BATCH).cpu()
            uniform, weights = weights, stacking_weights(logs)
            scores = [float(torch.logsumexp(w.log().unsqueeze(1) + logs, 0).mean()) for w in (uniform, weights)]
            gain = f"{scores[1] - scores[0]:.3g} nats per point more than with equal weights there"
            notes.append(f"mixture weights from {logs.shape[1]} validation points: {_listed(weights)} ({gain})")
        notes.insert(
            0, f"log evidence of each member, {rows[0]['evidence_over']}: {_listed(facts['member_evidence_nats'])}"
        )
        facts |= {"mixture_weights": weights.tolist(), "effective_members": float(1 / weights.square().sum())}
        report = FitReport(facts, tuple(notes), repairs, members[0].report.cites)
        return Mixture(tuple(members), weights, report, members[0].treatment)


def _listed(values: Sequence[float] | torch.Tensor) -> str:
    return ", ".join(f"{float(v):.4g}" for v in values)


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda stage, done, total: progress(prefix + stage, done, total)
