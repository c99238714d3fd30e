"""Accumulators of the predictions of draws for one split: filled chunk by chunk, read once at the end.

Shapes: S draws, N points, K outputs; a chunk is outputs [s, b, K] of draws `first`, ... at points `start`, ...
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from bnn_runner.scoring import SplitEvaluation
from bnn_runner.tasks import Split

WIDE_LIMIT = 20_000_000  # more numbers than this are kept in float32


def storage_dtype(count: int) -> torch.dtype:
    """float64 for up to WIDE_LIMIT numbers (160 MB), float32 above."""
    return torch.float64 if count <= WIDE_LIMIT else torch.float32


class Accumulator(Protocol):
    """Accumulates the outputs of draws at points."""

    def add(self, first: int, start: int, outputs: Tensor, y: Tensor | None, likelihood: Any) -> None:
        """Take in a chunk.

        Args:
            first: the chunk's first draw.
            start: the chunk's first point.
            outputs: [s, b, K].
            y: the targets of these points, if there are any.
            likelihood: that of these draws.
        """
        ...

    def result(self) -> SplitEvaluation:
        """What all chunks together say."""
        ...

    def notes(self) -> list[str]:
        """What a reader of the scores should know."""
        ...


class _LogLik:
    """The table of log-likelihoods [S, N] of a split with targets, and which draws were not finite."""

    def __init__(self, split: Split, num_draws: int) -> None:
        self.split = split
        self.bad_draws = torch.zeros(num_draws, dtype=torch.bool)
        shape = (num_draws, len(split))
        self.dtype = storage_dtype(num_draws * len(split))
        self.loglik = None if split.targets is None else torch.empty(shape, dtype=self.dtype)

    def put(self, first: int, start: int, outputs: Tensor, values: Tensor | None) -> tuple[slice, slice]:
        """Store `values` [s, b]; returns their place, (draws, points)."""
        rows = slice(first, first + outputs.shape[0])
        columns = slice(start, start + outputs.shape[1])
        self.bad_draws[rows] |= ~torch.isfinite(outputs).all(-1).all(-1).cpu()
        if self.loglik is not None and values is not None:
            self.loglik[rows, columns] = values.cpu().to(self.dtype)
        return rows, columns

    def notes(self) -> list[str]:
        notes = []
        bad = int(self.bad_draws.sum())
        if bad:
            notes.append(f"{bad} of {len(self.bad_draws)} draws have outputs that are not finite")
        if self.loglik is not None and self.dtype == torch.float32:
            notes.append("more than 20 million log-likelihoods are stored in float32")
        return notes


class ClassAccumulator:
    """Classes: log p(y|f_s) by log-softmax, weighted mean probabilities, weighted mean of each draw's entropy."""

    def __init__(self, split: Split, num_draws: int, weights: Tensor) -> None:
        self._table = _LogLik(split, num_draws)
        self._weights = weights
        self._probs: Tensor | None = None
        self._entropy = torch.zeros(len(split), dtype=torch.float64)

    def add(self, first: int, start: int, outputs: Tensor, y: Tensor | None, likelihood: Any) -> None:
        log_probs = torch.log_softmax(outputs, dim=-1)  # [s, b, K]
        values = None
        if y is not None:
            values = log_probs.gather(-1, y.expand(log_probs.shape[:2]).unsqueeze(-1)).squeeze(-1)
        rows, columns = self._table.put(first, start, outputs, values)
        probs = log_probs.exp()
        # p log p is 0 at p = 0, where log p may be -inf
        entropy = -torch.where(probs > 0, probs * log_probs, torch.zeros_like(probs)).sum(-1)
        entropy = torch.where(torch.isnan(probs).any(-1), torch.full_like(entropy, torch.nan), entropy)
        weights = self._weights[rows].to(outputs.device, outputs.dtype)
        if self._probs is None:
            self._probs = torch.zeros(len(self._entropy), outputs.shape[-1], dtype=torch.float64)
        self._probs[columns] += torch.einsum("s,sbk->bk", weights, probs).cpu().double()
        self._entropy[columns] += (weights @ entropy).cpu().double()

    def result(self) -> SplitEvaluation:
        split, table = self._table.split, self._table
        return SplitEvaluation(
            ids=split.ids.cpu(),
            loglik=table.loglik,
            targets=None if split.targets is None else split.targets.cpu(),
            mean_probs=self._probs,
            mean_entropy=self._entropy,
        )

    def notes(self) -> list[str]:
        return self._table.notes()


