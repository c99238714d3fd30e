"""The Lanczos process of symmetric matrices given by their products, and the largest eigenvalue from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Diagonal αₖ and off-diagonal βₖ, each [Q, 1], of the tridiagonal matrices from unit vectors `start` [Q, P].

    `product` maps [Q, P] to [Q, P], row by row; each row may have its own matrix. Two vectors per row are kept, without
    reorthogonalisation: eigenvalues may then appear twice, which affects neither the largest one nor the
    quadrature of a function. A row whose Krylov space is exhausted gives βₖ = 0; the process ends when all are.
    """
    v = start
    before, last = torch.zeros_like(v), torch.zeros(len(v), 1).to(v)
    scale = torch.zeros(len(v), 1).to(v)
    while True:
        w = product(v) - last * before
        alpha = (w * v).sum(1, keepdim=True)
        w = w - alpha * v
        norm = w.norm(dim=1, keepdim=True)
        scale = torch.maximum(scale, alpha.abs() + last)
        # Below √eps of the matrix's scale it is rounding: the row's Krylov space is exhausted.
        last = torch.where(norm > torch.finfo(v.dtype).eps ** 0.5 * scale, norm, torch.zeros_like(norm))
        before, v = v, torch.where(last > 0, w / last, torch.zeros_like(w))
        yield alpha, last
        if not bool((last > 0).any()):
            return


def largest_eigenvalue(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int = 20, tolerance: float = 0.01
) -> Tensor:
    """The largest |eigenvalue| that the Lanczos process finds from each row of `start` [Q, P], [Q] float64.

    A lower bound. The process ends after `steps` products, or when two in a row have raised no estimate by
    more than `tolerance` (relative): for curvatures of networks, whose largest eigenvalues are well separated, after
    six to ten, where the power iteration takes twice as many. NaN where a product is not finite.
    """
    start = start / start.norm(dim=1, keepdim=True)
    alphas: list[Tensor] = []
    betas: list[Tensor] = []
    found, still = torch.zeros(len(start), dtype=torch.float64), 0
    for alpha, beta in islice(lanczos(product, start), steps):
        alphas.append(alpha.cpu().double())
        matrix = torch.diag_embed(torch.cat(alphas, 1))
        if betas:
            off = torch.cat(betas, 1)
            matrix = matrix + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
        if not bool(torch.isfinite(matrix).all()):
            return torch.full_like(found, math.nan)
        before, found = found, torch.linalg.eigvalsh(matrix).abs().amax(1)
        still = still + 1 if bool((found - before <= tolerance * found).all()) else 0
        if still == 2:
            break
        betas.append(beta.cpu().double())
    return found
