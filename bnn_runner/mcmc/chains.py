"""Running chains: the loop over steps, which draws are kept, and resuming after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from bnn_runner.errors import RunFailed
from bnn_runner.mcmc.checkpoint import Checkpoint
from bnn_runner.mcmc.dynamics import ChainState
from bnn_runner.mcmc.hamiltonian import DualAveraging, Point, Target, reasonable_step, transition
from bnn_runner.mcmc.noise import ChainNoise
from bnn_runner.mcmc.steps import StepSizes
from bnn_runner.rng import generator
from bnn_runner.runtime.console import Progress
from bnn_runner.tasks import Split
from bnn_runner.training.engine import batch_bounds

Dynamics = Callable[[ChainState, Tensor, float, float, Tensor], ChainState]
"""(state, gradient, step, temperature, noise) -> state."""

CHECK_EVERY = 20


class Gradients(Protocol):
    """Estimates of the log density [L] and its gradient [L, P] at step t."""

    def __call__(self, position: Tensor, t: int) -> tuple[Tensor, Tensor]: ...


class ChainBatches:
    """Minibatches for L chains, each in its own order of the clean training set; every point once per epoch."""

    def __init__(self, split: Split, seeds: Sequence[int], batch_size: int) -> None:
        self.split, self.seeds = split, tuple(seeds)
        self.bounds = batch_bounds(len(split), min(batch_size, len(split)))
        self._orders: tuple[int, Tensor] | None = None

    def at(self, t: int) -> tuple[Tensor, Tensor]:
        """Inputs [L, B, ...] and targets of step t."""
        epoch, place = divmod(t, len(self.bounds))
        if self._orders is None or self._orders[0] != epoch:
            rows = [torch.randperm(len(self.split), generator=generator(s, "order", epoch)) for s in self.seeds]
            self._orders = epoch, torch.stack(rows).to(self.split.inputs.device)
        begin, end = self.bounds[place]
        x, y = self.split.gather(self._orders[1][:, begin:end])
        assert y is not None
        return x, y


@dataclass(frozen=True)
class Chains:
    """The draws that are kept: weights [L, M, P] and estimates of the log density [L, M]."""

    weights: Tensor
    values: Tensor


def run_stochastic(
    gradients: Gradients,
    dynamics: Dynamics,
    start: ChainState,
    steps: StepSizes,
    kept: Sequence[int],
    total: int,
    temperature: float,
    seeds: Sequence[int],
    checkpoint: Checkpoint,
    progress: Progress = lambda stage, done, total: None,
    advice: str = "",
) -> Chains:
    """Run L chains; the weights after each step of `kept` are the draws.

    Interrupted through `progress`, it saves a checkpoint from which the same call resumes, with the same draws.

    Args:
        gradients: of the log density.
        dynamics: one step of the chains.
        start: state of the chains before the first step.
        steps: step sizes.
        kept: steps whose weights are draws, ascending.
        total: number of steps.
        temperature: of the target.
        seeds: one per chain.
        checkpoint: of the state.
        progress: called as progress(stage, done, total).
        advice: what the message of a failure says first.

    Raises:
        RunFailed: weights are not finite.
    """
    state, position = start, start.position
    lanes, size = position.shape
    weights = position.new_empty(lanes, len(kept), size)
    values = position.new_empty(lanes, len(kept))
    first, stored = 0, 0
    if (saved := checkpoint.load(position.device)) is not None:
        state, first, stored = ChainState(**saved["state"]), saved["t"], saved["weights"].shape[1]
        weights[:, :stored], values[:, :stored] = saved["weights"], saved["values"]
    noise = ChainNoise(seeds, "chain noise", size, position.dtype, position.device)
    t = first

    def current() -> dict[str, Any]:
        return {"t": t, "state": state.tensors(), "weights": weights[:, :stored], "values": values[:, :stored]}

    for t in range(first, total):
        checkpoint.tick(current, partial(progress, "sampling", t, total))
        value, gradient = gradients(state.position, t)
        state = dynamics(state, gradient, steps.at(t), temperature if steps.noisy(t) else 0.0, noise.at(t))
        keep = stored < len(kept) and kept[stored] == t
        if keep:
            weights[:, stored], values[:, stored] = state.position, value
            stored += 1
        if keep or t % CHECK_EVERY == 0:
            _check_finite(state.position, t, total, steps.at(t), advice)
    progress("sampling", total, total)
    return Chains(weights, values)


def _check_finite(position: Tensor, t: int, total: int, step: float, advice: str) -> None:
    finite = torch.isfinite(position).all(-1)
    if not bool(finite.all()):
        bad = int((~finite).nonzero()[0])
        raise RunFailed(
            f"chain {bad} diverged: its weights are no longer finite at step {t + 1} of {total}, with step size "
            f"{step:.3g}. {advice}Lower method.step, for example to a tenth of that."
        )


@dataclass(frozen=True)
class HamiltonianRun:
    """Draws [L, M, P] with log densities [L, M], and per chain [L]: acceptance, divergences, step, mean leapfrogs."""

    chains: Chains
    acceptance: Tensor
    divergences: Tensor
    step: Tensor
    leapfrogs: Tensor


def run_hamiltonian(
    target: Target,
    start: Tensor,
    mass: Tensor,
    warmup: int,
    draws: int,
    thinning: int,
    trajectory: float,
    jitter: float,
    most_leapfrogs: int,
    wanted: float,
    seeds: Sequence[int],
    checkpoint: Checkpoint,
    progress: Progress = lambda stage, done, total: None,
) -> HamiltonianRun:
    """`warmup` transitions that adapt the step sizes, then every `thinning`-th of draws × thinning transitions.

    Args:
        target: log density and gradient.
        start: positions [L, P].
        mass: diagonal of the mass matrix, [P].
        warmup: number of adapting transitions.
        draws: per chain.
        thinning: transitions per draw.
        trajectory: mean length, in units of the mass's inverse root; it is shortened where it could take more than
            `most_leapfrogs` steps.
        jitter: lengths are trajectory · (1 ± jitter).
        most_leapfrogs: per transition.
        wanted: mean acceptance probability that the step sizes are adapted to.
        seeds: one per chain.
        checkpoint: of the state.
        progress: called as progress(stage, done, total).

    Raises:
        RunFailed: the log density is not finite at a start.
    """
    lanes, size = start.shape
    noise = ChainNoise(seeds, "hmc momentum", size, start.dtype, start.device)
    point = Point.at(start, target)
    if not bool(torch.isfinite(point.value).all()):
        raise RunFailed("the log posterior must be finite where a chain starts, but is not. Use another method.start.")
    total = warmup + draws * thinning
    weights, values = start.new_empty(lanes, draws, size), start.new_empty(lanes, draws)
    tallies = start.new_zeros(3, lanes)  # of the transitions after warm-up: acceptance, divergences, leapfrogs
    first = stored = 0
    if (saved := checkpoint.load(start.device)) is not None:
        point, tallies, first = Point(**saved["point"]), saved["tallies"], saved["t"]
        adapted, stored = DualAveraging(**saved["adapted"]), saved["weights"].shape[1]
        weights[:, :stored], values[:, :stored] = saved["weights"], saved["values"]
    else:
        adapted = DualAveraging.start(reasonable_step(point, target, mass, noise.at(total)))
    t = first

    def current() -> dict[str, Any]:
        so_far = {"weights": weights[:, :stored], "values": values[:, :stored], "tallies": tallies}
        return {"t": t, "point": point.tensors(), "adapted": vars(adapted), **so_far}

    for t in range(first, total):
        checkpoint.tick(current, partial(progress, "sampling", t, total))
        step = adapted.step if t < warmup else adapted.averaged
        random = torch.stack([torch.rand(2, generator=generator(s, "hmc", t), dtype=start.dtype) for s in seeds], 1)
        shift, uniform = random.to(start.device)
        # A shortened length is jittered too: with one fixed length, a direction may always turn by a whole period.
        longest = (most_leapfrogs * step / (1 + jitter)).clamp(max=trajectory)
        length = longest * (1 + jitter * (2 * shift - 1))
        counts = (length / step).ceil().clamp(1, most_leapfrogs).long()
        moved = transition(point, target, step, counts, mass, noise.at(t), uniform)
        point = moved.point
        if t < warmup:
            adapted = adapted.updated(moved.acceptance, wanted)
            continue
        tallies = tallies + torch.stack([moved.acceptance, moved.diverged.to(start.dtype), counts.to(start.dtype)])
        if (t - warmup + 1) % thinning == 0:
            weights[:, stored], values[:, stored] = point.position, point.value
            stored += 1
    progress("sampling", total, total)
    after = max(1, draws * thinning)
    return HamiltonianRun(
        Chains(weights, values), tallies[0] / after, tallies[1].long(), adapted.averaged, tallies[2] / after
    )
