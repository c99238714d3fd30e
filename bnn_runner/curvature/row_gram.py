"""J V Jᵀ between all points, for one parameter tensor at a time: the Gram matrix of the rows of a curvature.

Letters: N points, C directions of the outputs, M = N·C rows, T positions, a weight of o × d numbers, V a diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bnn_runner.curvature.jacobian_forms import DenseJacobian, OuterProductJacobian, TensorJacobian

COLUMNS = 8192
"""Columns of the Jacobian that are formed at once."""


def smaller(jacobian: TensorJacobian) -> TensorJacobian:
    """The same Jacobian in the form that takes less memory."""
    if isinstance(jacobian, OuterProductJacobian):
        _, c, o, t = jacobian.grads.shape
        d = jacobian.read.shape[1]
        return jacobian if (c * o + d) * t < c * o * d else DenseJacobian(jacobian.dense())
    return DenseJacobian(jacobian.dense())


def kept_floats(outputs: int, inputs: int, positions: int, directions: int) -> int:
    """Numbers per point of `smaller`, for a weight matrix at T positions (0 where it has no positions)."""
    dense = directions * outputs * inputs
    return min(dense, (directions * outputs + inputs) * positions) if positions else dense


def add_row_gram(gram: Tensor, pieces: Sequence[TensorJacobian], variances: Tensor) -> None:
    """Add J V Jᵀ of one tensor to the lower triangle of `gram` [M, M] (and to parts of the upper one).

    Args:
        gram: float64.
        pieces: the Jacobians of one batch after the other, all of one form.
        variances: the diagonal of V, [P_t].
    """
    first = pieces[0]
    if isinstance(first, OuterProductJacobian):
        read = torch.cat([j.inputs for j in pieces if isinstance(j, OuterProductJacobian)])
        grads = torch.cat([j.grads for j in pieces if isinstance(j, OuterProductJacobian)])
        (n, c, o, t), d = grads.shape, read.shape[1]
        even = bool((variances == variances[0]).all())
        if even and t * t * (d + c * o) + c * c * o * t < c * c * o * d:
            _by_positions(gram, read, grads, float(variances[0]))
        else:
            each = variances.view(o, d).sqrt().to(grads)
            step = max(1, COLUMNS // d)
            for i in range(0, o, step):
                part = torch.bmm(grads[:, :, i : i + step].reshape(n, -1, t), read.mT).view(n * c, -1, d)
                _add(gram, (part * each[i : i + step]).flatten(1))
        return
    rows = torch.cat([j.dense().flatten(0, 1) for j in pieces])
    for i in range(0, rows.shape[1], COLUMNS):
        _add(gram, rows[:, i : i + COLUMNS] * variances[i : i + COLUMNS].sqrt().to(rows))


def _add(gram: Tensor, rows: Tensor, block: int = 512) -> None:
    for i in range(0, len(rows), block):
        end = i + block
        gram[i:end, :end] += rows[i:end] @ rows[:end].T


def _by_positions(gram: Tensor, read: Tensor, grads: Tensor, variance: float) -> None:
    """Σ_{t,t'} (a_t·a'_t') (g_t·g'_t') between point n and every point before it, where positions are few.

    About T² (d + C o) + C² o T products for each pair of points, where the dense rows take C² o d.
    """
    n, c, o, t = grads.shape
    flat = read.transpose(1, 2)  # [N, T, d]
    for i in range(n):
        before = i + 1
        met = (flat[:before].reshape(before * t, -1) @ read[i]).view(before, t, t)  # [m, t of m, t of i]
        moved = torch.bmm(grads[:before].reshape(before, c * o, t), met).view(before * c, o * t)
        rows = slice(i * c, (i + 1) * c)
        gram[rows, : before * c] += variance * (grads[i].reshape(c, o * t) @ moved.T)
