"""`hyper=mackay_loop`: train, fit, re-estimate the precisions, train on under them, until they converge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from bnn_runner.base import Choice, Network, PrecisionProblem
from bnn_runner.curvature.output_curvature import OutputCurvatureKind
from bnn_runner.curvature.structures import TrainingStructure
from bnn_runner.errors import raise_all
from bnn_runner.hyper.fixed import Fixed
from bnn_runner.hyper.fixed_point import FixedPoint
from bnn_runner.hyper.tied_precisions import tolerance_problems
from bnn_runner.hyper.training_rule import TuningState
from bnn_runner.marglik.network_evidence import NetworkEvidence
from bnn_runner.rng import derive_seed
from bnn_runner.tasks import Task
from bnn_runner.training.schedules import Schedule


@dataclass(frozen=True)
class MacKayLoop:
    """Rounds of training to the end of the schedule, then MacKay's fixed point at the weights (MacKay 1992).

    A round starts at the weights of the last one, with a new optimiser and the schedule's learning rates. The
    precisions are the fixed point λ_g = γ_g / ‖w_g‖² under the curvature at the round's weights. Where the loop
    converges and training reaches the optimum, λ and w are the joint optimum of the evidence. Cost: up to
    `rounds` trainings.

    Attributes:
        family: one λ (isotropic), one per parameter tensor (layerwise), or one for each scale-invariant tensor and
            one for all others (groupwise).
        rounds: most trainings.
        retrain_epochs: epochs of every round after the first; None is the schedule's number.
        tolerance: change of log λ from round to round at which the loop ends.
        structure: of the curvature in the loop, over all weights; auto is full for small networks, else kfac.
        curvature: as in `Laplace`.
        fisher_samples: as in `Laplace`.
        low: smallest precision.
        high: largest precision.
    """

    family: Literal["isotropic", "layerwise", "groupwise"] = "isotropic"
    rounds: int = 10
    retrain_epochs: int | None = None
    tolerance: float = 0.01
    structure: TrainingStructure = "auto"
    curvature: OutputCurvatureKind = "ggn"
    fisher_samples: int = 1
    low: float = 1e-6
    high: float = 1e8
    needs_validation: ClassVar[bool] = False
    uses_evidence: ClassVar[bool] = False  # after training
    cites: ClassVar[tuple[str, ...]] = ("mackay1992",)

    def __post_init__(self) -> None:
        problems = self._evidence.problems()
        if self.rounds < 1:
            problems.append(f"hyper.rounds must be at least 1; got {self.rounds}.")
        if self.retrain_epochs is not None and self.retrain_epochs < 1:
            problems.append(f"hyper.retrain_epochs must be at least 1, or null; got {self.retrain_epochs}.")
        problems += tolerance_problems(self.tolerance)
        raise_all(problems)
        self._fixed_point()  # refuses bounds that leave no room

    @property
    def _evidence(self) -> NetworkEvidence:
        return NetworkEvidence(self.structure, self.curvature, self.fisher_samples)

    def _fixed_point(self) -> FixedPoint:
        """With a few steps: the next round continues from there."""
        return FixedPoint(family=self.family, steps=20, tolerance=self.tolerance / 10, low=self.low, high=self.high)

    def choose(self, problem: PrecisionProblem) -> Choice:
        """The precisions that training ended with."""
        return replace(Fixed().choose(problem), status="chosen in training")

    def _retraining(self, schedule: Schedule) -> Schedule:
        epochs = self.retrain_epochs or schedule.epochs
        return replace(schedule, epochs=epochs, warmup_epochs=min(schedule.warmup_epochs, epochs))

    def epochs(self, schedule: Schedule) -> int:
        return schedule.epochs + (self.rounds - 1) * self._retraining(schedule).epochs

    def lr_at(self, schedule: Schedule, step: int, per_epoch: int) -> float:
        first = schedule.epochs * per_epoch
        if step < first:
            return schedule.lr_at(step, per_epoch)
        again = self._retraining(schedule)
        return again.lr_at((step - first) % (again.epochs * per_epoch), per_epoch)

    def due(self, schedule: Schedule, epoch: int) -> bool:
        return epoch >= schedule.epochs and (epoch - schedule.epochs) % self._retraining(schedule).epochs == 0

    def restarts(self, schedule: Schedule, epoch: int) -> bool:
        return self.due(schedule, epoch)

    def update(self, network: Network, task: Task, state: TuningState, epoch: int, seed: int) -> None:
        round_number = len(state.trace) + 1
        problem = self._evidence.at(network, task, derive_seed(seed, "mackay loop", round_number))
        choice = self._fixed_point().resume(problem)
        chosen = choice.precisions
        before = problem.start.clamp_min(self.low)  # a training prior of 0 has no logarithm
        move = float((chosen / before).log().abs().max())
        state.precisions |= dict(zip(problem.names, chosen.tolist(), strict=True))
        state.converged = move <= self.tolerance
        one = bool((chosen == chosen[0]).all())
        state.trace.append(
            {
                "round": round_number,
                "epoch": epoch,
                "evidence_nats": float(problem.evidence(chosen[:1] if one else chosen)),
                "effective_dimension": float(problem.effective_dimensions(chosen).sum()),
                "largest_move": move,
                "status": choice.status,
                **{f"precision/{n}": v for n, v in zip(problem.names, chosen.tolist(), strict=True)},
            }
        )

    def outcome(self, trace: Sequence[Mapping[str, Any]]) -> tuple[str, tuple[str, ...]]:
        last = trace[-1]
        notes = []
        if last["status"] != "converged":
            notes.append(
                f"hyper=mackay_loop: the fixed point of the last round ended as '{last['status']}': the evidence has "
                "no maximum in some precision there, or it was not reached; precisions that ran away are held"
            )
        if last["largest_move"] > self.tolerance:
            notes.append(
                f"hyper=mackay_loop: after {len(trace)} rounds log λ still changes by {last['largest_move']:.2g}; "
                "raise hyper.rounds, or train longer"
            )
            return "not converged", tuple(notes)
        return last["status"], tuple(notes)
