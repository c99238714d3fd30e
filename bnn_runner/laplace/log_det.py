"""Log determinants of curvatures that are known by products: exact where the rows are few, else between two bounds.

Tr f(A) = E zᵀ f(A) z over probes z with independent signs (Ubaru, Chen & Saad 2017). The Lanczos process on A from z
gives nodes θ_i and weights τ_i with zᵀ f(A) z ≈ P Σ_i τ_i f(θ_i). For f(x) = log(1 + x/λ), whose even derivatives are
negative and odd ones positive, Gauss quadrature is an upper bound and Gauss-Radau with a node at 0 a lower one (Golub &
Meurant 2010, theorems 6.4 and 6.5). Steps are added until both agree; the probes' spread gives the standard error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from bnn_runner.curvature.full import FullCurvature
from bnn_runner.curvature.ggn_operator import GGNOperator
from bnn_runner.curvature.lanczos import lanczos
from bnn_runner.curvature.psd import Repairs, gram, wide
from bnn_runner.laplace.solvers import Whitened
from bnn_runner.rng import generator

EXACT_ROWS = 3000
"""Size of the smaller side of kept rows up to which they are decomposed."""
FIRST_STEPS, GROWTH = 20, 1.5
"""Lanczos steps before the bounds are first compared, and by what factor they grow from one look to the next."""
CLOSE_NATS = 0.05
"""Half the distance of the bounds on ½ log det that always counts as close."""


@dataclass(frozen=True)
class Bracket:
    """Bounds on log det(I + H̃) as each probe sees it, [Q] float64; equal where it is exact."""

    lower: Tensor
    upper: Tensor
    exact: bool = False

    @property
    def samples(self) -> Tensor:
        """The middle of the bounds, [Q]."""
        return (self.lower + self.upper) / 2

    @property
    def standard_error(self) -> float:
        """Of ½ log det, from the probes' spread, in nats."""
        return 0.0 if self.exact else 0.5 * float(self.samples.detach().std()) / len(self.lower) ** 0.5

    @property
    def truncation(self) -> float:
        """Half the distance of the bounds on ½ log det, mean over the probes, in nats."""
        return 0.25 * float((self.upper - self.lower).detach().mean())

    @property
    def error(self) -> float:
        """Standard error and truncation together, in nats."""
        return float((self.standard_error**2 + self.truncation**2) ** 0.5)

    @property
    def close(self) -> bool:
        """Whether what is left out is less than what the probes leave open."""
        return self.truncation <= max(CLOSE_NATS, 0.5 * self.standard_error)


