"""Whether chains have mixed, and how many independent draws they are worth, for any scalars along the chains.

Shapes: [L, M, D] for L chains of M draws of D scalars (network outputs at fixed points, say). References:
Vehtari, Gelman, Simpson, Carpenter & Bürkner (2021), "Rank-normalization, folding, and localization"; Geyer
(1992) for the initial sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEWEST = 4
"""Draws per chain that either number requires."""


def split_chains(values: Tensor) -> Tensor:
    """[2L, M // 2, D]: each chain's halves, so that a chain that still drifts differs from itself."""
    half = values.shape[1] // 2
    return torch.cat([values[:, :half], values[:, -half:]])


def rank_normalised(values: Tensor) -> Tensor:
    """Normal quantiles of each scalar's ranks, Φ⁻¹((r − 3/8) / (S + 1/4)); ties have the same rank."""
    flat = values.double().reshape(-1, values.shape[-1])
    ordered = flat.sort(dim=0).values.mT.contiguous()
    own = flat.mT.contiguous()
    low, high = torch.searchsorted(ordered, own), torch.searchsorted(ordered, own, right=True)
    ranks = (low + high + 1).double() / 2
    return torch.special.ndtri((ranks - 0.375) / (len(flat) + 0.25)).mT.reshape(values.shape)


def plain_rhat(chains: Tensor) -> Tensor:
    """√(((n−1)/n W + B/n) / W) over chains [C, n, D]; NaN where nothing varies."""
    n = chains.shape[1]
    within = chains.var(1).mean(0)
    between = chains.mean(1).var(0)
    return (((n - 1) / n * within + between) / within).sqrt()


def rhat(values: Tensor) -> Tensor:
    """Rank-normalised split R-hat [D], the larger of location and (folded) scale (Vehtari et al. 2021, §4.1).

    NaN with fewer than four draws a chain, or where a scalar never changes.
    """
    if values.shape[1] < FEWEST:
        return torch.full(values.shape[-1:], float("nan"), dtype=torch.float64)
    values = values.double()
    median = values.reshape(-1, values.shape[-1]).median(0).values
    folded = (values - median).abs()
    return torch.maximum(*(plain_rhat(split_chains(rank_normalised(v))) for v in (values, folded)))


def effective_draws(values: Tensor) -> Tensor:
    """Effective sample size [D] of the mean, over all chains together, by Geyer's initial monotone sequence.

    With s²₊ the pooled variance and W the mean variance within split chains, the autocorrelation at lag t is
    1 − (W − mean autocovariance at t) / s²₊ (Vehtari et al. 2021, eq. 10); its sums over pairs of lags are
    taken while positive, and never rising. At most S log₁₀ S; NaN where nothing varies.
    """
    size = values.shape[0] * values.shape[1]
    if values.shape[1] < FEWEST:
        return torch.full(values.shape[-1:], float("nan"), dtype=torch.float64)
    chains = split_chains(values.double())
    n = chains.shape[1]
    covariance = autocovariance(chains).mean(0)  # [n, D]
    within = covariance[0] * n / (n - 1)
    pooled = within * (n - 1) / n + chains.mean(1).var(0)
    correlation = 1 - (within - covariance * n / (n - 1)) / pooled
    correlation[0] = 1
    pairs = correlation[: n // 2 * 2].reshape(n // 2, 2, -1).sum(1)
    positive = (pairs > 0).cumprod(0)
    pairs = pairs.cummin(0).values * positive
    time = (2 * pairs.sum(0) - 1).clamp_min(1 / torch.log10(torch.tensor(float(size))))
    return torch.where(pooled > 0, size / time, float("nan"))


def autocovariance(chains: Tensor) -> Tensor:
    """Autocovariance at lags 0 … n−1, [C, n, D], each over n (biased, as the sum over lags wants it)."""
    n = chains.shape[1]
    centred = chains - chains.mean(1, keepdim=True)
    spectrum = torch.fft.rfft(centred, n=2 * n, dim=1)
    return torch.fft.irfft(spectrum.abs().square(), n=2 * n, dim=1)[:, :n] / n
