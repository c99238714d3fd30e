"""H = Σ_n J_nᵀ J_n of a network of linear layers, summed layer pair by layer pair without the rows of J.

With one position per layer the Jacobian of direction c is g_c aᵀ, so that the block of two layers is

    H_ij = Σ_n (Σ_c g_ic g_jcᵀ) ⊗ (a_i a_jᵀ),

P_i P_j products per point where the rows of J take C P_i P_j.

Letters: B points, C directions, a weight of o × d numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.curvature.jacobian_forms import FLOATS_AT_ONCE, DenseJacobian, TensorJacobian
from bnn_runner.curvature.psd import wide
from bnn_runner.curvature.weighted_gram import FRESH, one_position


@dataclass(frozen=True)
class Piece:
    """One tensor's place in H and its factors at a batch: inputs a [B, d], derivatives g [B, C, o]."""

    first: int
    inputs: Tensor
    grads: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs d and outputs o."""
        return self.inputs.shape[1], self.grads.shape[2]

    @property
    def size(self) -> int:
        return self.inputs.shape[1] * self.grads.shape[2]


def pieces_of(tensors: Mapping[str, TensorJacobian]) -> list[Piece]:
    """Every tensor's factors, float64. One without factors (a bias, a convolution) is a layer with the input 1."""
    made, first = [], 0
    for jacobian in tensors.values():
        if (pair := one_position(jacobian)) is None:
            grads = jacobian.dense()
            pair = grads.new_ones(len(grads), 1), grads
        made.append(Piece(first, *map(wide, pair)))
        first += jacobian.size
    return made


def pays(jacobians: Iterable[TensorJacobian]) -> bool:
    """Whether pairs of layers need less work than the rows of J, of whose products symmetry saves half.

    At each point all pairs of outputs are summed over directions into fresh memory; the rest is P²/2 products.
    """
    outputs = size = directions = 0
    for jacobian in jacobians:
        factored = one_position(jacobian) is not None
        grads = jacobian.values if isinstance(jacobian, DenseJacobian) else jacobian.grads
        outputs += grads.shape[2] if factored else jacobian.size
        size, directions = size + jacobian.size, grads.shape[1]
    return outputs**2 * (directions + FRESH) < (directions - 1) * size**2


class PairSums:
    """Running sums, one matrix [o_i o_j, d_i d_j] per pair of tensors i ≥ j (for i = j the lower half of o, o')."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], Tensor] = {}
        self._pieces: list[Piece] = []

    @property
    def empty(self) -> bool:
        return not self._sums

    def add(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        for i, left in enumerate(pieces):
            for j, right in enumerate(pieces[: i + 1]):
                self._add(i, j, left, right)

    def _add(self, i: int, j: int, left: Piece, right: Piece) -> None:
        (d, o), (e, p) = left.shape, right.shape
        step = max(1, FLOATS_AT_ONCE // max(o * p, d * e))
        for b in range(0, len(left.inputs), step):
            part = slice(b, b + step)
            outputs = left.grads[part].mT @ right.grads[part]  # [B, o, p]
            if i == j:
                rows, columns = torch.tril_indices(o, o, device=outputs.device)
                outputs = outputs[:, rows, columns]
            inputs = (left.inputs[part].unsqueeze(2) * right.inputs[part].unsqueeze(1)).flatten(1)
            outputs = outputs.flatten(1)
            if (i, j) not in self._sums:
                self._sums[i, j] = outputs.T @ inputs
            else:
                self._sums[i, j].addmm_(outputs.T, inputs)

    def matrix(self) -> Tensor:
        """H [P, P], float64; frees the sums."""
        last = self._pieces[-1]
        total = last.inputs.new_empty(last.first + last.size, last.first + last.size)
        for i, left in enumerate(self._pieces):
            for j, right in enumerate(self._pieces[: i + 1]):
                (d, o), (e, p) = left.shape, right.shape
                found = self._sums.pop((i, j))
                if i == j:
                    rows, columns = torch.tril_indices(o, o, device=found.device)
                    found, block = found.reshape(-1, d, d), _block(total, left, left)
                    block[rows, columns] = block[columns, rows] = found  # a aᵀ is its own transpose
                else:
                    found = found.reshape(o, p, d, e)
                    _block(total, left, right).copy_(found)
                    _block(total, right, left).copy_(found.permute(1, 0, 3, 2))
        return total


def _block(matrix: Tensor, left: Piece, right: Piece) -> Tensor:
    """The view [o, p, d, e] of the rows of one tensor and the columns of another."""
    (d, o), (e, p) = left.shape, right.shape
    part = matrix[left.first : left.first + left.size, right.first : right.first + right.size]
    return part.unflatten(0, (o, d)).unflatten(2, (p, e)).transpose(1, 2)
