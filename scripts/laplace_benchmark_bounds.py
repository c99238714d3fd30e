"""Lower bounds for cases of `benchmark_laplace.py`: the arithmetic that no implementation can avoid, timed alone.

Each is the float64 algebra of 1,000 rows (points) of 3,051 weights, on arrays that already exist.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bnn_runner.curvature.psd import gram

ROWS, WEIGHTS = 1000, 3051


def _rows() -> torch.Tensor:
    return torch.randn(ROWS, WEIGHTS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _product() -> Callable[[], object]:
    rows = _rows()
    return lambda: gram(rows)


def _dual_side() -> Callable[[], object]:
    rows = _rows()

    def run() -> torch.Tensor:
        values, left = torch.linalg.eigh(gram(rows.T))
        return (rows.T @ left) * values.rsqrt()

    return run


BOUNDS: dict[str, Callable[[], Callable[[], object]]] = {
    "bound: this product alone": _product,
    "bound: Gram matrix of the smaller side, its eigenvectors, and those of H": _dual_side,
}
