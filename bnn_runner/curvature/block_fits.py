"""Fits of block-diagonal curvature in one or two passes over the training set.

Each takes Jacobians Rᵀ∂f batch after batch (from a function that starts a new pass), and returns a `BlockCurvature`.
Products of Jacobians are computed in float64: in float32, zero eigenvalues become 1e-7 of the largest one, which
under a weak prior counts as information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from bnn_runner.curvature.block_curvature import BlockCurvature
from bnn_runner.curvature.blocks import Block, DiagonalBlock, FullBlock, KroneckerBlock
from bnn_runner.curvature.conv_patches import Patches
from bnn_runner.curvature.groups import Group, each_layer, each_tensor, with_joint_biases
from bnn_runner.curvature.jacobian_forms import FLOATS_CACHED, OuterProductJacobian, TensorJacobian
from bnn_runner.curvature.jacobians import BatchJacobians, Jacobians
from bnn_runner.curvature.psd import Repairs, checked, eigh, gram, wide
from bnn_runner.curvature.weighted_gram import few_at_once, one_position
from bnn_runner.runtime.memory import memory_limit

Pass = Callable[[], Iterator[BatchJacobians]]
Sharing = Literal["expand", "reduce"]


def fit_diagonal(jacobians: Jacobians, batches: Pass) -> BlockCurvature:
    """The exact diagonal of the curvature, H_jj = Σ_n Σ_c (Rᵀ J)²_cj.

    A layer's dense Jacobian is formed for a few points at a time.
    """
    sums: dict[str, Tensor] = {}
    for batch in batches():
        for name, j in batch.tensors.items():
            sums[name] = sums.get(name, 0) + squares(j)
    groups = each_tensor(jacobians.names)
    return _curvature(jacobians, groups, [DiagonalBlock(checked(sums[g.name], g.name)) for g in groups])


def squares(jacobian: TensorJacobian) -> Tensor:
    """Σ_b Σ_c of the squared entries, [P_g] float64; sums of one sign, which lose no digits in the Jacobian's dtype."""
    if (pair := one_position(jacobian)) is not None:
        a, g = pair
        return wide((g.square().sum(1).T @ a.square()).reshape(-1))
    if isinstance(jacobian, OuterProductJacobian):
        total = wide(jacobian.grads.new_zeros(jacobian.size))
        for piece in few_at_once(jacobian):
            total += wide(piece.dense().square_().sum((0, 1)))
        return total
    return wide(jacobian.dense().square().sum((0, 1)))


def fit_layers(jacobians: Jacobians, batches: Pass, repairs: Repairs) -> BlockCurvature:
    """The exact block of each layer (weight and bias together).

    Raises:
        RunFailed: the blocks do not fit in memory.
    """
    groups, sizes = each_layer(jacobians.names), jacobians.sizes()
    widest = max(groups, key=lambda g: g.size(sizes))
    memory_limit().reserve(
        f"a block for each of {len(groups)} layers ({widest.name} alone has {widest.size(sizes):,} weights)",
        sum(3 * 8 * g.size(sizes) ** 2 for g in groups),
        "Use method.structure=kfac, ekfac or diag.",
    )
    sums: dict[str, Tensor] = {}
    for batch in batches():
        for group in groups:
            rows = wide(group.jacobian(batch.tensors).dense().flatten(0, 1))
            sums[group.name] = sums.get(group.name, 0) + gram(rows)
    return _curvature(jacobians, groups, [FullBlock(*eigh(sums[g.name], g.name, repairs)) for g in groups])


