"""Exact joint log-likelihoods of blocks under a Gaussian joint predictive (regression)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bnn_runner.evaluation.closed_form import gaussian_log_prob
from bnn_runner.metrics.blocks import Blocks, mean_over_blocks
from bnn_runner.scoring import Evaluation, Score

PIECE = 4_000_000  # numbers of covariance blocks held at once


def noise_variance(evaluation: Evaluation) -> Tensor | None:
    """Variance [N] of each test target given the function, original units; None where it differs between draws."""
    test = evaluation.test
    if test.variances is None or len(test.variances) != 1:
        return None
    noise = test.variances[0, :, 0].double()
    if test.epistemic is not None:
        noise = noise - test.epistemic[:, 0].double()
    return noise.expand(len(test.ids))


def exact_scores(
    metric: str, evaluation: Evaluation, repeats: Sequence[Blocks], tau: int, **fields: Any
) -> list[Score]:
    """`<metric>_exact`: the mean over blocks of log N(y_block; mean, covariance); empty without a Gaussian joint.

    A point repeated in a block is that many observations of one function value with independent noise,
    all with the same label y: its repeats share the covariance of f and not the noise.

    Args:
        metric: name of the score.
        evaluation: with the Gaussian joint of the test split.
        repeats: blocks of each permutation.
        tau: points per block.
        **fields: further fields of the score.
    """
    joint, targets = evaluation.gaussian_joint, evaluation.test.targets
    if joint is None or targets is None:
        return []
    fields = {"better": "higher", "unit": "nats per block", "tau": tau, **fields}
    repeated = any(blocks.counts is not None for blocks in repeats)
    noise = noise_variance(evaluation) if repeated else None
    if repeated and noise is None:
        fields["note"] = "the noise differs between draws, so the joint is not Gaussian"
        return [Score(f"{metric}_exact", float("nan"), status="n/a", **fields)]
    y, mean, covariance = targets[:, 0].double(), joint.mean.double(), joint.covariance.double()
    values = torch.stack([_block_values(y, mean, covariance, noise, blocks.expanded()) for blocks in repeats])
    score, error = mean_over_blocks(values)
    return [Score(f"{metric}_exact", score, error, n=values.shape[1], **fields)]


def _block_values(y: Tensor, mean: Tensor, covariance: Tensor, noise: Tensor | None, indices: Tensor) -> Tensor:
    """Log-densities [M] of the blocks at `indices` [M, tau], which may contain a point several times."""
    tau = indices.shape[1]
    step = max(1, PIECE // tau**2)
    values = []
    for index in indices.split(step):
        block = covariance[index.unsqueeze(2), index.unsqueeze(1)]  # [m, tau, tau]
        if noise is not None:
            twin = (index.unsqueeze(2) == index.unsqueeze(1)) & ~torch.eye(tau, dtype=torch.bool)
            block = block - twin * noise[index].unsqueeze(1)
        values.append(gaussian_log_prob(y[index], mean[index], block))
    return torch.cat(values)
