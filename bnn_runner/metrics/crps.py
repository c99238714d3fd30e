"""Continuous ranked probability score of a mixture of Gaussians."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bnn_runner.evaluation.predictive import log_weights
from bnn_runner.metrics.centre import with_centre
from bnn_runner.metrics.checks import positive_integers
from bnn_runner.metrics.scores import mean_score
from bnn_runner.scoring import Evaluation, Score

PIECE = 4_000_000  # numbers held at once


def expected_distance(mean: Tensor, variance: Tensor) -> Tensor:
    """E|Z| for Z ~ N(mean, variance): 2 s phi(m/s) + m (2 Phi(m/s) - 1), and |m| where the variance is zero."""
    sd = variance.sqrt()
    ratio = mean / sd.clamp(min=torch.finfo(mean.dtype).tiny)
    density = torch.exp(-0.5 * ratio.square()) / math.sqrt(2 * math.pi)
    return 2 * sd * density + mean * torch.erf(ratio / math.sqrt(2))


def pair_offsets(num_draws: int, num_offsets: int) -> list[int]:
    """Offsets o of the draw pairs (i, i + o mod S): evenly spaced in 1..S/2, at most `num_offsets`."""
    half = num_draws // 2
    count = min(half, max(1, num_offsets))
    return sorted({1 + round(i * (half - 1) / max(count - 1, 1)) for i in range(count)}) if half else []


@dataclass(frozen=True)
class CRPS:
    """`crps`: mean over points (and outputs) of E|Y - y| - E|Y - Y'| / 2, in the target's own units.

    For Gaussian mixtures every expectation is known (Grimit et al. 2006): sum_i w_i A(y - m_i, v_i)
    - 1/2 sum_ij w_i w_j A(m_i - m_j, v_i + v_j). The double sum is exact while N K S^2 is at most
    `max_terms`; above it the diagonal stays exact and the rest is summed over pairs (i, i + o mod S)
    at evenly spaced offsets o, scaled to the total weight of the pairs i != j. It is deterministic.
    """

    max_terms: int

    def __post_init__(self) -> None:
        positive_integers("crps", max_terms=self.max_terms)

    def __call__(self, evaluation: Evaluation, seed: int) -> list[Score]:
        test = evaluation.test
        if test.means is None or test.variances is None or test.targets is None:
            return []
        weights = log_weights(evaluation).exp()
        num_draws, num_points, num_outputs = test.means.shape
        exact = num_draws**2 * num_points * num_outputs <= self.max_terms
        offsets = list(range(1, num_draws)) if exact else self._offsets(num_draws, num_points * num_outputs)
        values = []
        step = max(1, PIECE // (num_draws * num_outputs))
        for start in range(0, num_points, step):
            part = slice(start, start + step)
            means = test.means[:, part].double()
            shared = test.variances.shape[1] == 1
            variances = (test.variances if shared else test.variances[:, part]).double().expand(means.shape)
            values.append(_mixture_crps(test.targets[part].double(), means, variances, weights, offsets).mean(-1))
        note = "" if exact else f"pairs of draws at {len(offsets)} of {num_draws // 2} offsets"
        fields = {"better": "lower", "unit": "target units", "note": note}
        return with_centre(self, evaluation, seed, [mean_score("crps", torch.cat(values), evaluation, **fields)])

    def _offsets(self, num_draws: int, num_targets: int) -> list[int]:
        return pair_offsets(num_draws, self.max_terms // (num_draws * num_targets))


def _mixture_crps(y: Tensor, means: Tensor, variances: Tensor, weights: Tensor, offsets: list[int]) -> Tensor:
    """CRPS [N, K] with y [N, K], means and variances [S, N, K]; the double sum over the pairs at `offsets`."""
    weight = weights[:, None, None]
    distance = (weight * expected_distance(means - y, variances)).sum(0)
    diagonal = weights.square()
    spread = (diagonal[:, None, None] * expected_distance(torch.zeros_like(means), 2 * variances)).sum(0)
    pairs, used = torch.zeros_like(spread), 0.0
    for offset in offsets:
        product = weights * weights.roll(-offset)
        term = expected_distance(means - means.roll(-offset, 0), variances + variances.roll(-offset, 0))
        pairs += (product[:, None, None] * term).sum(0)
        used += float(product.sum())
    if used > 0:
        spread = spread + pairs * (float(1 - diagonal.sum()) / used)
    return distance - 0.5 * spread
