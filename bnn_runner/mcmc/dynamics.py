"""One step of each stochastic-gradient dynamics: pure functions of state, gradient, step and noise.

All shapes are [L, P]: L chains, P weights. `gradient` estimates ∇ log π(w), `noise` is standard
normal, `step` is ε, `temperature` T targets π^(1/T). A step without noise (`temperature=0`) is the
optimiser that the dynamics become.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChainState:
    """Weights of L chains, with the momentum or the mean squared gradient that some dynamics carry."""

    position: Tensor
    momentum: Tensor
    square: Tensor

    @staticmethod
    def at(position: Tensor, square: Tensor | None = None) -> ChainState:
        """At rest; `square` is the first mean squared gradient, for `preconditioned`."""
        return ChainState(
            position, torch.zeros_like(position), torch.zeros_like(position) if square is None else square
        )

    def tensors(self) -> dict[str, Tensor]:
        return {"position": self.position, "momentum": self.momentum, "square": self.square}


def langevin(state: ChainState, gradient: Tensor, step: float, temperature: float, noise: Tensor) -> ChainState:
    """SGLD (Welling & Teh 2011, eq. 4): w + (ε/2) ∇ log π + √(εT) z.

    At a Gaussian of precision λ the stationary variance is T λ⁻¹ / (1 − ελ/4). On the mean objective
    (DESIGN §7) it is gradient descent of learning rate εN/2 with noise added.
    """
    moved = state.position.add(gradient, alpha=step / 2)
    return replace(state, position=moved.add_(noise, alpha=math.sqrt(step * temperature)))


def preconditioned(
    state: ChainState,
    gradient: Tensor,
    step: float,
    temperature: float,
    noise: Tensor,
    num_points: int,
    decay: float,
    floor: float,
) -> ChainState:
    """PSGLD (Li et al. 2016, alg. 1): w + (ε/2) G ∇ log π + √(εTG) z, G = 1 / (floor + √V).

    V is the running mean (`decay`) of the squared gradient of the mean objective, ∇ log π / N. The
    correction Γ = ∇·G is dropped, as in the authors' code: where V varies along the chain the
    stationary law is biased by it.
    """
    square = state.square.lerp((gradient / num_points).square(), 1 - decay)
    scale = 1 / (floor + square.sqrt())
    moved = state.position + (step / 2) * scale * gradient + (step * temperature * scale).sqrt() * noise
    return replace(state, position=moved, square=square)


def hamiltonian(
    state: ChainState,
    gradient: Tensor,
    step: float,
    temperature: float,
    noise: Tensor,
    friction: float,
    gradient_variance: float = 0.0,
) -> ChainState:
    """SGHMC (Chen et al. 2014, eq. 15): v ← (1 − α) v + η ∇ log π + √(2(α − β̂)ηT) z, then w ← w + v.

    η is `step`, α `friction`, β̂ = ηV/2 with V = `gradient_variance`, the known variance of the
    gradient's own noise (0: not corrected for). It is SGD of momentum 1 − α and learning rate ηN on
    the mean objective, with noise; at small steps it moves as SGLD of step 2η/α.
    """
    room = max(0.0, friction * temperature - step * gradient_variance / 2)
    momentum = state.momentum * (1 - friction) + step * gradient + math.sqrt(2 * room * step) * noise
    return replace(state, position=state.position + momentum, momentum=momentum)
