"""Validation scores of prior precisions: log-likelihoods of validation points and blocks under the method's predictive.

Every candidate is scored by the same random numbers. Outputs are drawn in pairs f ± δ: near the network itself the
score's change is quadratic in δ, and single draws would hide it behind a linear term that is noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from bnn_runner.base import Likelihood, ValidationScore
from bnn_runner.curvature.base import Curvature, WeightGaussian
from bnn_runner.curvature.jacobians import Jacobians
from bnn_runner.curvature.psd import wide
from bnn_runner.errors import RunFailed
from bnn_runner.evaluation.closed_form import gaussian_log_prob
from bnn_runner.laplace.posterior import SampledNetworks
from bnn_runner.laplace.weak_prior import too_weak
from bnn_runner.metrics.blocks import Blocks, permutations, uniform_counts
from bnn_runner.metrics.log_mean import log_mean
from bnn_runner.models.likelihoods import Gaussian
from bnn_runner.rng import generator
from bnn_runner.runtime.console import Progress
from bnn_runner.tasks import Split, Task

VALIDATION_DRAWS = 200
"""Draws, half of them the others mirrored at the centre."""
TAU, KAPPA, REPEATS = 10, 2, 10
"""Labels in a block, different points in a dyadic block, and permutations of the validation part."""
DRAW_FLOATS = 2**26
"""Numbers in the weights of draws that exist at once."""
_AT_ONCE = 20
Scores = list[dict[ValidationScore, Tensor]]
STAGE = "validation scores"


class Validation(Protocol):
    """Scores candidate precisions by a method's own predictive, as `validation_scores` does by the tangent model's."""

    def __call__(
        self,
        task: Task,
        jacobians: Jacobians,
        curvature: Curvature,
        candidates: Sequence[Tensor],
        scores: Sequence[ValidationScore] = ("marginal",),
        points: int | None = None,
        progress: Progress = lambda stage, done, total: None,
    ) -> Scores: ...


@torch.no_grad()
def validation_scores(
    task: Task,
    jacobians: Jacobians,
    curvature: Curvature,
    candidates: Sequence[Tensor],
    scores: Sequence[ValidationScore] = ("marginal",),
    points: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Scores:
    """Log-likelihoods of the validation part, in nats and target units, for each candidate; NaN where it is too weak.

    marginal [1, V], of V points. Regression: by the exact Gaussian predictive. Classes and heteroscedastic regression
    have none: by `VALIDATION_DRAWS` draws of each point's outputs. (Probit would mistake the logits' common shift,
    which affects neither softmax nor data, for uncertainty, and so shrink the posterior to nothing.) dyadic and joint
    [R, M], of M blocks in R permutations: by as many draws of the weights. One pass over the Jacobians for the
    marginal, one or more for joint scores.

    Args:
        task: its validation part is scored.
        jacobians: of the weights of the basis.
        curvature: H.
        candidates: precisions, each [T].
        scores: which ones.
        points: at most so many points, at random; None for all.
        progress: called after every batch of points.

    Raises:
        RunFailed: there are too few points for a block.
    """
    split = some_points(task.val, points)
    gaussians = [curvature.gaussian(c) for c in candidates]
    usable = {i: g for i, g in enumerate(gaussians) if not too_weak(g)}
    found: Scores = [{score: torch.full((1, 1), math.nan, dtype=torch.float64) for score in scores} for _ in candidates]
    shift = float(wide(task.target_scale).log().sum())
    if "marginal" in scores:
        for i, each in _marginals(task, split, jacobians, usable, progress).items():
            found[i]["marginal"] = each.unsqueeze(0) - shift
    joint = [score for score in scores if score != "marginal"]
    if joint:
        blocks = {score: _blocks(score, split.ids) for score in joint}
        for i, loglik in _draw_logliks(task, split, jacobians, usable, progress):
            found[i] |= {score: _of_blocks(loglik - shift, blocks[score]) for score in joint}
    return found


def some_points(split: Split, points: int | None) -> Split:
    """At most `points` points of a split, by a fixed random choice, in their order."""
    if points is None or len(split) <= points:
        return split
    chosen = torch.randperm(len(split), generator=generator(0, "validation points"))[:points]
    return split.subset(chosen.sort().values)


def _marginals(
    task: Task, split: Split, jacobians: Jacobians, gaussians: Mapping[int, WeightGaussian], progress: Progress
) -> dict[int, Tensor]:
    """Log-likelihoods of single points, [V] float64, under each Gaussian."""
    likelihood = jacobians.network.likelihood
    parts: dict[int, list[Tensor]] = {i: [] for i in gaussians}
    done = 0
    for x, y in split.batches(jacobians.batch_size(task.spec.num_outputs)):
        assert y is not None
        batch = jacobians(x)
        done += len(x)
        for i, gaussian in gaussians.items():
            covariance = gaussian.covariance(batch)
            if isinstance(likelihood, Gaussian):
                noise = torch.diag_embed(torch.exp(2 * likelihood.log_noise).expand(batch.outputs.shape))
                parts[i].append(wide(gaussian_log_prob(y, batch.outputs, covariance + noise)).cpu())
            else:
                parts[i].append(_sampled_log_prob(likelihood, y, batch.outputs, covariance).cpu())
        progress(STAGE, done, len(split))
    return {i: torch.cat(each) for i, each in parts.items()}


def _sampled_log_prob(likelihood: Likelihood, y: Tensor, mean: Tensor, covariance: Tensor) -> Tensor:
    """Log E p(y_b | f_b) [B] over outputs f_b ~ N(mean_b, covariance_b), by the same draws in every call, float64."""
    stream = generator(0, "validation outputs")
    half = VALIDATION_DRAWS // 2
    normal = torch.randn(half, 1, mean.shape[-1], generator=stream, dtype=torch.float64).to(mean)
    values, vectors = torch.linalg.eigh(covariance.to(mean))
    root = vectors * values.clamp_min(0).sqrt().unsqueeze(-2)  # [B, K, K]
    moved = (root @ normal.unsqueeze(-1)).squeeze(-1)  # [M, B, K]
    each = _mirrored(likelihood, y, mean, moved)
    return torch.logsumexp(each, 0) - math.log(len(each))


def _mirrored(likelihood: Likelihood, y: Tensor, mean: Tensor, moved: Tensor) -> Tensor:
    """Log p(y_b | f_b) [2S, B] at the outputs f = mean ± moved, moved [S, B, K], float64."""
    centre, away = wide(mean), wide(moved)
    return wide(likelihood.log_prob(torch.cat([centre + away, centre - away]), y.to(centre.device)))


def _draw_logliks(
    task: Task, split: Split, jacobians: Jacobians, gaussians: Mapping[int, WeightGaussian], progress: Progress
) -> Iterator[tuple[int, Tensor]]:
    """Log p(y_n | f_s(x_n)) of each draw and its mirror image, [S, V] float64, under one Gaussian after the other.

    A pass over the Jacobians serves as many candidates as `DRAW_FLOATS` allows.
    """
    likelihood, sizes, half = jacobians.network.likelihood, jacobians.sizes(), VALIDATION_DRAWS // 2
    at_once = max(1, DRAW_FLOATS // sum(sizes.values()))  # draws
    several = max(1, at_once // half)  # candidates
    order, done = list(gaussians), 0
    passes = -(-len(order) // several) * -(-half // at_once)
    for first in range(0, len(order), several):
        some = order[first : first + several]
        rows: dict[int, list[Tensor]] = {i: [] for i in some}
        for begin in range(0, half, at_once):
            end = min(begin + at_once, half)
            deltas = {i: gaussians[i].sample(0, begin, end).split(list(sizes.values()), dim=1) for i in some}
            parts: dict[int, list[Tensor]] = {i: [] for i in some}
            for x, y in split.batches(jacobians.batch_size(task.spec.num_outputs, use=end - begin)):
                assert y is not None
                batch = jacobians(x)
                for i in some:
                    pairs = zip(batch.tensors.values(), deltas[i], strict=True)
                    moved = [j.apply(d.contiguous().to(batch.outputs)) for j, d in pairs]
                    total = sum(moved[1:], moved[0]).permute(2, 0, 1)
                    parts[i].append(_mirrored(likelihood, y, batch.outputs, total).cpu())
                done += len(x)
                progress(STAGE, done, passes * len(split))
            for i in some:
                rows[i].append(torch.cat(parts[i], 1))
        for i in some:
            yield i, torch.cat(rows[i])


def _blocks(score: ValidationScore, ids: Tensor) -> list[Blocks]:
    """R permutations of the blocks of a joint score, made as its metric makes those of the test set.

    Raises `RunFailed` where there are too few points for one block.
    """
    size = KAPPA if score == "dyadic" else TAU
    count = len(ids) // size
    if count == 0:
        raise RunFailed(
            f"hyper.score={score} requires at least {size} validation points; there are {len(ids)}. Use "
            "hyper.score=marginal, or raise data.val_fraction."
        )
    blocks = []
    for repeat, order in enumerate(permutations(ids, REPEATS, 0, f"validation {score}")):
        anchors = order[: count * size].reshape(count, size)
        stream = generator(0, "validation", score, len(ids), repeat)
        counts = uniform_counts(count, KAPPA, TAU, stream) if score == "dyadic" else None
        blocks.append(Blocks(anchors, counts))
    return blocks


def _of_blocks(loglik: Tensor, blocks: Sequence[Blocks]) -> Tensor:
    """Log of the mean over draws of the likelihoods of blocks, [R, M], from log-likelihoods [S, V]."""
    count = len(loglik)
    weights = torch.full((count,), -math.log(count), dtype=torch.float64)
    return log_mean(loglik, weights, blocks, [0, count]).parts()[0]


@torch.no_grad()
def network_validation_scores(
    task: Task,
    jacobians: Jacobians,
    curvature: Curvature,
    candidates: Sequence[Tensor],
    scores: Sequence[ValidationScore] = ("marginal",),
    points: int | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> Scores:
    """The same for draws of the network itself: log E p(y | f(x, w* + δ)).

    By `VALIDATION_DRAWS` draws, from the same normals for every candidate.
    """
    split = some_points(task.val, points)
    likelihood = jacobians.network.likelihood
    shift = float(wide(task.target_scale).log().sum())
    blocks = {score: _blocks(score, split.ids) for score in scores if score != "marginal"}
    found: Scores = []
    for number, candidate in enumerate(candidates):
        progress(STAGE, number, len(candidates))
        gaussian = curvature.gaussian(candidate)
        if too_weak(gaussian):
            found.append({score: torch.full((1, 1), math.nan, dtype=torch.float64) for score in scores})
            continue
        networks = SampledNetworks(jacobians, gaussian, 0, 0, VALIDATION_DRAWS)
        rows = []
        for begin in range(0, VALIDATION_DRAWS, _AT_ONCE):
            some = networks[begin : begin + _AT_ONCE]
            each = [likelihood.log_prob(some(x), y) for x, y in split.batches(256) if y is not None]
            rows.append(wide(torch.cat(each, -1)).cpu())
        loglik = torch.cat(rows) - shift
        marginal = torch.logsumexp(loglik, 0, keepdim=True) - math.log(len(loglik))
        found.append({s: marginal if s == "marginal" else _of_blocks(loglik, blocks[s]) for s in scores})
    return found
