"""Exact log-likelihoods of points and blocks under a Gaussian predictive (regression)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bnn_runner.evaluation.closed_form import gaussian_log_prob
from bnn_runner.metrics.blocks import Blocks
from bnn_runner.scoring import Evaluation

PIECE = 4_000_000  # numbers of covariance blocks held at once

NOISE_DIFFERS = "the noise differs between draws, so the joint of repeated points is not Gaussian"


def exact_points(evaluation: Evaluation, name: str) -> Tensor | None:
    """Exact log-densities [1, N] of the targets of a split; None where the predictive is not a known Gaussian."""
    split, joint = evaluation.splits[name], evaluation.gaussian_joint
    if split.exact_loglik is not None:
        values = split.exact_loglik.double()
    elif name == "test" and joint is not None and split.targets is not None:
        variance = joint.covariance.diagonal().double()
        residual = split.targets[:, 0].double() - joint.mean.double()
        values = -0.5 * (residual.square() / variance + variance.log() + math.log(2 * math.pi))
    else:
        return None
    return values.unsqueeze(0) if torch.isfinite(values).all() else None


def exact_blocks(evaluation: Evaluation, repeats: Sequence[Blocks]) -> tuple[Tensor | None, str]:
    """Exact log-likelihoods [R, M] of the test set's blocks, or None and why (nothing without a Gaussian joint).

    A point repeated n times in a block is n observations with the same label y of one function
    value f, with noise of their own: prod N(y; f, s^2) = c N(y; f, s^2 / n) with
    log c = -(n - 1) / 2 log(2 pi s^2) - log(n) / 2. So a block is one Gaussian over its distinct
    points, which is regular however small the noise is.
    """
    joint, targets = evaluation.gaussian_joint, evaluation.test.targets
    if joint is None or targets is None:
        return None, ""
    y, mean, covariance = targets[:, 0].double(), joint.mean.double(), joint.covariance.double()
    noise = None
    if any(blocks.counts is not None for blocks in repeats):
        noise = noise_variance(evaluation)
        if noise is None:
            return None, NOISE_DIFFERS
    values = torch.stack([block_values(y - mean, covariance, noise, blocks) for blocks in repeats])
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        return None, f"the exact Gaussian is singular in double precision in {bad} of {values.numel()} blocks"
    return values, ""


def noise_variance(evaluation: Evaluation) -> Tensor | None:
    """Variance [N] of each test target given the function, original units; None where it differs between draws."""
    test, joint = evaluation.test, evaluation.gaussian_joint
    if joint is not None and joint.noise is not None:
        return joint.noise.double()
    if test.variances is None or len(test.variances) != 1:
        return None
    noise = test.variances[0, :, 0].double()
    if test.epistemic is not None:
        noise = noise - test.epistemic[:, 0].double()
    return noise.expand(len(test.ids))


def block_values(residual: Tensor, covariance: Tensor, noise: Tensor | None, blocks: Blocks) -> Tensor:
    """Log-densities [M] of blocks.

    Args:
        residual: target less mean, [N].
        covariance: of the targets, noise included, [N, N].
        noise: its part that repeats of a point do not share, [N]; needed where blocks have counts.
        blocks: M blocks of k points.
    """
    size = blocks.anchors.shape[1]
    step = max(1, PIECE // size**2)
    values = []
    for start in range(0, len(blocks.anchors), step):
        part = slice(start, start + step)
        anchors = blocks.anchors[part]
        inside = covariance[anchors.unsqueeze(2), anchors.unsqueeze(1)]  # [m, k, k]
        apart = residual[anchors]
        constant = torch.zeros(len(anchors), dtype=torch.float64)
        if blocks.counts is not None:
            assert noise is not None
            times, single = blocks.counts[part].double(), noise[anchors]
            drawn = times > 0
            often = times.clamp(min=1)
            terms = -0.5 * ((often - 1) * (2 * math.pi * single).log() + often.log())
            # A point drawn no time gets a row and a column of the unit matrix, and its density at 0 is taken out again.
            terms = torch.where(drawn, terms, torch.full_like(terms, 0.5 * math.log(2 * math.pi)))
            constant = terms.sum(1)
            both = drawn.unsqueeze(2) & drawn.unsqueeze(1)
            inside = torch.where(both, inside, torch.zeros_like(inside))
            diagonal = torch.where(drawn, single / often - single, torch.ones_like(single))
            inside = inside + torch.diag_embed(diagonal)
            apart = torch.where(drawn, apart, torch.zeros_like(apart))
        values.append(gaussian_log_prob(apart, torch.zeros_like(apart), inside) + constant)
    return torch.cat(values)
