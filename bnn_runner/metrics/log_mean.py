"""Log-mean-exp over draws: an estimate with little bias, its error, and a rule for when to believe it.

Letters: S draws in G groups, M blocks in each of R permutations. A block's likelihood
Z = sum_s w_s l_s is a mean over draws of the posterior; p_s = w_s l_s / Z are the normalised weights of the draws
given the block's labels, and 1 / sum_s p_s^2 its effective number of draws (Kong 1992).

Bias. log Z from S draws is too low by about (1 / effective - 1 / S) / 2. The jackknife over single
draws (Quenouille 1956; Efron and Stein 1981) takes that off:

    log Z + (S - 1) / S (sum_s h(p_s) - S h(1 / S)),    h(p) = -log(1 - p) - p.

h is exact for the largest p_s, and its series p^2 / 2 for the others, which makes it a sum that
costs nothing more. The correction is at most log S, which is what one draw that decides alone can lack.
Where draws are few for a block this about halves the bias; it never removes all of it.

Error. The blocks share their draws, so the draws' own Monte Carlo error does not shrink with M. It
is taken by the jackknife over G groups of consecutive draws (batches, right for chains as well) of
the mean over all blocks, and is added in quadrature to the error over blocks.

Rule. Two things tell how much bias is left.
- The change d from the mean of the two halves of the draws to all of them. It has no term that is
  linear in the draws: it is bias alone. What is left is at most about CHANGE_FACTOR times |d|.
- The whole correction c_m of starved blocks, those with fewer than STARVED effective draws. A few points
  far from every draw make such blocks, and their bias hardly falls with S, so d does not show it.
  With u the mean over all blocks of c_m (0 where a block is not starved), what is left is at most
  about STARVED_FACTOR times u.

A score is "not converged" when the larger of the two exceeds its standard error, or `tolerance`
nats per label where that is more, and when the harmonic mean over blocks of the effective draws is
below STARVED. In simulations with a known answer (Gaussian functions of many
ranks, noise levels, block sizes and draws, with and without outliers, and classes) fewer than 5 %
of the scores whose bias is larger than their standard error pass: see
`outputs/results/joint_convergence.md`, made by `scripts/joint_convergence.py`. The factors were
chosen there. No rule sees a mode of the posterior that no draw has found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from bnn_runner.metrics.blocks import Blocks, GroupSums, group_sums

MIN_DRAWS = 8
"""Fewer leave nothing to compare between quarters of the draws."""
GROUPS = 16
"""Of draws, for the jackknife; a multiple of 4, so that halves and quarters are whole groups."""
STARVED = 3.0
"""Blocks with fewer effective draws than this have a bias that the correction does not reach."""
CHANGE_FACTOR, STARVED_FACTOR = 2.0, 30.0
"""Remaining bias, at most, in units of the change from halves and of the starved blocks' correction."""

NEAR_ONE = 1 - 1e-12


