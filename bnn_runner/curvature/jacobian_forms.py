"""The Jacobian of one parameter tensor at a batch of points, in the form of its layer.

Letters: B points, C directions of the outputs, T positions of a layer, P_t numbers of the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bnn_runner.curvature.conv_patches import Patches
from bnn_runner.curvature.psd import wide

FLOATS_AT_ONCE = 8_000_000
"""Numbers in one intermediate array: larger ones exceed the caches, and fresh memory costs more than arithmetic."""

FLOATS_CACHED = 1_000_000
"""Numbers in an array that is summed immediately."""


def forms_dense(positions: int, outputs: int, inputs: int, directions: int, draws: int) -> bool:
    """Whether multiplying `draws` by the dense Jacobian of a weight is less work than by its factors."""
    through_activations = draws * positions * outputs * (inputs + directions)
    return directions * outputs * inputs * (positions + draws) < through_activations


@dataclass(frozen=True)
class OuterProductJacobian:
    """Jacobian of C outputs at B points with respect to a weight matrix: Σ_t g_t a_tᵀ.

    `read` is a [B, d, T], or the images that a convolution takes it from; `grads` g is [B, C, o, T]; the
    weight has o × d numbers.
    """

    read: Tensor | Patches
    grads: Tensor

    @property
    def inputs(self) -> Tensor:
        """A [B, d, T]; patches are unfolded each time, so that only one layer's exist at once."""
        return self.read.unfolded() if isinstance(self.read, Patches) else self.read

    @property
    def size(self) -> int:
        """Weights of the tensor."""
        return self.grads.shape[2] * self.read.shape[1]

    def dense(self) -> Tensor:
        """[B, C, o·d]."""
        b, c, o, t = self.grads.shape
        if t == 1:
            product = self.grads * self.inputs.reshape(b, 1, 1, -1)
        else:
            product = torch.bmm(self.grads.reshape(b, c * o, t), self.inputs.mT)
        return product.reshape(b, c, -1)

    def apply(self, deltas: Tensor) -> Tensor:
        """J δ_s for deltas [S, o·d]: [B, C, S], in the order of products that needs less work."""
        b, c, o, t = self.grads.shape
        d, s = self.read.shape[1], len(deltas)
        if forms_dense(t, o, d, c, s):
            return (self.dense().reshape(b * c, -1) @ deltas.T).reshape(b, c, s)
        out = deltas.new_empty(b, c, s)
        rows = self.inputs.mT.reshape(b * t, d)
        grads = self.grads.transpose(2, 3).reshape(b, c, t * o)
        step = max(1, FLOATS_AT_ONCE // (b * t * o))
        for i in range(0, s, step):
            part = deltas[i : i + step].reshape(-1, o, d)
            moved = rows @ part.reshape(-1, d).T  # [B·T, S·o]
            moved = moved.reshape(b, t, len(part), o).transpose(2, 3).reshape(b, t * o, len(part))
            out[..., i : i + step] = torch.bmm(grads, moved)
        return out

    def vjp(self, values: Tensor) -> Tensor:
        """Σ_b J_bᵀ u_b for values [B, C, S]: [S, o·d]."""
        b, c, o, t = self.grads.shape
        d, s = self.read.shape[1], values.shape[-1]
        out = values.new_empty(s, o * d)
        inputs = self.inputs.mT.reshape(b * t, d)
        grads = self.grads.reshape(b, c, o * t).mT
        step = max(1, FLOATS_AT_ONCE // (b * t * o))
        for i in range(0, s, step):
            met = torch.bmm(grads, values[..., i : i + step]).reshape(b, o, t, -1)
            met = met.permute(3, 1, 0, 2).reshape(-1, b * t)  # [S·o, B·T]
            out[i : i + step] = (met @ inputs).reshape(-1, o * d)
        return out


@dataclass(frozen=True)
class DenseJacobian:
    """Jacobian of C outputs at B points with respect to any tensor, [B, C, P_t]."""

    values: Tensor

    @property
    def size(self) -> int:
        """Weights of the tensor."""
        return self.values.shape[-1]

    def dense(self) -> Tensor:
        return self.values

    def apply(self, deltas: Tensor) -> Tensor:
        return self.values @ deltas.T

    def vjp(self, values: Tensor) -> Tensor:
        return values.flatten(0, 1).T @ self.values.flatten(0, 1)


@dataclass(frozen=True)
class EmbeddingJacobian:
    """Jacobian of C outputs at B points with respect to an embedding [V, D]: g_t in row id_t, summed over T.

    `ids` are [B, T], `grads` g [B, C, T, D]; `rows` is V.
    """

    ids: Tensor
    grads: Tensor
    rows: int

    @property
    def size(self) -> int:
        """Weights of the tensor."""
        return self.rows * self.grads.shape[-1]

    def dense(self) -> Tensor:
        """[B, C, V·D], nearly all of it zero."""
        out = self.grads.new_zeros(*self.grads.shape[:2], self.rows, self.grads.shape[-1])
        index = self.ids[:, None, :, None].expand_as(self.grads)
        return out.scatter_add_(2, index, self.grads).flatten(2)

    def apply(self, deltas: Tensor) -> Tensor:
        """J δ_s for deltas [S, V·D]: [B, C, S]."""
        tables = deltas.reshape(len(deltas), self.rows, -1)
        return torch.stack([torch.einsum("bctd,btd->bc", self.grads, table[self.ids]) for table in tables], dim=-1)

    def vjp(self, values: Tensor) -> Tensor:
        """Σ_b J_bᵀ u_b for values [B, C]: [V·D]."""
        moved = torch.einsum("bctd,bcs->sbtd", self.grads, values)
        out = moved.new_zeros(len(moved), self.rows, moved.shape[-1])
        return out.index_add_(1, self.ids.flatten(), moved.flatten(1, 2)).flatten(1)


TensorJacobian = OuterProductJacobian | DenseJacobian | EmbeddingJacobian


def entries(jacobian: TensorJacobian, index: Tensor) -> DenseJacobian:
    """The Jacobian with respect to the weights at `index` [n] of the tensor; for few of them it is not formed whole."""
    if isinstance(jacobian, OuterProductJacobian) and len(index) * jacobian.read.shape[-1] < jacobian.size:
        width = jacobian.read.shape[1]
        inputs, grads = jacobian.inputs[:, index % width], jacobian.grads[:, :, index // width]
        return DenseJacobian(torch.einsum("bnt,bcnt->bcn", inputs, grads))
    return DenseJacobian(jacobian.dense()[..., index])


def widened(jacobian: TensorJacobian) -> TensorJacobian:
    """The same Jacobian in float64."""
    if isinstance(jacobian, DenseJacobian):
        return DenseJacobian(wide(jacobian.values))
    if isinstance(jacobian, EmbeddingJacobian):
        return replace(jacobian, grads=wide(jacobian.grads))
    read = jacobian.read
    read = replace(read, images=wide(read.images)) if isinstance(read, Patches) else wide(read)
    return OuterProductJacobian(read, wide(jacobian.grads))