def fit_kfac(
    jacobians: Jacobians, batches: Pass, repairs: Repairs, sharing: Sharing = "expand", joint_bias: bool = False
) -> BlockCurvature:
    """KFAC (Martens & Grosse 2015; Grosse & Martens 2016; expand and reduce: Eschenhagen et al. 2023).

    For a weight at T positions, expand: A = (1/NT) Σ a aᵀ, G = Σ_n Σ_t g B gᵀ over the whole training
    set, H ≈ G ⊗ A; reduce: inputs are averaged and derivatives summed over positions first. A bias has
    the block G, or with `joint_bias` its weight's factors, with a one appended to a. Norm scales and
    shifts have their exact block; a tensor of any other module has its exact diagonal.

    Args:
        jacobians: of the weights of the basis.
        batches: starts a pass over the training set.
        repairs: counts numerical repairs.
        sharing: expand or reduce.
        joint_bias: whether weight and bias form one matrix.

    Raises:
        RunFailed: the factors do not fit in memory, or are not finite.
    """
    matrices = [name for name in jacobians.names if jacobians.rule(name) == "matrix"]
    biases = {name for name in jacobians.names if jacobians.rule(name) == "bias"}
    if joint_bias:
        paired = [name for name in matrices if name.removesuffix("weight") + "bias" in biases]
        groups = with_joint_biases(jacobians.names, paired)
    else:
        groups = each_tensor(jacobians.names)
    memory_limit().reserve(
        f"Kronecker factors of {len(matrices)} weight matrices",
        sum(_factor_bytes(jacobians.network.parameters[name]) for name in matrices),
        "Use method.structure=diag, or method.weights=last_layer.",
    )
    factors_a: dict[str, Tensor] = {}
    factors_g: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for batch in batches():
        for group in groups:
            j = group.jacobian(batch.tensors)
            if isinstance(j, OuterProductJacobian):
                j = _shared(j, sharing)
                factors_a[group.name] = factors_a.get(group.name, 0) + (
                    j.read.gram() if isinstance(j.read, Patches) else _gram(j.read)
                )
                factors_g[group.name] = factors_g.get(group.name, 0) + _gram(j.grads.flatten(0, 1))
                counts[group.name] = counts.get(group.name, 0) + j.read.shape[0] * j.read.shape[2]
            elif (
                group.name not in biases or _weight_of(group) not in factors_g
            ):  # a bias next to its weight has the weight's output factor
                general = jacobians.rule(group.name) == "general"
                part = squares(j) if general else gram(wide(j.dense().flatten(0, 1)))
                exact[group.name] = exact.get(group.name, 0) + part
    blocks: list[Block] = []
    for group in groups:
        name = group.name
        if name in factors_a:
            values_a, vectors_a = eigh(factors_a.pop(name).div_(counts[name]), f"{name} (input factor)", repairs)
            values_g, vectors_g = eigh(factors_g[name], f"{name} (output factor)", repairs)
            blocks.append(KroneckerBlock(vectors_a, vectors_g, torch.outer(values_g, values_a).reshape(-1)))
        elif name in biases and _weight_of(group) in factors_g:
            blocks.append(FullBlock(*eigh(factors_g[_weight_of(group)], name, repairs)))
        elif jacobians.rule(name) == "general":
            blocks.append(DiagonalBlock(checked(exact[name], name)))
        else:
            blocks.append(FullBlock(*eigh(exact[name], name, repairs)))
    return _curvature(jacobians, groups, blocks)


def fit_ekfac(
    jacobians: Jacobians, batches: Pass, repairs: Repairs, sharing: Sharing = "expand", joint_bias: bool = False
) -> BlockCurvature:
    """EKFAC (George et al. 2018): KFAC's eigenbasis with the eigenvalues that are best in it.

    In the basis Q each block is Q diag(s) Qᵀ with s_i = Σ_n Σ_c (Rᵀ J Q)²_ci, the diagonal of the
    exact block there: of all matrices with these eigenvectors, the nearest to it in Frobenius norm.
    Cost: a second pass over the data, with dense Jacobians of a few points where a layer has several positions.
    The arguments are those of `fit_kfac`.
    """
    kfac = fit_kfac(jacobians, batches, repairs, sharing, joint_bias)
    sums: dict[str, Tensor] = {}
    for batch in batches():
        for group, block in zip(kfac.groups, kfac.blocks, strict=True):
            j = group.jacobian(batch.tensors)
            if isinstance(block, KroneckerBlock):
                assert isinstance(j, OuterProductJacobian)
                part = squares(block.rotated(j))
            elif isinstance(block, FullBlock):
                dense = j.dense()
                part = wide((dense @ block.vectors.to(dense)).square().sum((0, 1)))
            else:
                continue  # the exact diagonal stays
            sums[group.name] = sums.get(group.name, 0) + part
    blocks: list[Block] = []
    for group, block in zip(kfac.groups, kfac.blocks, strict=True):
        if isinstance(block, KroneckerBlock):
            block = replace(block, spectrum=checked(sums[group.name], group.name))
        elif isinstance(block, FullBlock):
            block = replace(block, values=checked(sums[group.name], group.name))
        blocks.append(block)
    return replace(kfac, blocks=tuple(blocks))


def _factor_bytes(weight: Tensor) -> int:
    """Both factors of a weight [o, ...], float64, with their eigenvectors."""
    outputs, inputs = len(weight), weight[0].numel()
    return 2 * 8 * (outputs**2 + inputs**2)


def _weight_of(group: Group) -> str:
    """The name of the weight that belongs to a bias."""
    return group.name.removesuffix("bias") + "weight"


def _shared(jacobian: OuterProductJacobian, sharing: Sharing) -> OuterProductJacobian:
    """The Jacobian for the factors: position by position, or with the positions combined first."""
    if sharing == "expand":
        return jacobian
    return OuterProductJacobian(jacobian.inputs.mean(-1, keepdim=True), jacobian.grads.sum(-1, keepdim=True))


def _gram(values: Tensor) -> Tensor:
    """Σ_b Σ_t v vᵀ of [B, n, T]: [n, n] float64, point by point where that writes less memory, else as one product."""
    if values.shape[1] > values.shape[2]:
        return gram(wide(values.transpose(0, 1).flatten(1)).T)
    total = wide(values[:0]).new_zeros(values.shape[1], values.shape[1])
    for few in values.split(max(1, FLOATS_CACHED // values[:1].numel())):
        few = wide(few)
        total += torch.bmm(few, few.mT).sum(0)
    return total


def _curvature(jacobians: Jacobians, groups: tuple[Group, ...], blocks: list[Block]) -> BlockCurvature:
    sample = jacobians.network.parameters[jacobians.names[0]]
    return BlockCurvature(groups, tuple(blocks), jacobians.sizes(), sample.dtype, sample.device)
