"""Hamiltonian Monte Carlo of L chains at once, and the adaptation of its step size: pure functions.

Each chain has its own step and number of leapfrogs; a chain that finishes early waits for the others, so
that it moves as it would alone. The mass matrix is diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Target = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [L, P] -> log density [L] (up to a constant) and its gradient [L, P]."""

DIVERGENT = 1000.0
"""Energy error in nats above which a trajectory counts as divergent."""


@dataclass(frozen=True)
class Point:
    """The state of L chains: position and gradient [L, P], log density [L]."""

    position: Tensor
    value: Tensor
    gradient: Tensor

    @staticmethod
    def at(position: Tensor, target: Target) -> Point:
        return Point(position, *target(position))

    def tensors(self) -> dict[str, Tensor]:
        return {"position": self.position, "value": self.value, "gradient": self.gradient}


def leapfrog(
    point: Point, momentum: Tensor, target: Target, step: Tensor, counts: Tensor, inverse_mass: Tensor
) -> tuple[Point, Tensor]:
    """`counts` [L] leapfrogs of size `step` [L] from a point with momentum [L, P]; the end point and momentum."""
    position, gradient, value = point.position, point.gradient, point.value
    most = int(counts.max())
    done = torch.arange(most, device=step.device)[:, None] >= counts
    drifts = torch.where(done, 0, step)
    last = torch.arange(most, device=step.device)[:, None] == counts - 1
    kicks = torch.where(last, drifts / 2, drifts)
    momentum = torch.addcmul(momentum, step[:, None] / 2, gradient)
    for drift, kick in zip(drifts.unsqueeze(-1), kicks.unsqueeze(-1), strict=True):
        position = torch.addcmul(position, drift * inverse_mass, momentum)
        value, gradient = target(position)
        momentum = torch.addcmul(momentum, kick, gradient)
    return Point(position, value, gradient), momentum


@dataclass(frozen=True)
class Transition:
    """A transition of every chain: the new point, the acceptance probability [L], and whether it diverged [L]."""

    point: Point
    acceptance: Tensor
    diverged: Tensor


def transition(
    point: Point,
    target: Target,
    step: Tensor,
    counts: Tensor,
    mass: Tensor,
    noise: Tensor,
    uniform: Tensor,
) -> Transition:
    """One HMC step (Neal 2011, fig. 2): momentum √M z, leapfrogs, accepted with probability min(1, e^−ΔH).

    A trajectory whose energy error is above 1000 nats or NaN is rejected and counted as divergent.
    """
    momentum = mass.sqrt() * noise
    end, final = leapfrog(point, momentum, target, step, counts, 1 / mass)
    energy = 0.5 * (momentum.square() / mass).sum(-1) - point.value
    error = 0.5 * (final.square() / mass).sum(-1) - end.value - energy
    sane = error < DIVERGENT  # false for a NaN too
    acceptance = torch.where(sane, torch.exp(-error.clamp_min(0)), 0)
    take = uniform < acceptance
    rows = take[:, None]
    moved = Point(
        torch.where(rows, end.position, point.position),
        torch.where(take, end.value, point.value),
        torch.where(rows, end.gradient, point.gradient),
    )
    return Transition(moved, acceptance, ~sane)


@dataclass(frozen=True)
class DualAveraging:
    """Each chain's step size, driven to a mean acceptance δ (Hoffman & Gelman 2014, eq. 6, alg. 5); all are [L].

    `averaged` is the step size after warm-up.
    """

    log_step: Tensor
    log_averaged: Tensor
    shortfall: Tensor
    centre: Tensor
    count: int = 0

    @staticmethod
    def start(step: Tensor) -> DualAveraging:
        zero = torch.zeros_like(step)
        return DualAveraging(step.log(), zero, zero, math.log(10) + step.log())

    @property
    def step(self) -> Tensor:
        return self.log_step.exp()

    @property
    def averaged(self) -> Tensor:
        return self.log_averaged.exp() if self.count else self.step

    def updated(
        self, acceptance: Tensor, wanted: float, gamma: float = 0.05, early: float = 10, kappa: float = 0.75
    ) -> DualAveraging:
        m = self.count + 1
        shortfall = (1 - 1 / (m + early)) * self.shortfall + (wanted - acceptance) / (m + early)
        log_step = self.centre - math.sqrt(m) / gamma * shortfall
        weight = m**-kappa
        averaged = weight * log_step + (1 - weight) * self.log_averaged
        return replace(self, log_step=log_step, log_averaged=averaged, shortfall=shortfall, count=m)


def reasonable_step(point: Point, target: Target, mass: Tensor, noise: Tensor, start: float = 0.1) -> Tensor:
    """A step [L] at which one leapfrog is accepted about half the time, by doubling and halving (ibid., alg. 4)."""
    lanes = len(point.value)
    step = torch.full((lanes,), start, dtype=point.position.dtype, device=point.position.device)
    one, never = torch.ones(lanes, dtype=torch.long, device=step.device), torch.full_like(step, 2.0)

    def accepted(step: Tensor) -> Tensor:
        return transition(point, target, step, one, mass, noise, never).acceptance > 0.5

    grow = accepted(step)
    factor = torch.where(grow, 2.0, 0.5).to(step.dtype)
    searching = torch.ones_like(grow)
    for _ in range(60):
        trial = torch.where(searching, step * factor, step)
        crossed = accepted(trial) != grow
        # Growing stops at the last good step, shrinking at the first one.
        step = torch.where(searching & ~(crossed & grow), trial, step)
        searching = searching & ~crossed
        if not bool(searching.any()):
            break
    return step
