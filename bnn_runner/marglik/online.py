"""`hyper=online`: marginal likelihood during training, by some gradient steps in log λ every few epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from bnn_runner.base import Choice, Network, PrecisionProblem
from bnn_runner.curvature.output_curvature import OutputCurvatureKind
from bnn_runner.curvature.structures import TrainingStructure
from bnn_runner.errors import raise_all
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.tied_precisions import tied
from bnn_runner.hyper.training_rule import TuningState
from bnn_runner.marglik.network_evidence import NetworkEvidence
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.rng import derive_seed
from bnn_runner.tasks import Task
from bnn_runner.training.optimizers import Adam
from bnn_runner.training.schedules import Schedule


@dataclass(frozen=True)
class Online:
    """Empirical Bayes while the network is trained (Immer et al. 2021, algorithm 1).

    An update fits the curvature at the current weights and climbs the evidence in log λ_g by Adam, along
    ½ (γ_g − λ_g ‖w_g‖²); Adam's moments persist from update to update. Training continues under the new
    precisions. An untrained network has a small γ, which drives λ up and keeps it untrained: where the first
    epochs learn little, set a `burn_in`. Cost of an update: one forward pass over the training set, one fit of the
    curvature on `points`, and O(P) per step.

    Attributes:
        family: one λ (isotropic), one per parameter tensor (layerwise), or one for each scale-invariant tensor and
            one for all others (groupwise).
        burn_in: epochs before the first update.
        frequency: epochs between updates; there is always one after the last epoch.
        steps: Adam steps per update.
        lr: Adam's learning rate in log λ.
        structure: of the curvature, over all weights; auto is full for small networks, else kfac.
        curvature: as in `Laplace`.
        fisher_samples: as in `Laplace`.
        points: size of a random subset of the training data for the curvature, counted N/points times; None is all.
            Subset and sampled targets are the same in all updates, so that their evidences can be compared.
        keep: end with the weights and precisions of the update with the largest evidence (best), or the last ones.
        low: smallest precision.
        high: largest precision.
    """

    family: Literal["isotropic", "layerwise", "groupwise"] = "layerwise"
    burn_in: int = 0
    frequency: int = 1
    steps: int = 10
    lr: float = 0.1
    structure: TrainingStructure = "kfac"
    curvature: OutputCurvatureKind = "ggn"
    fisher_samples: int = 1
    points: int | None = None
    keep: Literal["best", "last"] = "best"
    low: float = 1e-6
    high: float = 1e8
    needs_validation: ClassVar[bool] = False
    uses_evidence: ClassVar[bool] = False  # after training
    cites: ClassVar[tuple[str, ...]] = ("immer2021evidence",)

    def __post_init__(self) -> None:
        problems = self._evidence.problems()
        problems += [
            f"hyper.{key} must be at least 1; got {value}."
            for key, value in (("frequency", self.frequency), ("steps", self.steps))
            if value < 1
        ]
        if self.burn_in < 0:
            problems.append(f"hyper.burn_in must be 0 or more epochs; got {self.burn_in}.")
        if not 0 < self.lr < math.inf:
            problems.append(f"hyper.lr must be positive and finite; got {self.lr}.")
        if not 0 < self.low < self.high < math.inf:
            problems.append(f"hyper.low and hyper.high must satisfy 0 < low < high; got {self.low} and {self.high}.")
        raise_all(problems)

    @property
    def _evidence(self) -> NetworkEvidence:
        return NetworkEvidence(self.structure, self.curvature, self.fisher_samples, self.points)

    def choose(self, problem: PrecisionProblem) -> Choice:
        """The precisions that training ended with."""
        return replace(Fixed().choose(problem), status="chosen in training")

    def epochs(self, schedule: Schedule) -> int:
        return schedule.epochs

    def lr_at(self, schedule: Schedule, step: int, per_epoch: int) -> float:
        return schedule.lr_at(step, per_epoch)

    def due(self, schedule: Schedule, epoch: int) -> bool:
        past = epoch - self.burn_in
        return epoch == schedule.epochs or (past > 0 and past % self.frequency == 0)

    def restarts(self, schedule: Schedule, epoch: int) -> bool:
        return False

    def update(self, network: Network, task: Task, state: TuningState, epoch: int, seed: int) -> None:
        # One subset and one set of sampled targets for all updates: fresh ones would make the best evidence the
        # luckiest one (LeNet, 500 points, one sample: 50 nats of noise).
        problem = self._evidence.at(network, task, derive_seed(seed, "online"))
        ties = tied(problem, self.family)
        logs, finite = self._climb(problem, ties, state)
        each = logs.exp()[ties]
        precisions = dict(zip(problem.names, each.tolist(), strict=True))
        evidence = float(problem.evidence(logs.exp() if len(logs) == 1 else each))
        state.precisions |= precisions
        state.trace.append(
            {
                "epoch": epoch,
                "evidence_nats": evidence,
                "effective_dimension": float(problem.effective_dimensions(each).sum()),
                "status": "ok" if finite else "not finite",
                **{f"precision/{n}": v for n, v in precisions.items()},
            }
        )
        if self.keep == "best" and evidence > state.best.get("evidence", -math.inf):
            likelihood = network.likelihood
            state.best = {
                "evidence": evidence,
                "parameters": network.parameters,
                "buffers": network.buffers,
                "log_noise": likelihood.log_noise if isinstance(likelihood, Gaussian) else None,
                "precisions": dict(state.precisions),
            }

    def _climb(self, problem: PrecisionProblem, ties: Tensor, state: TuningState) -> tuple[Tensor, bool]:
        """Log λ of the variables after the steps, and whether every gradient was finite (else the steps stop there)."""
        count = int(ties.max()) + 1
        zeros = torch.zeros(count, dtype=torch.float64)
        start = torch.where(problem.start > 0, problem.start, 1.0).clamp(self.low, self.high).log()
        logs = zeros.index_add(0, ties, start) / zeros.index_add(0, ties, torch.ones_like(start))
        adam = Adam([logs], [0.0], fused=False)
        if state.moments:
            adam.state = [m.cpu() for m in state.moments]
        finite = True
        for _ in range(self.steps):
            each = logs.exp()[ties]
            gradient = 0.5 * (problem.effective_dimensions(each) - each * problem.squares(each))
            if not bool(gradient.isfinite().all()):
                finite = False
                break
            adam.step([logs], [-zeros.index_add(0, ties, gradient)], self.lr)
            logs.clamp_(math.log(self.low), math.log(self.high))
        state.moments = adam.state
        return logs, finite

    def outcome(self, trace: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
        best = max(trace, key=lambda row: row["evidence_nats"])
        kept = best if self.keep == "best" else trace[-1]
        notes = []
        if kept is not trace[-1]:
            notes.append(
                f"hyper=online: the weights of epoch {kept['epoch']} of {trace[-1]['epoch']} had the largest evidence "
                f"({kept['evidence_nats']:.1f} nats, {trace[-1]['evidence_nats']:.1f} at the end) and are kept"
            )
        bad = [row["epoch"] for row in trace if row["status"] != "ok"]
        if bad:
            notes.append(f"hyper=online: the evidence had no finite gradient after epochs {bad}; no precision changed")
        ends = [v for k, v in kept.items() if k.startswith("precision/")]
        if any(v <= self.low * 1.001 or v >= self.high * 0.999 for v in ends):
            notes.append("hyper=online: a precision ended at a bound; widen hyper.low or hyper.high, or train longer")
        return f"kept epoch {kept['epoch']}", tuple(notes)
