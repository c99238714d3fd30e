"""Log determinants by stochastic Lanczos quadrature (Ubaru, Chen & Saad 2017), with their standard error.

Tr f(A) = E zᵀ f(A) z over probes z with independent signs. The Lanczos process on A from z gives nodes θ_i
and weights τ_i with zᵀ f(A) z ≈ P Σ_i τ_i f(θ_i). The variation over probes gives the standard error; the error of
too few steps is not part of it, so the change from half of the steps is reported too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.lanczos import lanczos
from bnn_runner.curvature.psd import wide
from bnn_runner.laplace.solvers import Whitened
from bnn_runner.rng import generator


@dataclass
class Spectrum:
    """The spectrum of H from `probes` random vectors in `steps` Lanczos steps, for all isotropic precisions.

    With a `root` D [P] it is the spectrum of D H D, the curvature under the g-prior.
    """

    rows: GGNOperator
    seed: int
    probes: int
    steps: int
    root: Tensor | None = None
    _isotropic: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def log_det(self, precision: Tensor) -> Tensor:
        """One estimate of log det(I + H/λ) per probe, [Q] float64, differentiable in λ [1]."""
        if self._isotropic is None:
            rows, root = self.rows, self.root
            scaled = rows if root is None else Whitened(rows, root.to(rows.device, rows.dtype))
            self._isotropic = self._tridiagonal(scaled.product)
        return self._log_det(*self._isotropic, precision.cpu())

    def log_det_of(self, matrix: Whitened) -> Tensor:
        """One estimate of log det(I + H̃) per probe, [Q], by a separate Lanczos process."""
        return self._log_det(*self._tridiagonal(matrix.product), torch.ones(1, dtype=torch.float64))

    def truncation(self, precision: Tensor) -> float:
        """The change of the mean log determinant from half of the steps to all of them, nats, at λ [1]."""
        if self._isotropic is None:
            self.log_det(precision)
        assert self._isotropic is not None
        alpha, beta = self._isotropic
        half = alpha.shape[1] // 2
        fewer = self._log_det(alpha[:, :half], beta[:, : max(half - 1, 0)], precision.cpu())
        return float((self.log_det(precision).mean() - fewer.mean()).abs())

    def _log_det(self, alpha: Tensor, beta: Tensor, precision: Tensor) -> Tensor:
        matrix = torch.diag_embed(alpha) + torch.diag_embed(beta, 1) + torch.diag_embed(beta, -1)
        nodes, vectors = torch.linalg.eigh(matrix)
        weights = vectors[:, 0].square()
        return self.rows.size * (weights * torch.log1p(nodes.clamp_min(0) / precision)).sum(1)

    def _tridiagonal(self, product: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Diagonal [Q, m] and off-diagonal [Q, m − 1] of the Lanczos process from each probe, float64."""
        rows = self.rows
        with torch.no_grad():
            v = torch.stack([self._signs(q) for q in range(self.probes)]).to(rows.device, rows.dtype) / rows.size**0.5
            terms = list(islice(lanczos(product, v), min(self.steps, rows.size)))
        alphas, betas = zip(*terms, strict=True)
        return wide(torch.cat(alphas, 1)).cpu(), wide(torch.cat(betas, 1)[:, :-1]).cpu()

    def _signs(self, probe: int) -> Tensor:
        drawn = torch.randint(0, 2, (self.rows.size,), generator=generator(self.seed, "probe", probe))
        return 2.0 * drawn - 1