class Quadrature:
    """The Lanczos process from each of Q unit vectors, continued as far as a precision needs it."""

    def __init__(self, product: Callable[[Tensor], Tensor], start: Tensor, most: int) -> None:
        self._terms: Iterator[tuple[Tensor, Tensor]] = islice(lanczos(product, start), min(most, start.shape[1]))
        self._size = start.shape[1]
        self._alphas: list[Tensor] = []
        self._betas: list[Tensor] = []
        self._ended = False
        self._rules: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def bracket(self, precision: Tensor) -> Bracket:
        """Log det(I + A/λ) at λ [1], with as many steps as it takes; differentiable in λ."""
        if self._rules is None:
            self._continue(FIRST_STEPS)
        while not (found := self._now(precision)).close and not self._ended:
            self._continue(int(GROWTH * len(self._alphas)) - len(self._alphas))
        return found

    def _now(self, precision: Tensor) -> Bracket:
        assert self._rules is not None
        upper, lower = (
            self._size * (weights * torch.log1p(nodes / precision.cpu())).sum(1) for nodes, weights in self._rules
        )
        return Bracket(torch.minimum(lower, upper), upper)

    def _continue(self, count: int) -> None:
        before = len(self._alphas)
        with torch.no_grad():
            for alpha, beta in islice(self._terms, count):
                self._alphas.append(wide(alpha).cpu())
                self._betas.append(wide(beta).cpu())
        self._ended = len(self._alphas) < before + count
        self._rules = self._gauss_and_radau()

    def _gauss_and_radau(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Nodes and weights, [Q, m] and [Q, m + 1]; the last β is 0 where a process has used up its space."""
        alpha, beta = torch.cat(self._alphas, 1), torch.cat(self._betas, 1)
        nodes, vectors = torch.linalg.eigh(_tridiagonal(alpha, beta[:, :-1]))
        positive = nodes.clamp_min(1e-300).maximum(1e-16 * nodes[:, -1:])
        last = (beta[:, -1:].square() * vectors[:, -1].square() / positive).sum(1, keepdim=True)
        moved, rotated = torch.linalg.eigh(_tridiagonal(torch.cat([alpha, last], 1), beta))
        return (nodes.clamp_min(0), vectors[:, 0].square()), (moved.clamp_min(0), rotated[:, 0].square())


def _tridiagonal(diagonal: Tensor, off: Tensor) -> Tensor:
    return torch.diag_embed(diagonal) + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)


@dataclass
class Spectrum:
    """The spectrum of H as `probes` vectors see it in at most `steps` steps; one serves every isotropic precision.

    With a `root` D [P] it is the spectrum of D H D, the curvature under the g-prior.
    """

    rows: GGNOperator
    seed: int
    probes: int
    steps: int
    root: Tensor | None = None
    _isotropic: Quadrature | None = field(default=None, repr=False)

    def scaled(self, root: Tensor) -> Spectrum:
        return Spectrum(self.rows, self.seed, self.probes, self.steps, root)

    def bracket(self, precisions: Tensor, matrix: Whitened) -> Bracket:
        """Log det(I + H̃) between bounds; differentiable in one precision for all. `matrix` is H̃."""
        if not bool((precisions == precisions[0]).all()):
            return self._quadrature(matrix.product).bracket(torch.ones(1, dtype=torch.float64))
        if self._isotropic is None:
            rows, root = self.rows, self.root
            scaled = rows if root is None else Whitened(rows, wide(root.to(rows.device)))
            self._isotropic = self._quadrature(scaled.product)
        return self._isotropic.bracket(precisions[:1])

    def _quadrature(self, product: Callable[[Tensor], Tensor]) -> Quadrature:
        rows = self.rows
        start = wide(torch.stack([self._signs(q) for q in range(self.probes)]).to(rows.device))
        return Quadrature(product, start / rows.size**0.5, self.steps)

    def _signs(self, probe: int) -> Tensor:
        drawn = torch.randint(0, 2, (self.rows.size,), generator=generator(self.seed, "probe", probe))
        return 2.0 * drawn - 1


@dataclass
class ExactSpectrum:
    """The spectrum of kept rows, by a decomposition of their smaller side."""

    rows: GGNOperator
    repairs: Repairs
    root: Tensor | None = None
    _full: FullCurvature | None = field(default=None, repr=False)

    def scaled(self, root: Tensor) -> ExactSpectrum:
        return ExactSpectrum(self.rows, self.repairs, root)

    def bracket(self, precisions: Tensor, matrix: Whitened) -> Bracket:
        """Log det(I + H̃), exact; differentiable in the precisions."""
        if self._full is None:
            self._full = self._decomposed()
        equal = bool((precisions == precisions[0]).all())
        value = self._full.log_det_ratio(precisions[:1] if equal else precisions).cpu().reshape(1)
        return Bracket(value, value, exact=True)

    def _decomposed(self) -> FullCurvature:
        ((_, batch),) = self.rows.batches(1)
        assert batch.kept is not None
        kept, sizes = batch.kept.flatten(0, 1), self.rows.jacobians.sizes()
        kept = kept if self.root is None else kept * self.root.to(kept)
        if kept.shape[1] <= kept.shape[0]:
            return FullCurvature(None, gram(kept), sizes, kept.dtype, self.repairs)
        return FullCurvature(kept, None, sizes, kept.dtype, self.repairs)


def spectrum_of(
    rows: GGNOperator, seed: int, probes: int, steps: int, repairs: Repairs
) -> Spectrum | ExactSpectrum | None:
    """Exact where the rows are kept and their smaller side is small; None without probes."""
    if not probes:
        return None
    if rows.keeps and min(rows.size, len(rows) * rows.columns) <= EXACT_ROWS:
        return ExactSpectrum(rows, repairs)
    return Spectrum(rows, seed, probes, steps)