def group_bounds(num_draws: int) -> list[int]:
    """Where the groups of draws begin and end: 16, 8 or 4 groups, one below MIN_DRAWS.

    >>> group_bounds(8), group_bounds(3)
    ([0, 2, 4, 6, 8], [0, 3])
    """
    groups = 1 if num_draws < MIN_DRAWS else min(GROUPS, 4 * 2 ** int(math.log2(num_draws / MIN_DRAWS)))
    return [num_draws * g // groups for g in range(groups + 1)]


@dataclass(frozen=True)
class LogMean:
    """The log-likelihoods of blocks from draws.

    `sums` are [G, R, M] of the normalised terms log w_s + log l_s; `weights` and `weight_squares`
    [G] the sums of w_s and w_s^2 over each group.
    """

    sums: GroupSums
    weights: Tensor
    weight_squares: Tensor

    @property
    def num_groups(self) -> int:
        return len(self.weights)

    def values(self, groups: slice = slice(None)) -> Tensor:
        """Log-likelihoods [R, M] from these groups of draws, with the bias taken off."""
        raw, correction = self.parts(groups)
        draws = self.weights[groups].sum().square() / self.weight_squares[groups].sum()
        return raw + correction.clamp(max=float(draws.log()))

    def parts(self, groups: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Log-mean-exp and the whole jackknife correction, both [R, M]."""
        totals, largest = self.sums.totals[groups], self.sums.largest[groups]
        squares = torch.logsumexp(self.sums.squares[groups], 0)
        # The sum without its largest term: of that term's group what is left by a difference, of the others everything.
        own = totals + torch.log1p(-torch.exp(largest - totals).clamp(max=1))
        is_top = torch.zeros_like(own, dtype=torch.bool).scatter_(0, largest.argmax(0, keepdim=True), True)
        others = torch.logsumexp(torch.where(is_top, own, totals), 0)
        weight, square = self.weights[groups].sum(), self.weight_squares[groups].sum()
        return _parts(torch.logsumexp(totals, 0), squares, largest.amax(0), others, weight, square)

    @cached_property
    def effective(self) -> Tensor:
        """Effective draws [R, M]; NaN where no draw makes a block's labels possible."""
        return torch.exp(2 * torch.logsumexp(self.sums.totals, 0) - torch.logsumexp(self.sums.squares, 0))

    def draws_error(self) -> float:
        """Monte Carlo standard error of the mean over all blocks, by the jackknife over groups of draws."""
        groups = self.num_groups
        if groups < 2:
            return math.nan
        # In units of each block's largest sum; running sums from both ends leave one group out without cancellation.
        peak = self.sums.totals.amax(0)
        peak = torch.where(torch.isinf(peak), torch.zeros_like(peak), peak)
        tiny = torch.finfo(torch.float64).tiny
        totals = _without_one(torch.exp(self.sums.totals - peak)).clamp(min=tiny).log()
        squares = _without_one(torch.exp(self.sums.squares - 2 * peak)).clamp(min=tiny).log()
        largest = _largest_without_one(self.sums.largest - peak)
        weight = (1 - self.weights).view(-1, 1, 1)
        square = (self.weight_squares.sum() - self.weight_squares).view(-1, 1, 1)
        others = totals + torch.log1p(-torch.exp(largest - totals).clamp(max=NEAR_ONE))
        raw, correction = _parts(totals, squares, largest, others, weight, square)
        left_out = (raw + torch.minimum(correction, (weight.square() / square).log())).mean((1, 2))
        return float(((groups - 1) / groups * (left_out - left_out.mean()).square().sum()).sqrt())

    def remaining_bias(self) -> float:
        """About how large the bias of the mean over blocks may still be, by the rule of the module; inf if unknown."""
        half = self.num_groups // 2
        if half < 2:
            return math.inf
        halves = sum(
            float(self.weights[part].sum() * self.values(part).mean()) for part in (slice(0, half), slice(half, None))
        )
        change = abs(float(self.values().mean()) - halves)
        starved = self.effective < STARVED
        _, correction = self.parts()
        alone = starved & (correction == 0)  # all other draws call the labels impossible
        spent = float(torch.where(starved, correction, torch.zeros_like(correction)).mean())
        bias = max(CHANGE_FACTOR * change, STARVED_FACTOR * spent)
        return bias if math.isfinite(bias) and not alone.any() else math.inf


def log_mean(loglik: Tensor, log_weights: Tensor, repeats: Sequence[Blocks], bounds: Sequence[int]) -> LogMean:
    """Log-likelihoods of the blocks of R permutations.

    Args:
        loglik: [S, N] of single points.
        log_weights: normalised, [S].
        repeats: M blocks of each permutation.
        bounds: of the groups of draws.
    """
    anchors = torch.cat([blocks.anchors for blocks in repeats])
    counts = None if repeats[0].counts is None else torch.cat([b.counts for b in repeats if b.counts is not None])
    by_point = loglik.T.contiguous()  # rows of draws, so that gathering points reads whole rows
    sums = group_sums(by_point, log_weights, Blocks(anchors, counts), bounds)
    shape = (len(bounds) - 1, len(repeats), -1)
    sums = GroupSums(sums.totals.view(shape), sums.squares.view(shape), sums.largest.view(shape))
    weights = log_weights.exp()
    pieces = [weights[a:b] for a, b in pairwise(bounds)]
    return LogMean(sums, torch.stack([p.sum() for p in pieces]), torch.stack([p.square().sum() for p in pieces]))


def _parts(
    total: Tensor, squares: Tensor, largest: Tensor, others: Tensor, weight: Tensor, weight_square: Tensor
) -> tuple[Tensor, Tensor]:
    """log(sum / weight), and the jackknife's correction of it (0 where the sum is or would be 0).

    `total`, `squares`, `largest` as in `GroupSums`; `others` the log of the sum without its largest term.
    """
    draws = weight.square() / weight_square  # S, where all count alike
    top = torch.exp(largest - total)
    spent = total - others - top  # h of the largest
    rest = (torch.exp(squares - 2 * total).clamp(max=1) - top.square()).clamp(min=0)
    share = 1 / draws
    alike = -torch.log1p(-share.clamp(max=NEAR_ONE)) - share + (draws - 1) / 2 * share.square()  # of draws all alike
    correction = (draws - 1) / draws * (spent + rest / 2 - alike)
    usable = torch.isfinite(total) & torch.isfinite(others)
    return total - weight.log(), torch.where(usable, correction, torch.zeros_like(total))


def _without_one(values: Tensor) -> Tensor:
    """Sums [G, ...] of positive numbers over all groups but g."""
    zero = torch.zeros_like(values[:1])
    before = torch.cat([zero, values[:-1].cumsum(0)])
    after = torch.cat([values[1:].flip(0).cumsum(0).flip(0), zero])
    return before + after


def _largest_without_one(values: Tensor) -> Tensor:
    """Largest [G, ...] over all groups but g."""
    lowest = torch.full_like(values[:1], -math.inf)
    before = torch.cat([lowest, values[:-1].cummax(0).values])
    after = torch.cat([values[1:].flip(0).cummax(0).values.flip(0), lowest])
    return torch.maximum(before, after)
