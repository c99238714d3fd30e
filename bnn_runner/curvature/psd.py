"""Symmetric matrices in float64: eigendecompositions and Cholesky factors that count their repairs."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from bnn_runner.errors import RunFailed

STRIP = 384
"""Columns of a strip of a Gram matrix, wide enough for full speed."""


class Repairs(Counter[str]):
    """How often each numerical repair was made; part of every row."""


def wide(values: Tensor) -> Tensor:
    """In float64; moved to the CPU where the device does not support it (MPS)."""
    return (values.cpu() if values.device.type == "mps" else values).double()


def gram(rows: Tensor) -> Tensor:
    """RᵀR of rows [M, P]: [P, P]; a large one in strips from the diagonal down, which saves nearly half the work."""
    size = rows.shape[1]
    if rows.device.type != "cpu" or size < 2 * STRIP:
        return rows.T @ rows
    return mirrored(add_gram(rows.new_zeros(size, size), rows))


def add_gram(total: Tensor, rows: Tensor) -> Tensor:
    """Add RᵀR of rows [M, P] to `total` [P, P]: to its lower triangle, and to parts of the upper one."""
    size = len(total)
    for first in range(0, size, STRIP):
        last = min(first + STRIP, size)
        total[first:, first:last].addmm_(rows[:, first:].T, rows[:, first:last])
    return total


def mirrored(lower: Tensor) -> Tensor:
    """The same matrix with its upper triangle overwritten by the lower one, tile by tile (whole strips are slower)."""
    size = len(lower)
    for first in range(0, size, STRIP):
        last = min(first + STRIP, size)
        for begin in range(last, size, STRIP):
            lower[first:last, begin : begin + STRIP] = lower[begin : begin + STRIP, first:last].T
    return lower


def checked(matrix: Tensor, name: str) -> Tensor:
    """The same matrix. Raises `RunFailed` naming the tensor where a number is not finite."""
    # A finite sum has only finite terms, and costs a quarter of checking each.
    if not bool(torch.isfinite(matrix.sum())) and not bool(torch.isfinite(matrix).all()):
        raise RunFailed(
            f"the curvature of {name} must be finite, but it contains NaN or infinity: the network's outputs or their "
            "derivatives are not finite. Lower schedule.lr, and check the training curve in history.csv."
        )
    return matrix


def eigh(matrix: Tensor, name: str, repairs: Repairs) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending, negative ones set to 0) and eigenvectors of a positive semidefinite matrix.

    Where the device's solver fails or runs out of memory, the CPU's is used, and counted. Small negative eigenvalues by
    rounding are set to zero; one below −1e-5 of the largest, more than float32 sums explain, is counted.
    Weights without curvature (rows of zeros: units that no point reaches) are eigenvectors themselves and are not
    passed to the solver, which occasionally fails with many of them.

    Raises:
        RunFailed: the matrix is not finite, or the CPU's solver fails too.
    """
    matrix = checked(wide(matrix), name)  # the solver reads the lower triangle only
    reached = matrix.diagonal() != 0
    count = int(reached.sum())
    if count == len(matrix):
        values, vectors = _on_device_or_cpu(matrix, name, "eigh", repairs)
    else:
        own, idle = reached.nonzero().flatten(), (~reached).nonzero().flatten()
        values = matrix.new_zeros(len(matrix))
        if count:
            values[-count:], inner = _on_device_or_cpu(matrix[own[:, None], own], name, "eigh", repairs)
        vectors = torch.zeros_like(matrix)
        vectors[idle, torch.arange(len(idle), device=matrix.device)] = 1.0
        if count:
            vectors[own, -count:] = inner
    if len(values) and float(values.min()) < -1e-5 * max(float(values.max()), 1e-300):
        repairs["negative_eigenvalue"] += 1
    return values.clamp_min(0), vectors


