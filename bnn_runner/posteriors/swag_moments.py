"""SWAG's collection: training continues from given networks at a constant rate, and moments of the path are kept.

Letters: L lanes (members), P parameters of one network, R deviations kept.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bnn_runner.base import FitContext, Network
from bnn_runner.errors import Interrupted, RunFailed
from bnn_runner.models.likelihoods import Gaussian, MeanVariance, Natural, NoiseRule
from bnn_runner.rng import derive_seed
from bnn_runner.runtime.files import write_torch
from bnn_runner.tasks import Task, TaskSpec
from bnn_runner.training.augmentation import Unchanged
from bnn_runner.training.engine import CHECKPOINT_SECONDS, LaneTrainer
from bnn_runner.training.schedules import Schedule
from bnn_runner.training.state import Lane, TrainingConfig

DIVERGED_NATS = 100.0
"""A batch worse than the best one so far by more than this many nats per point means that the weights diverged."""


@dataclass
class PathMoments:
    """Mean and sum of squared deviations [L, P] of the weights collected (Welford), and the last deviations.

    A deviation is θ_i minus the mean of θ_1 … θ_i, as in Maddox et al. 2019, algorithm 1.
    """

    rank: int
    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros(0))
    squares: Tensor = field(default_factory=lambda: torch.zeros(0))
    deviations: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def collect(self, parameters: Sequence[Tensor]) -> None:
        """Add the current weights."""
        flat = torch.cat([p.detach().reshape(len(p), -1) for p in parameters], dim=1)
        if self.count == 0:
            self.mean, self.squares = torch.zeros_like(flat), torch.zeros_like(flat)
        self.count += 1
        before = flat - self.mean
        self.mean.add_(before, alpha=1 / self.count)
        after = flat.sub_(self.mean)  # in place: fresh memory costs more than the sums
        self.squares.addcmul_(before, after)
        if self.rank:
            self.deviations = [*self.deviations, after][-self.rank :]

    def payload(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("rank", "count", "mean", "squares", "deviations")}

    def lane(self, i: int) -> PathMoments:
        """The moments of one lane, [P]."""
        return PathMoments(self.rank, self.count, self.mean[i], self.squares[i], [d[i] for d in self.deviations])


@dataclass(frozen=True)
class Phase:
    """`epochs` of SGD at constant `lr`; weights are collected after every `every` epochs."""

    epochs: int
    every: int
    lr: float
    momentum: float
    rank: int


@dataclass(frozen=True)
class _Same:
    """Model and prior of a network whose training continues: its own architecture and precisions."""

    network: Network

    def problems(self, spec: TaskSpec) -> list[str]:
        return []

    def build(self, spec: TaskSpec) -> nn.Module:
        module = self.network.module
        # Tensors computed from parameters (by `nn.utils.weight_norm`'s hook, before each pass) cannot be copied.
        computed = [t for m in module.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
        return copy.deepcopy(module, {id(t): t.detach().clone() for t in computed}).requires_grad_()

    def precisions(self, module: nn.Module) -> dict[str, float]:
        return dict(self.network.prior_precision)


def collect(task: Task, networks: Sequence[Network], phase: Phase, context: FitContext) -> list[PathMoments]:
    """The moments of every network's path: all at once where networks stack, else one after the other.

    Images are augmented as in training, and the networks' regression noise is kept. The state is saved in
    `context.checkpoint`, from which an interrupted collection resumes.

    Raises:
        RunFailed: the weights diverge.
    """
    members = list(enumerate(networks))
    group = _group(task, members, phase, context)
    parts = [members]
    if group.strategy == "loop":
        parts = [[member] for member in members]
    saved = _load(context.checkpoint, group.device)
    done = [PathMoments(**payload) for payload in saved.get("done", [])]
    for part in parts[len(done) :]:
        if len(parts) > 1:
            group = _group(task, part, phase, context)
        moments = PathMoments(phase.rank)
        if "moments" in saved and group.state.restore(saved["state"]):
            moments = PathMoments(**saved["moments"])
        saved = {}
        _run(group, moments, phase, context, done, len(parts))
        done.append(moments)
    return [moments.lane(i) for moments in done for i in range(len(moments.mean))]


def _noise_of(network: Network) -> NoiseRule:
    """A noise rule of the network's own form that keeps the noise (whose level is set afterwards)."""
    if isinstance(network.likelihood, MeanVariance):
        return NoiseRule(form="mean_variance")
    return NoiseRule(form="natural") if isinstance(network.likelihood, Natural) else NoiseRule("fixed", 1.0)