class RegressionAccumulator:
    """Regression: log-likelihood, mean and variance of y under each draw, in original units.

    y_original = target_mean + target_scale * y, so log p_original = log p - sum log target_scale.
    """

    def __init__(self, split: Split, num_draws: int, target_mean: Tensor, target_scale: Tensor) -> None:
        self._table = _LogLik(split, num_draws)
        self._shift, self._scale = target_mean.cpu().double(), target_scale.cpu().double()
        self._means: Tensor | None = None
        self._variances: dict[int, list[Tensor]] = {}  # by first draw of a chunk, one per batch
        self._batch_sizes: dict[int, int] = {}  # by first point

    def add(self, first: int, start: int, outputs: Tensor, y: Tensor | None, likelihood: Any) -> None:
        values = None
        if y is not None:
            values = likelihood.log_prob(outputs, y).cpu().double() - self._scale.log().sum()
        rows, columns = self._table.put(first, start, outputs, values)
        mean, variance = likelihood.mean_variance(outputs)  # [s, b, K], and broadcastable to it
        mean = self._shift + self._scale * mean.cpu().double()
        if self._means is None:
            shape = (len(self._table.bad_draws), len(self._table.split), mean.shape[-1])
            self._means = torch.empty(shape, dtype=storage_dtype(shape[0] * shape[1] * shape[2]))
        self._means[rows, columns] = mean.to(self._means.dtype)
        variance = self._scale.square() * variance.cpu().double()
        variance = variance.reshape((1,) * (3 - variance.dim()) + tuple(variance.shape))
        # Constant noise is stored once. What is constant within this chunk may differ in the next one: see `result`.
        rows_apart, columns_apart = variance.shape[0] > 1, variance.shape[1] > 1
        full = variance.expand(mean.shape[0] if rows_apart else 1, mean.shape[1] if columns_apart else 1, mean.shape[2])
        self._variances.setdefault(first, []).append(full.contiguous())
        self._batch_sizes[start] = mean.shape[1]

    def result(self) -> SplitEvaluation:
        split, table = self._table.split, self._table
        targets = None
        if split.targets is not None:
            targets = self._shift + self._scale * split.targets.cpu().double()
        return SplitEvaluation(
            ids=split.ids.cpu(), loglik=table.loglik, targets=targets, means=self._means, variances=self._merged()
        )

    def _merged(self) -> Tensor:
        assert self._means is not None
        firsts = sorted(self._variances)
        chunk_sizes = [b - a for a, b in zip(firsts, [*firsts[1:], len(self._means)], strict=True)]
        batch_sizes = [self._batch_sizes[start] for start in sorted(self._batch_sizes)]
        chunks = [_join(self._variances[first], batch_sizes, dim=1) for first in firsts]
        merged = _join(chunks, chunk_sizes, dim=0)
        if torch.equal(merged, merged[:1].expand_as(merged)):
            merged = merged[:1].clone()
        return merged.to(storage_dtype(merged.numel()))

    def notes(self) -> list[str]:
        return self._table.notes()


def _join(parts: list[Tensor], sizes: list[int], dim: int) -> Tensor:
    """Concatenate along `dim`; parts of size 1 there that are all the same number stay one (a broadcast axis)."""
    if all(p.shape == parts[0].shape and p.shape[dim] == 1 and torch.equal(p, parts[0]) for p in parts):
        return parts[0]
    other = 1 - dim
    width = max(p.shape[other] for p in parts)
    expanded = []
    for part, size in zip(parts, sizes, strict=True):
        shape = [0, 0, part.shape[2]]
        shape[dim], shape[other] = size, width
        expanded.append(part.expand(shape))
    return torch.cat(expanded, dim=dim)
