"""Step sizes along a chain, and which steps may give draws."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class StepSizes(Protocol):
    """ε of every step, and at which steps the chain samples rather than explores."""

    def at(self, t: int) -> float:
        """ε of step t, counted from 0."""
        ...

    def samples(self, t: int) -> bool:
        """Whether a draw may be kept after step t."""
        ...

    def noisy(self, t: int) -> bool:
        """Whether noise is added in step t; without it the chain moves like an optimiser."""
        ...

    def log_weight(self, t: int) -> float:
        """Log weight of a draw kept after step t."""
        ...


@dataclass(frozen=True)
class Polynomial:
    """ε_t = a (b + t)^−γ from `first` (t = 0) to `last` (t = total − 1) (Welling & Teh 2011, §4.1).

    A draw is weighted by the time of its step (eq. 11 there), log weight `power` · log ε: power 1 for
    Langevin dynamics, ½ for Hamiltonian, whose time step is √η.

    >>> steps = Polynomial(0.01, 0.0001, 0.55, 1_000_000)
    >>> round(steps.b, 2), round(steps.a, 4)
    (231.07, 0.1996)
    """

    first: float
    last: float
    gamma: float
    total: int
    power: float = 1.0

    @property
    def b(self) -> float:
        """First / last = ((b + total − 1) / b)^γ; infinite for a constant step."""
        ratio = (self.first / self.last) ** (1 / self.gamma)
        return (self.total - 1) / (ratio - 1) if ratio > 1 and self.total > 1 else math.inf

    @property
    def a(self) -> float:
        return self.first * self.b**self.gamma

    def at(self, t: int) -> float:
        return self.first if math.isinf(self.b) else self.first * (1 + t / self.b) ** -self.gamma

    def samples(self, t: int) -> bool:
        return True

    def noisy(self, t: int) -> bool:
        return True

    def log_weight(self, t: int) -> float:
        return self.power * math.log(self.at(t))


@dataclass(frozen=True)
class Cyclical:
    """ε_t = first/2 · (cos(π (t mod C)/C) + 1), C = ⌈total/cycles⌉ (Zhang et al. 2020, eq. 1).

    The first `explore` share of each cycle gives no draws, and moves without noise (an optimiser that
    leaves the mode) unless `explore_noise`; the rest samples. All draws have the same weight, as there.
    """

    first: float
    cycles: int
    total: int
    explore: float
    explore_noise: bool = False

    @property
    def length(self) -> int:
        return math.ceil(self.total / self.cycles)

    def at(self, t: int) -> float:
        return self.first / 2 * (math.cos(math.pi * (t % self.length) / self.length) + 1)

    def samples(self, t: int) -> bool:
        return t % self.length >= self.explore * self.length

    def noisy(self, t: int) -> bool:
        return self.explore_noise or self.samples(t)

    def log_weight(self, t: int) -> float:
        return 0.0


def evenly_kept(steps: StepSizes, first: int, total: int, count: int) -> list[int]:
    """`count` steps (or all there are), evenly among those from `first` on after which a draw may be kept."""
    eligible = [t for t in range(first, total) if steps.samples(t)]
    count = min(count, len(eligible))
    return [eligible[(j + 1) * len(eligible) // count - 1] for j in range(count)]
