"""Joint log-likelihoods of blocks of test points, and whether they have converged in the number of draws.

A block is `anchors` [M, k] (positions of k points in the test set) and `counts` [M, k], how often
each is repeated; its log-likelihood is log sum_s w_s prod_j p(y_j | f_s(x_j))^count_j.

Convergence. The log-mean-exp of few draws is biased low, and the bias falls about as 1/S, so
the change from S/2 to S is about the bias that remains at S. The values at S/4 and S/2 are both
compared with the one at S, by the paired differences d_m over blocks: the score is "not
converged" when |mean d| > 2 se(d) + tolerance * tau, with tolerance in nats per point. Finite
posteriors (MAP, ensembles) are exact with their own members and are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from bnn_runner.metrics.scores import NAN
from bnn_runner.rng import generator
from bnn_runner.scoring import Evaluation, Score

MIN_DRAWS = 8  # fewer leave nothing to compare at S/4
PIECE = 4_000_000  # numbers gathered at once


@dataclass(frozen=True)
class Blocks:
    """M blocks over one permutation: positions [M, k] in the test set and repeats [M, k] (None: once each)."""

    anchors: Tensor
    counts: Tensor | None = None

    def expanded(self) -> Tensor:
        """Positions [M, tau] with repeats (every block has the same tau)."""
        if self.counts is None:
            return self.anchors
        flat = torch.repeat_interleave(self.anchors.reshape(-1), self.counts.reshape(-1))
        return flat.reshape(len(self.anchors), -1)


def permutations(ids: Tensor, repeats: int, seed: int, kind: str) -> Iterator[Tensor]:
    """`repeats` permutations [N] of the test set, the same for every method.

    Positions are sorted by point id, then permuted by a stream that depends on (seed, kind,
    N, repeat) only: with distinct ids, a block has the same points in whatever order the set is stored.
    """
    order = torch.argsort(ids, stable=True)
    for repeat in range(repeats):
        stream = generator(seed, "eval", kind, len(ids), repeat)
        yield order[torch.randperm(len(ids), generator=stream)]


def block_terms(loglik: Tensor, log_weights: Tensor, blocks: Blocks, prefixes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-likelihoods of blocks from the first S' draws, and the effective number of draws.

    Args:
        loglik: log p(y_n | f_s(x_n)), [N, S] (points first).
        log_weights: of the draws, [S].
        blocks: M blocks.
        prefixes: the numbers S' of draws, ascending.

    Returns:
        Log-likelihoods [len(prefixes), M]; effective draws [M] of all S, 1 / the sum of squared normalised weights
        of the draws given the block's labels (1 means that one draw dominates).
    """
    step = max(1, PIECE // loglik.shape[1])
    values, effective = [], []
    for start in range(0, len(blocks.anchors), step):
        sums = _sums(loglik, blocks, slice(start, start + step)).double() + log_weights  # [m, S]
        totals, squares = _cumulative(sums, prefixes)
        values.append(totals - torch.stack([torch.logsumexp(log_weights[:s], 0) for s in prefixes]).unsqueeze(1))
        effective.append(torch.exp(2 * totals[-1] - squares))
    return torch.cat(values, 1), torch.cat(effective)


def _sums(loglik: Tensor, blocks: Blocks, part: slice) -> Tensor:
    """Sum over a block's points (with repeats) for each draw, [m, S]."""
    anchors = blocks.anchors[part]
    if blocks.counts is None:
        return embedding_bag(anchors, loglik, mode="sum")
    counts = blocks.counts[part]
    sums = embedding_bag(anchors, loglik, mode="sum", per_sample_weights=counts.to(loglik.dtype))
    broken = sums.isnan().any(1)
    if broken.any():
        # a point with count 0 does not contribute, even where its log-likelihood is -inf (0 * inf is NaN)
        terms, times = loglik[anchors[broken]], counts[broken].unsqueeze(-1)
        sums[broken] = torch.where(times > 0, terms * times, torch.zeros_like(terms)).sum(1)
    return sums


def _cumulative(sums: Tensor, prefixes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the first s columns of [m, S] for every s of `prefixes`, and that of twice all columns.

    One exponential per number: each segment between prefixes is summed relative to its largest term.
    """
    totals, squares = [], []
    for first, last in zip([0, *prefixes[:-1]], prefixes, strict=True):
        stretch = sums[:, first:last]
        peak = stretch.amax(1, keepdim=True)
        peak = torch.where(torch.isinf(peak), torch.zeros_like(peak), peak)  # all terms may be -inf
        terms = torch.exp(stretch - peak)
        totals.append(terms.sum(1).log() + peak[:, 0])
        squares.append(terms.square_().sum(1).log() + 2 * peak[:, 0])
    running = [totals[0]]
    for total in totals[1:]:
        running.append(torch.logaddexp(running[-1], total))
    return torch.stack(running), torch.logsumexp(torch.stack(squares), 0)


def mean_over_blocks(values: Tensor) -> tuple[float, float]:
    """Mean of [R, M] and its standard error: sd over the M blocks of one permutation / sqrt(M).

    Permutations share their points, so R of them do not make the error sqrt(R) smaller.
    """
    mean = float(values.mean())
    if values.shape[1] < 2:
        return mean, NAN
    return mean, math.sqrt(float(values.var(dim=1).mean()) / values.shape[1])


def draw_scores(
    metric: str, evaluation: Evaluation, repeats: Sequence[Blocks], tau: int, tolerance: float, **fields: Any
) -> list[Score]:
    """The joint score from draws; for a posterior that is not finite, followed by its convergence.

    Args:
        metric: name of the score.
        evaluation: with log-likelihoods of the test split.
        repeats: blocks of each permutation.
        tau: points per block.
        tolerance: in nats per point, of the convergence check.
        **fields: further fields of the scores.

    Returns:
        The score; then `<metric>_at_draws` with draws = S/4, S/2 and S, and `<metric>_effective_draws`, the mean
        over blocks.
    """
    loglik = evaluation.test.loglik
    assert loglik is not None
    by_point = loglik.T.contiguous()  # rows of draws, so that gathering points reads whole rows
    num_draws = len(loglik)
    log_weights = evaluation.log_weights.double()
    compared = not evaluation.finite and num_draws >= MIN_DRAWS
    prefixes = [num_draws // 4, num_draws // 2, num_draws] if compared else [num_draws]
    pairs = [block_terms(by_point, log_weights, blocks, prefixes) for blocks in repeats]
    values = torch.stack([value for value, _ in pairs], 1)  # [prefixes, R, M]
    effective = torch.stack([e for _, e in pairs])
    fields = {"better": "higher", "unit": "nats per block", "tau": tau, "n": values.shape[-1], **fields}
    note = fields.pop("note", "")
    status = "ok"
    if not evaluation.finite:
        status, reason = _status(values, tau, tolerance, num_draws)
        note = "; ".join(part for part in (note, reason) if part)
    mean, error = mean_over_blocks(values[-1])
    if not math.isfinite(mean):
        note = "; ".join(part for part in (note, "not finite") if part)
    scores = [Score(metric, mean, error, draws=num_draws, status=status, note=note, **fields)]
    if evaluation.finite:
        return scores
    if compared:
        for s, value in zip(prefixes, values, strict=True):
            mean, error = mean_over_blocks(value)
            scores.append(Score(f"{metric}_at_draws", mean, error, draws=s, **fields))
    fields |= {"unit": "draws"}
    mean, error = mean_over_blocks(effective)
    scores.append(Score(f"{metric}_effective_draws", mean, error, draws=num_draws, **fields))
    return scores


def _status(values: Tensor, tau: int, tolerance: float, num_draws: int) -> tuple[str, str]:
    """Status and reason, by the convergence check of the module's docstring; `values` are [prefixes, R, M]."""
    if len(values) == 1:
        return "not converged", f"{num_draws} draws are too few to judge convergence (at least {MIN_DRAWS})"
    for label, value in (("S/4", values[0]), ("S/2", values[1])):
        difference, error = mean_over_blocks(values[-1] - value)
        allowed = 2 * (0.0 if math.isnan(error) else error) + tolerance * tau
        if not abs(difference) <= allowed:
            return "not converged", f"changes by {difference:+.3g} nats from {label} to S draws (allowed {allowed:.3g})"
    return "ok", ""
