"""J diag(s)² Jᵀ at each point, for a weight matrix whose Jacobian is a sum over positions.

Letters: B points, C directions of the outputs, T positions, a weight of o × d numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bnn_runner.curvature.jacobian_forms import FLOATS_AT_ONCE, FLOATS_CACHED, OuterProductJacobian, TensorJacobian

FRESH = 100
"""Products that cost as much as writing a number to fresh memory and reading it again."""


def weighted_gram(jacobian: OuterProductJacobian, scale: Tensor) -> Tensor:
    """Σ_od J_cod J_kod s_od² at each point, [B, C, C], for `scale` s [o, d].

    In the order of sums that needs less work. One position: Σ_o g_co g_ko Σ_d s² a². Few positions and
    many directions: each pair of positions is summed over d first, Σ_{t,t'} Σ_o g_cot g_kot' (Σ_d s² a_dt a_dt'),
    about o d T² products per point, and no array of the Jacobian's size. Otherwise the Jacobian itself, C o d (T + C).
    """
    if (pair := one_position(jacobian)) is not None:
        a, g = pair
        return (g * (a.square() @ scale.square().T).unsqueeze(1)) @ g.mT
    c, o, t = jacobian.grads.shape[1:]
    if by_pairs(t, o, jacobian.read.shape[1], c):
        weight = scale.square()
        return torch.stack([_of_pairs(a, g, weight) for a, g in zip(jacobian.inputs, jacobian.grads, strict=True)])
    return torch.cat([outer(piece.dense() * scale.flatten()) for piece in few_at_once(jacobian)])


def by_pairs(positions: int, outputs: int, inputs: int, directions: int) -> bool:
    """Whether pairs of positions need less work than the dense Jacobian."""
    t, o, d, c = positions, outputs, inputs, directions
    return o * t * (0.625 * d * t + c * t + c * c) < c * o * d * (t + c + FRESH)


def _of_pairs(a: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    """One point's [C, C] from a [d, T], g [C, o, T] and s² [o, d]; of pairs (t, t') and (t', t) one is computed."""
    (d, t), (c, o, _) = a.shape, g.shape
    total = g.new_zeros(c, c)
    by_output = g.transpose(0, 1)
    step = min(max(1, FLOATS_AT_ONCE // (d * t)), -(-t // 4))
    for i in range(0, t, step):
        here = a[:, i : i + step]
        pairs = here.unsqueeze(2) * a[:, i:].unsqueeze(1)
        pairs[:, :, step:] *= 2  # for the pairs in reverse order
        met = (weight @ pairs.reshape(d, -1)).reshape(o, here.shape[1], t - i)
        moved = torch.bmm(by_output[..., i : i + step], met)
        total += moved.transpose(0, 1).reshape(c, -1) @ g[..., i:].reshape(c, -1).T
    return (total + total.T) / 2


def outer(half: Tensor) -> Tensor:
    """From [B, C, P] to [B, C, C]: the product over P at each point."""
    return half @ half.mT


def few_at_once(jacobian: OuterProductJacobian) -> Iterator[OuterProductJacobian]:
    """The Jacobian a few points at a time, so that the dense form of each piece stays small."""
    points = max(1, FLOATS_CACHED // (jacobian.size * jacobian.grads.shape[1]))
    for a, g in zip(jacobian.inputs.split(points), jacobian.grads.split(points), strict=True):
        yield OuterProductJacobian(a, g)


def one_position(jacobian: TensorJacobian) -> tuple[Tensor, Tensor] | None:
    """Inputs [B, d] and derivatives [B, C, o] of a factored Jacobian with T = 1; None for others."""
    if isinstance(jacobian, OuterProductJacobian) and jacobian.read.shape[-1] == 1:
        return jacobian.inputs[..., 0], jacobian.grads[..., 0]
    return None