def _group(task: Task, members: Sequence[tuple[int, Network]], phase: Phase, context: FitContext) -> LaneTrainer:
    """The training engine at the networks' weights, with the phase as its schedule."""
    networks = [network for _, network in members]
    like = next(iter(networks[0].parameters.values()))
    config = TrainingConfig(
        model=_Same(networks[0]),
        schedule=Schedule(
            "sgd",
            phase.epochs,
            context.schedule.batch_size,
            phase.lr,
            "constant",
            momentum=phase.momentum,
            nesterov=False,
        ),
        prior=_Same(networks[0]),
        noise=_noise_of(networks[0]),
        dtype=like.dtype,
        augment=context.augment or Unchanged(),
    )
    lanes = [Lane(task, derive_seed(context.seed, "swag", i)) for i, _ in members]
    group = LaneTrainer(config, lanes, like.device)
    state = group.state
    with torch.no_grad():
        for name, p in state.parameters.items():
            p.copy_(torch.stack([n.parameters[name] for n in networks]))
        for name, b in state.buffers.items():
            b.copy_(torch.stack([n.buffers[name] for n in networks]))
        if state.log_noise is not None:
            rows = [n.likelihood.log_noise for n in networks if isinstance(n.likelihood, Gaussian)]
            state.log_noise.copy_(torch.stack(rows))
    return group


def _run(
    group: LaneTrainer, moments: PathMoments, phase: Phase, context: FitContext, done: Sequence[PathMoments], parts: int
) -> None:
    """Train one part to the end of the phase, and collect weights during it."""
    state, per_epoch = group.state, len(group.bounds)
    between, every_step = per_epoch * phase.every, group.device.type == "cpu"
    total, last_saved = group.total_steps, time.perf_counter()
    lowest = torch.full((len(group.lanes),), torch.inf, device=group.device)

    def save() -> None:
        if context.checkpoint is not None:
            payload = {
                "done": [m.payload() for m in done],
                "moments": moments.payload(),
                "state": state.payload(),
            }
            write_torch(context.checkpoint, payload)

    with group.training_mode():
        while state.step < total:
            nll = group.advance()
            lowest = torch.minimum(lowest, nll)
            due = state.step % between == 0
            if (every_step or due) and not bool((nll < lowest + DIVERGED_NATS).all()):
                worst = int((nll - lowest).nan_to_num(torch.inf).argmax())
                raise RunFailed(
                    f"SWAG's collection diverged: by step {state.step} the loss of a batch rose from "
                    f"{float(lowest[worst]):.4g} to {float(nll[worst]):.4g} nats per point. Lower method.lr "
                    f"(now {phase.lr:.3g})."
                )
            if due:
                moments.collect(list(state.parameters.values()))
            try:
                context.progress("collecting", len(done) * total + state.step, parts * total)
            except Interrupted:
                save()
                raise
            if state.step % per_epoch == 0 and time.perf_counter() - last_saved > CHECKPOINT_SECONDS:
                save()
                last_saved = time.perf_counter()
    if not bool(torch.isfinite(moments.squares).all()):
        raise RunFailed(
            f"SWAG's collection diverged: weights became infinite or NaN. Lower method.lr (now {phase.lr:g})."
        )


def _load(checkpoint: Path | None, device: torch.device) -> dict[str, Any]:
    """The state that an interrupted collection saved, or an empty mapping."""
    if checkpoint is None:
        return {}
    try:
        saved: dict[str, Any] = torch.load(checkpoint, map_location=device, weights_only=True)
        return saved if {"done", "moments", "state"} <= saved.keys() else {}
    except Exception:  # missing or unreadable: start again
        return {}
