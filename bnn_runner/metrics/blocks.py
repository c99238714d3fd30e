"""Blocks of test points, and what each draw says about them: sums over groups of draws.

A block is `anchors` [M, k] (positions of k points in the test set) and `counts` [M, k], how often
each is repeated. Draw s with normalised weight w_s contributes the term
log w_s + sum_j count_j log p(y_j | f_s(x_j)); the block's log-likelihood is the log of the sum of
their exponentials. `bnn_runner.metrics.log_mean` makes scores of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from bnn_runner.rng import generator

PIECE = 4_000_000  # numbers gathered at once


@dataclass(frozen=True)
class Blocks:
    """M blocks over one permutation: positions [M, k] in the test set and repeats [M, k] (None: once each)."""

    anchors: Tensor
    counts: Tensor | None = None


@dataclass(frozen=True)
class GroupSums:
    """Of the terms t_s of each of M blocks, by G groups of consecutive draws, all [G, M].

    `totals`: log sum_s exp(t_s). `squares`: log sum_s exp(2 t_s). `largest`: max_s t_s.
    """

    totals: Tensor
    squares: Tensor
    largest: Tensor


def permutations(ids: Tensor, repeats: int, seed: int, kind: str) -> Iterator[Tensor]:
    """`repeats` permutations [N] of the test set, the same for every method.

    Positions are sorted by point id, then permuted by a stream that depends on (seed, kind,
    N, repeat) only: with distinct ids, a block has the same points in whatever order the set is stored.
    """
    order = torch.argsort(ids, stable=True)
    for repeat in range(repeats):
        stream = generator(seed, "eval", kind, len(ids), repeat)
        yield order[torch.randperm(len(ids), generator=stream)]


def uniform_counts(num_blocks: int, kappa: int, tau: int, stream: torch.Generator) -> Tensor:
    """How often each of kappa anchors is repeated if tau are drawn uniformly with replacement, [M, kappa]."""
    chosen = torch.randint(kappa, (num_blocks, tau), generator=stream)
    return torch.zeros(num_blocks, kappa, dtype=torch.int64).scatter_add_(1, chosen, torch.ones_like(chosen))


def group_sums(loglik: Tensor, log_weights: Tensor, blocks: Blocks, bounds: Sequence[int]) -> GroupSums:
    """Sums over the draws bounds[g]..bounds[g + 1] for each group g.

    Args:
        loglik: [N, S], points first, so that gathering points reads whole rows.
        log_weights: [S].
        blocks: M blocks of points.
        bounds: G + 1 rising positions from 0 to S.
    """
    step = max(1, PIECE // loglik.shape[1])
    parts = []
    for start in range(0, len(blocks.anchors), step):
        terms = _sums(loglik, blocks, slice(start, start + step)).double() + log_weights  # [m, S]
        parts.append(torch.stack([_reduced(terms[:, a:b]) for a, b in pairwise(bounds)], 1))
    return GroupSums(*torch.cat(parts, 2))


def _sums(loglik: Tensor, blocks: Blocks, part: slice) -> Tensor:
    """Sum over a block's points (with repeats) for each draw, [m, S]."""
    anchors = blocks.anchors[part]
    if blocks.counts is None:
        return loglik[anchors[:, 0]] if anchors.shape[1] == 1 else embedding_bag(anchors, loglik, mode="sum")
    counts = blocks.counts[part]
    sums = embedding_bag(anchors, loglik, mode="sum", per_sample_weights=counts.to(loglik.dtype))
    broken = sums.isnan().any(1)
    if broken.any():
        # a point with count 0 does not contribute, even where its log-likelihood is -inf (0 * inf is NaN)
        terms, times = loglik[anchors[broken]], counts[broken].unsqueeze(-1)
        sums[broken] = torch.where(times > 0, terms * times, torch.zeros_like(terms)).sum(1)
    return sums


def _reduced(terms: Tensor) -> Tensor:
    """Of each row of [m, s]: log-sum-exp, log-sum-exp of twice the terms, and the largest term, [3, m].

    One exponential for each number, relative to the row's own largest term.
    """
    largest = terms.amax(1, keepdim=True)
    peak = torch.where(torch.isinf(largest), torch.zeros_like(largest), largest)  # all terms may be -inf
    scaled = torch.exp(terms - peak)
    total = scaled.sum(1).log() + peak[:, 0]
    squares = scaled.square_().sum(1).log() + 2 * peak[:, 0]
    return torch.stack([total, squares, largest[:, 0]])