def singular(rows: Tensor, name: str, repairs: Repairs) -> tuple[Tensor, Tensor]:
    """Eigenvalues [r] (ascending) and eigenvectors [P, r] of RᵀR for rows [M, P], r the smaller of both sizes.

    By singular values of the rows: right to 1e-32 of the largest, where those of a Gram matrix are to 1e-16, at
    several times the cost. Raises `RunFailed` where the CPU's solver fails too.
    """
    basis, triangle = torch.linalg.qr(checked(rows, name).T)
    try:
        left, sizes, _ = torch.linalg.svd(triangle, full_matrices=False)
    except RuntimeError:
        repairs["svd_on_cpu"] += 1
        try:
            left, sizes = (t.to(rows.device) for t in torch.linalg.svd(triangle.cpu(), full_matrices=False)[:2])
        except torch.linalg.LinAlgError as error:
            raise RunFailed(
                f"the decomposition of {name} failed on the CPU too ({error}). Raise the prior precision."
            ) from error
    return sizes.square().flip(0), (basis @ left).flip(1)


def _on_device_or_cpu(matrix: Tensor, name: str, kind: Literal["eigh", "cholesky_ex"], repairs: Repairs) -> Any:
    """Both results of a `torch.linalg` function, on the matrix's device; computed on the CPU where that fails."""
    solve: Any = getattr(torch.linalg, kind)
    try:
        first, second = solve(matrix)
        if kind == "cholesky_ex" or bool(torch.isfinite(second).all()):
            return first, second
    except RuntimeError:  # of the linear algebra, of the device's library, or of its memory
        pass
    repairs[f"{kind.removesuffix('_ex')}_on_cpu"] += 1
    try:
        return tuple(t.to(matrix.device) for t in solve(matrix.cpu()))
    except torch.linalg.LinAlgError as error:
        if kind == "eigh" and (found := _by_singular_values(matrix.cpu())) is not None:
            repairs["eigh_by_svd"] += 1
            return tuple(t.to(matrix.device) for t in found)
        raise RunFailed(
            f"Could not decompose {name}, on the CPU either ({error}). Its entries may span too many orders of "
            "magnitude. Raise the prior precision, or use method.structure=diag."
        ) from error


def _by_singular_values(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Ascending eigenvalues and eigenvectors of a symmetric matrix by another solver; None if it fails.

    A singular value is the absolute eigenvalue, and left and right vectors differ by its sign (except for pairs of a
    positive and a negative eigenvalue of equal size, which no curvature has).
    """
    lower = matrix.tril()
    try:
        left, sizes, right = torch.linalg.svd(lower + lower.tril(-1).mT)
    except torch.linalg.LinAlgError:
        return None
    values, order = (sizes * (left * right.mT).sum(0).sign()).sort()
    return values, left[:, order]


def cholesky(matrix: Tensor, name: str, repairs: Repairs) -> Tensor:
    """Lower Cholesky factor in float64, with jitter 1e-10, 1e-8, 1e-6 of the mean diagonal if necessary.

    Where the device's solver fails or has no memory, the CPU's is tried, and counted.

    Raises `RunFailed` with the smallest eigenvalue where even that does not help.
    """
    matrix = checked(wide(matrix), name)
    scale = matrix.diagonal().mean()
    for jitter in (0.0, 1e-10, 1e-8, 1e-6):
        moved = matrix + jitter * scale * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
        factor, info = _on_device_or_cpu(moved, name, "cholesky_ex", repairs)
        if int(info) == 0:
            if jitter:
                repairs[f"jitter_{jitter:g}"] += 1
            return factor
    smallest = float(torch.linalg.eigvalsh(matrix)[0])
    raise RunFailed(
        f"the posterior precision of {name} must be positive definite; its smallest eigenvalue is {smallest:.3g}. The "
        "prior is too weak compared with the curvature's rounding error. Raise the prior precision."
    )


def log_det(matrix: Tensor, name: str, repairs: Repairs) -> Tensor:
    """Log det of a positive definite matrix, differentiable once: d log det M = tr(M⁻¹ dM).

    Both use the same Cholesky factor; differentiating through the factorisation costs three times as much.
    """
    value: Tensor = _LogDet.apply(matrix, cholesky(matrix.detach(), name, repairs))
    return value


class _LogDet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, matrix: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return 2 * factor.diagonal().log().sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return slope * torch.cholesky_inverse(factor), None
